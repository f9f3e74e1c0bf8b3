"""The figure of a training: what is drawn of its metrics."""

import math
from pathlib import Path

import pytest
from matplotlib.image import imread

from memtrain.eval.training_figure import POINTS, save_training_figure, smoothed


def line(step: int, **values) -> dict:
    return {"stage": "smt", "step": step, "total_steps": step, **values}


def test_curves_are_means_of_neighbours():
    lines = [line(step, decode=float(step % 2)) for step in range(1, 4 * POINTS + 1)]
    steps, values = smoothed(lines, "decode")
    assert len(steps) == POINTS
    assert values == pytest.approx(0.5)
    assert steps[0] == 2.5  # of 1, 2, 3, 4
    few, same = smoothed(lines[:3], "decode")
    assert list(few) == [1, 2, 3] and list(same) == [1, 0, 1]
    assert not len(smoothed(lines, "readout")[0])


@pytest.mark.parametrize("value", ["much", None, math.nan, [1], {"a": 1}])
def test_what_is_no_number_is_not_drawn(tmp_path: Path, value):
    odd = line(2, decode=value, evaluation={"rnn": {"nats": value}})
    lines = [line(1, decode=1.0, dynamics=0.1), odd, line(3, evaluation=value), line(4, decode=2.0)]
    assert list(smoothed(lines, "decode")[1]) == [1, 2]
    save_training_figure(lines, tmp_path / "deep" / "training.png", "odd", "pixel")
    assert imread(tmp_path / "deep" / "training.png").ndim == 3


def test_a_run_without_lines_yet_has_no_figure(tmp_path: Path):
    save_training_figure([], tmp_path / "training.png", "new", "pixel")
    assert not (tmp_path / "training.png").exists()


def test_looks_have_a_panel_of_their_own(tmp_path: Path):
    plain = [line(1, decode=1.0), line(2, decode=0.5)]
    looked = [*plain, line(3, evaluation={"rnn": {"nats": 1.0}, "teacher": None})]
    for name, lines in (("plain", plain), ("looked", looked)):
        save_training_figure(lines, tmp_path / f"{name}.png", name, "pixel")
    widths = [imread(tmp_path / f"{name}.png").shape[1] for name in ("plain", "looked")]
    assert widths[1] == 2 * widths[0]
