"""Figures of a run: its training, its evaluation, grids of images."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from memtrain.evaluation.evaluate import ByPosition, Evaluation, Score
from memtrain.plotting import figures
from memtrain.plotting.figures import PAPER, POINTS, save_grid, save_training_figure, smoothed


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
def test_values_that_are_not_numbers_are_not_drawn(tmp_path: Path, value):
    odd = line(2, decode=value, evaluation={"rnn": {"nats": value}})
    lines = [line(1, decode=1.0, dynamics=0.1), odd, line(3, evaluation=value), line(4, decode=2.0)]
    assert list(smoothed(lines, "decode")[1]) == [1, 2]
    save_training_figure(lines, tmp_path / "deep" / "training.png", "odd", "pixel")
    assert imread(tmp_path / "deep" / "training.png").ndim == 3


def test_a_run_without_lines_yet_has_no_figure(tmp_path: Path):
    save_training_figure([], tmp_path / "training.png", "new", "pixel")
    assert not (tmp_path / "training.png").exists()


def test_evaluations_have_their_own_panel(tmp_path: Path):
    plain = [line(1, decode=1.0), line(2, decode=0.5)]
    evaluated = [*plain, line(3, evaluation={"rnn": {"nats": 1.0}, "teacher": None})]
    for name, lines in (("plain", plain), ("evaluated", evaluated)):
        save_training_figure(lines, tmp_path / f"{name}.png", name, "pixel")
    widths = [imread(tmp_path / f"{name}.png").shape[1] for name in ("plain", "evaluated")]
    assert widths[1] == 2 * widths[0]


def panels_of(monkeypatch, lines: list[dict]) -> list:
    """The axes of a figure, drawn but not saved."""
    kept = []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure))
    save_training_figure(lines, Path("nowhere/training.png"), "run", "pixel")
    kept[0].canvas.draw()
    return kept[0].axes


def test_the_first_losses_are_visible_and_the_legend_covers_no_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line(step, decode=8.0 if step == 1 else 1.0 / step) for step in range(1, 41)]
    axis = panels_of(monkeypatch, lines)[0]
    bottom, top = axis.get_ylim()
    assert bottom < 1 / 40 and top > 8.0
    assert axis.get_legend().get_window_extent().y1 < axis.get_window_extent().y0


@pytest.mark.parametrize("least", [0.002, 0.0031, 0.5, 1.9])
@pytest.mark.parametrize("ratio", [1.05, 3.0, 5.0, 40.0, 1e5])
def test_ticks_are_few_and_plain(tmp_path, monkeypatch, least: float, ratio: float):
    monkeypatch.chdir(tmp_path)
    lines = [line(1, dynamics=least * ratio), line(2, dynamics=least)]
    axis = panels_of(monkeypatch, lines)[1]
    bottom, top = axis.get_ylim()
    shown = [tick for tick in axis.get_yticks() if bottom <= tick <= top]
    assert 2 <= len(shown) <= 11
    assert not any(label.get_text() for label in axis.get_yticklabels(minor=True))


def test_curves_of_an_evaluation_that_agree_are_both_visible(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = []
    monkeypatch.setattr(figures, "save", lambda drawn, path: kept.append(drawn))
    curve: list[float | None] = [2.0, 1.0]
    by_position = ByPosition([0, 1, 2], curve, curve, [None, 1.0], [0.1, 0.2])
    score = Score(1.5, 0.5)
    result = Evaluation(4, 2, 8, score, score, score, score, 0, None, by_position)
    figures.save_evaluation_figure(result, Path("nowhere/evaluation.png"), "run", "pixel")
    axis = kept[0].axes[0]
    _, own, handed = axis.lines
    assert own.get_linestyle() == "-" and handed.is_dashed()
    assert handed.get_linewidth() < own.get_linewidth()
    assert axis.get_ylabel() == "nats per pixel"


def pixels(path: Path) -> np.ndarray:
    return np.rint(imread(path)[..., :3] * 255).astype(int)


def test_small_images_are_enlarged_and_tiled(tmp_path: Path):
    pictures = np.zeros((5, 8, 8), np.uint8)
    pictures[0, 0, 0] = 255
    save_grid(tmp_path / "deep" / "grid.png", pictures)
    shown = pixels(tmp_path / "deep" / "grid.png")
    assert shown.shape == (2 * 54 + 6, 3 * 54 + 6, 3)  # 2 rows of 3; 8 pixels become 48
    assert (shown[:6] == PAPER).all() and (shown[6:12, 6:12] == 255).all()
    assert (shown[6, 12] == 0).all()
    assert (shown[60:108, 114:] == PAPER).all()  # the sixth place is empty


def test_originals_are_above_completions_whose_generated_part_is_tinted(tmp_path: Path):
    originals = np.full((10, 48, 48), 255, np.uint8)
    completed = np.zeros((10, 48, 48), np.uint8)
    made = np.zeros((48, 48), np.uint8)
    made[24:] = 1
    save_grid(tmp_path / "grid.png", completed, originals=originals, made=made)
    shown = pixels(tmp_path / "grid.png")
    assert shown.shape == (4 * 50 + 2, 8 * 50 + 2, 3)  # 8 and 2, each with its originals
    assert (shown[2:50, 2:50] == 255).all()
    assert (shown[52:76, 2:50] == 0).all()
    tint = shown[76:100, 2:50].reshape(-1, 3)
    assert len(set(map(tuple, tint))) == 1 and tint[0].max() > tint[0].min()  # a colour, no grey
