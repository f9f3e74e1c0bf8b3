"""Forecasts of numbers."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import memtrain
from conftest import tiny_rnn
from memtrain.errors import MemtrainError
from memtrain.generation.forecast import forecast_cases
from memtrain.shapes import Values
from series_testing import Linear, Season, small_models

A = torch.tensor([[0.9, 0.2], [-0.2, 0.9]])


def past_of(rows: int = 3, steps: int = 5, width: int = 2) -> torch.Tensor:
    return torch.randn(rows, steps, width, generator=torch.Generator().manual_seed(2))


def test_a_linear_system_is_continued_exactly():
    inputs = past_of()
    found = memtrain.forecast(Linear(A), inputs, 6, mean=True)
    expected, state = [], inputs[:, -1]
    for _ in range(6):
        state = state @ A
        expected.append(state)
    assert found.paths.shape == (1, 3, 6, 2)
    torch.testing.assert_close(found.paths[0], torch.stack(expected, dim=1))
    torch.testing.assert_close(found.mean(), found.median())


def test_known_numbers_belong_to_the_step_after_their_input():
    """y[t + 1] = y[t] @ A + u[t + 1], and inputs[t] = (y[t], u[t + 1])."""
    u = past_of(1, 12, 2)
    series = [torch.zeros(1, 2)]
    for t in range(11):
        series.append(series[-1] @ A + u[:, t + 1])
    y = torch.stack(series, dim=1)
    inputs = torch.cat([y[:, :-1], u[:, 1:]], dim=-1)  # (1, 11, 4)
    known = inputs[:, 6:, 2:]  # of the inputs whose target numbers are forecast: y[6], ...
    found = memtrain.forecast(Linear(A, known=True), inputs[:, :6], 6, known=known, mean=True)
    torch.testing.assert_close(found.mean(), y[:, 6:12])
    one_late = known.roll(1, dims=1)
    late = memtrain.forecast(Linear(A, known=True), inputs[:, :6], 6, known=one_late, mean=True)
    assert not torch.allclose(late.mean(), found.mean(), atol=0.1)


def test_samples_have_the_mean_and_deviation_of_the_model():
    found = memtrain.forecast(
        Linear(torch.eye(1), deviation=0.5), torch.ones(1, 3, 1), 4, count=4000
    )
    assert found.mean()[0, :, 0] == pytest.approx([1.0] * 4, abs=0.06)
    deviation = found.paths.std(dim=0)[0, :, 0]
    assert deviation == pytest.approx([0.5 * math.sqrt(h) for h in (1, 2, 3, 4)], rel=0.06)
    low, high = found.quantile([0.1, 0.9])
    assert float(high[0, 0, 0] - low[0, 0, 0]) == pytest.approx(2 * 1.2816 * 0.5, rel=0.08)


def test_the_seed_decides():
    task = Season()
    _, rnn = small_models(task.values)
    cases = task.forecast_cases(2, 5, 30)
    first, again, other = (
        memtrain.forecast(rnn, cases.inputs, 5, known=cases.known, count=8, seed=seed).paths
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.allclose(first, other)


@pytest.mark.parametrize("likelihood", ["gaussian", "student-t", "quantile"])
def test_a_past_with_gaps_is_forecast(likelihood):
    values = Values(features=2, targets=2, likelihood=likelihood)
    _, rnn = small_models(values)
    inputs = past_of()
    inputs[0, 2:] = math.nan
    inputs[1] = math.nan
    found = memtrain.forecast(rnn, inputs, 3, count=5)
    assert found.paths.isfinite().all() and found.history.isnan().any()


def test_numbers_are_in_the_units_of_the_data_if_the_model_has_a_format():
    task = Season()
    _, rnn = small_models(task.values)
    cases = task.forecast_cases(2, 4, 24)
    plain = memtrain.forecast(rnn, cases.inputs, 4, known=cases.known, count=6)
    inputs = cases.inputs.double().clone()
    inputs[..., :1] = task.format.unscale_targets(inputs[..., :1])
    for model in (
        SimpleNamespace(rnn=rnn, series=task.format),
        SimpleNamespace(rnn=rnn, task=task),
    ):
        found = memtrain.forecast(model, inputs.numpy(), 4, known=cases.known.numpy(), count=6)
        torch.testing.assert_close(found.paths, 50 + 10 * plain.paths, rtol=1e-4, atol=1e-3)
        assert found.columns == ("load",) and found.season == 12
        assert float(found.history.mean()) == pytest.approx(50, abs=5)
    assert plain.columns == ("number 0",)
    ready = forecast_cases(SimpleNamespace(rnn=rnn, task=task), cases, count=6)
    torch.testing.assert_close(ready.paths, found.paths, rtol=1e-4, atol=1e-3)
    assert ready.truth is not None and ready.truth.shape == (2, 4, 1)


def test_a_forecast_is_saved_as_numbers_or_a_figure(tmp_path):
    found = memtrain.forecast(Linear(A), past_of(), 6, count=9)
    found.save(tmp_path / "deep" / "a.csv")
    lines = (tmp_path / "deep" / "a.csv").read_text().splitlines()
    assert lines[0] == "row,step,column,mean,q10,q25,q50,q75,q90"
    assert len(lines) == 1 + 3 * 6 * 2 and lines[1].startswith("0,1,number 0,")
    assert float(lines[1].split(",")[6]) == pytest.approx(float(found.median()[0, 0, 0]), rel=1e-5)
    found.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["paths"].shape == (9, 3, 6, 2) and list(arrays["columns"])[1] == "number 1"
    found.save(str(tmp_path / "a.png"))
    assert imread(tmp_path / "a.png").shape[0] > 300
    assert found._repr_png_().startswith(b"\x89PNG")
    assert repr(found) == "<Forecast: 9 paths of 6 steps after 3 pasts, number 0, number 1>"


def forecast_of(**changes):
    arguments: dict[str, Any] = {"model": Linear(A, known=True), "inputs": past_of(width=4)}
    arguments |= {"steps": 3, "known": past_of(3, 3, 2)} | changes
    return memtrain.forecast(**arguments)


def test_the_last_known_numbers_may_be_left_out():
    whole = forecast_of().paths
    assert torch.equal(forecast_of(known=past_of(3, 3, 2)[:, :2]).paths, whole)
    assert forecast_of(steps=1, known=None).paths.shape == (100, 3, 1, 2)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"model": "runs/series"},
            "model='runs/series': is a name, not a model; load it: load_rnn",
        ),
        ({"model": 3}, "model=int: must be a Run"),
        ({"model": tiny_rnn()}, "reads tokens (vocabulary"),
        ({"steps": 0}, "steps=0: must be a whole number, at least 1"),
        ({"count": -1}, "count=-1: must be a whole number, at least 1"),
        ({"seed": -1}, "seed=-1: must be a whole number, at least 0"),
        ({"inputs": past_of(width=3)}, "inputs: must have shape (B, P, 4), not (3, 5, 3)"),
        ({"inputs": past_of(width=4)[0]}, "inputs[None] makes a batch of one"),
        ({"inputs": "text"}, "inputs=str: must be numbers of shape (B, P, 4)"),
        ({"inputs": torch.full((3, 5, 4), math.inf)}, "inputs: contains infinity"),
        ({"known": None}, "known=None: must be numbers of shape (3, 3, 2)"),
        ({"known": past_of(3, 9, 2)}, "known: must have shape (3, 3, 2), not (3, 9, 2)"),
        ({"model": Linear(torch.eye(4))}, "known: must be left out"),
        (
            {"model": Linear(torch.eye(4) * 1e30), "known": None},
            "step 2 is not finite: the network diverges",
        ),
    ],
)
def test_mistakes_are_one_line(changes, part):
    with pytest.raises(MemtrainError) as caught:
        forecast_of(**changes)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_mistakes_with_a_forecast(tmp_path):
    found = forecast_of(count=2)
    with pytest.raises(MemtrainError, match="a forecast is saved as .csv, .npz, .png"):
        found.save(tmp_path / "a.txt")
    with pytest.raises(MemtrainError, match="q=50.0: must be from 0 to 1"):
        found.quantile(50.0)
    with pytest.raises(MemtrainError, match="memtrain.forecast"):
        memtrain.generate(SimpleNamespace(rnn=Linear(A), spelling=None))
