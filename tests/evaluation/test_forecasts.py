"""Forecasts of several steps, scored against what followed and naive forecasts."""

import json
import math

import pytest
import torch

from memtrain.data.series_format import ForecastCases
from memtrain.errors import MemtrainError
from memtrain.evaluation.closed_loop import closed_loop
from memtrain.evaluation.forecast_scores import quantiles_of
from memtrain.evaluation.forecasts import cases_of, closed_loop_error, evaluate_forecasts
from memtrain.files import strict_json
from memtrain.plotting.tables import print_forecasts
from memtrain.shapes import Batch
from series_testing import AutoRegression, Linear, Season, small_models


def test_the_band_of_a_calibrated_model_holds_eighty_percent():
    rnn = Linear(torch.tensor([[0.8]]), deviation=0.5)
    result = evaluate_forecasts(rnn, AutoRegression(), 8, origins=400, count=200)
    assert result.coverage == pytest.approx(0.8, abs=0.03)
    ours, naive = result.methods["RNN"], result.methods["naive"]
    # The variance of h steps is 0.25 · (1 + 0.64 + ... ).
    variance = 0.25 * sum(0.64**k for k in range(8))
    assert ours.mse_by_step[0] == pytest.approx(0.25, rel=0.15)
    assert ours.mse_by_step[-1] == pytest.approx(variance, rel=0.2)
    assert ours.crps_by_step[0] == pytest.approx(0.5 / math.sqrt(math.pi), rel=0.1)
    assert ours.mse < naive.mse and ours.mae < naive.mae and ours.crps < naive.crps
    assert "seasonal-naive" not in result.methods and ours.columns == {}


def test_too_sure_a_model_holds_less():
    rnn = Linear(torch.tensor([[0.8]]), deviation=0.1)
    assert evaluate_forecasts(rnn, AutoRegression(), 4, origins=200, count=50).coverage < 0.35


def test_methods_are_compared_in_both_units_and_printed(capsys):
    task = Season(missing=0.05)
    _, rnn = small_models(task.values)
    result = evaluate_forecasts(rnn, task, origins=16, count=20)
    assert (result.horizon, result.origins, result.count) == (12, 16, 20)
    assert list(result.methods) == ["RNN", "naive", "seasonal-naive"]
    assert result.fitted == "training" and result.columns == ("load",)
    for score in result.methods.values():
        assert len(score.mse_by_step) == 12
        assert score.columns["load"]["mse"] == pytest.approx(100 * score.mse)
        assert score.columns["load"]["crps"] == pytest.approx(10 * score.crps)
    methods = result.methods
    assert methods["seasonal-naive"].mse < methods["naive"].mse
    assert len(result.examples) == 4 and result.examples[0].quantiles.shape == (5, 12, 1)
    assert float(result.examples[0].history.nanmean()) == pytest.approx(50, abs=3)
    plain = json.loads(strict_json(result.to_json()))
    assert "examples" not in plain and plain["methods"]["RNN"]["crps"] > 0
    print_forecasts(result, "tiny")
    printed = capsys.readouterr().out
    assert "forecasts of 12 steps from 16 held-out origins" in printed
    assert "seasonal-naive" in printed and "80 % band holds" in printed
    assert "\n" not in repr(result)


def test_naive_methods_equal_numbers_computed_by_hand():
    class Given(Season):
        def forecast_cases(self, count: int, horizon: int, history: int) -> ForecastCases:
            past = torch.arange(24.0).remainder(12)[None, :, None].expand(1, 24, 2)
            return ForecastCases(past, torch.zeros(1, 2, 1), torch.tensor([[[1.0], [3.0]]]))

    task = Given()
    _, rnn = small_models(task.values)
    methods = evaluate_forecasts(rnn, task, 2, origins=1, count=2).methods
    assert methods["naive"].mse_by_step == pytest.approx([100, 64])
    assert methods["naive"].mae == pytest.approx(9)
    assert methods["seasonal-naive"].mse_by_step == pytest.approx([1, 4])


def test_cases_of_sequences_are_their_last_targets():
    inputs = torch.arange(10.0).view(1, 5, 2)  # target 0 2 4 6 8, known 1 3 5 7 9
    batch = Batch(inputs, inputs[..., :1] + 2)
    cases = cases_of(batch, 2)
    assert cases.inputs[0, :, 0].tolist() == [0, 2, 4, 6]
    assert cases.targets.flatten().tolist() == [8, 10]
    assert cases.known[0, 0].tolist() == [9]  # in the input whose target number is 8
    whole = cases_of(batch, 5)
    assert whole.inputs.shape == (1, 1, 2) and whole.known.shape == (1, 5, 1)


def test_the_closed_loop_error_of_a_perfect_model_is_the_distance_of_its_samples():
    a = torch.tensor([[1.0]])
    past = torch.ones(3, 2, 1)
    cases = ForecastCases(past, torch.zeros(3, 4, 0), torch.ones(3, 4, 1))
    score = closed_loop_error(Linear(a, deviation=0.002), cases, count=50)
    assert score.mse_by_step == pytest.approx([0.0] * 4, abs=1e-4)
    assert score.crps < 0.01 and score.columns == {}
    assert score == closed_loop_error(Linear(a, deviation=0.002), cases, count=50)
    assert score != closed_loop_error(Linear(a, deviation=0.002), cases, count=50, seed=1)


def test_paths_do_not_depend_on_how_many_are_run_together():
    task = Season()
    _, rnn = small_models(task.values)
    cases = task.forecast_cases(5, 6, 20)
    whole = closed_loop(rnn, cases.inputs, 6, known=cases.known, count=7, seed=3)
    assert whole.shape == (7, 5, 6, 1)
    for rows in (1, 4, 10, 21):
        part = closed_loop(rnn, cases.inputs, 6, known=cases.known, count=7, seed=3, rows=rows)
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)
    # Nor on how many paths and rows there are.
    few = closed_loop(rnn, cases.inputs[:2], 6, known=cases.known[:2], count=3, seed=3)
    torch.testing.assert_close(few, whole[:3, :2], rtol=1e-4, atol=1e-5)


def test_the_mode_of_training_is_restored():
    task = Season()
    _, rnn = small_models(task.values)
    evaluate_forecasts(rnn.train(), task, 2, origins=2, count=2)
    assert rnn.training


def test_quantiles_of_samples():
    samples = torch.tensor([3.0, 1.0, 2.0, 5.0])[:, None]
    found = quantiles_of(samples, [0.0, 0.5, 0.75, 1.0]).flatten().tolist()
    assert found == pytest.approx([1.0, 2.5, 3.5, 5.0])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"horizon": 0}, "horizon=0: must be a whole number above 0"),
        ({"origins": -2}, "origins=-2"),
        ({"count": 0}, "count=0"),
        ({"horizon": 99}, "horizon=99: must be at most 40"),
        ({"model": "runs/x"}, "model=str: must be a memtrain.RNN"),
        ({"model": Linear(torch.eye(2))}, "task=AutoRegression: must have the numbers"),
    ],
)
def test_mistakes_are_named(arguments, part):
    rnn = Linear(torch.tensor([[0.8]]))
    with pytest.raises(MemtrainError) as caught:
        evaluate_forecasts(**{"model": rnn, "task": AutoRegression()} | arguments)
    assert part in str(caught.value) and "\n" not in str(caught.value)
