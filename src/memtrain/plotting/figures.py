"""Figures of one run: its evaluation by position, its training, grids of its images."""

import io
import math
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from memtrain.data.images import Pixels
from memtrain.evaluation.evaluate import Evaluation
from memtrain.files import write_output
from memtrain.plotting.style import COLOURS, GREY, log_y_axis, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES: dict[str, dict[str, Any]] = {
    "teacher": dict(color=GREY, label="teacher", linewidth=1.5, marker="."),
    "rnn": dict(color=COLOURS[0], label="RNN, empty memory", linewidth=2.8, marker="."),
    # Thin dashes on a thick line: where both agree, as they should, both are visible.
    "rnn_from_teacher": dict(
        color=COLOURS[1], label="RNN, teacher's memory", linewidth=1.4, linestyle=(0, (5, 5))
    ),
}
LOSSES = {"decode": GREY, "next": COLOURS[1], "readout": COLOURS[0]}
"""Losses of predictions, by their names in the metrics; dynamics is none and has its own axis."""
DYNAMICS = COLOURS[2]
LOG_RATIO = 4
"""An axis is logarithmic from this ratio of its largest to its smallest value."""
PAPER = 128
"""Grey level between the images."""
MADE = np.array([214, 93, 14])
"""Tint of the pixels that a model generated, next to those it was given."""
POINTS = 60
"""Upper bound on the points of a training curve; neighbours are averaged, as batches are noisy."""


def save_evaluation_figure(result: Evaluation, path: Path, name: str, unit: str) -> None:
    """Draw the losses of teacher and RNN by position, and below them the drift, 1-R²."""
    curves = result.by_position
    middles = [(first + end - 1) / 2 for first, end in pairwise(curves.edges)]
    rows = 1 if curves.unexplained is None else 2
    figure, grid = panels(rows, 1, width=7.0, height=2.8 + 0.8 / rows, sharex=True)
    axes = grid[:, 0]
    for key, style in LINES.items():
        if values := getattr(curves, key):
            axes[0].plot(middles, np.array(values, dtype=float), **style)  # None is a gap
    for style, baseline in zip((":", "-.", "--"), result.baselines, strict=False):
        axes[0].axhline(
            baseline.nats, color=COLOURS[4], linestyle=style, linewidth=1, label=baseline.name
        )
    axes[0].set_ylabel(f"{result.loss_name} per {unit}")
    axes[0].set_title(f"{name}: {result.sequences} held-out sequences")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if curves.unexplained is not None:
        axes[1].plot(middles, curves.unexplained, color=COLOURS[0], marker=".")
        axes[1].set_ylabel("drift of the memory, 1-R²")
    for axis in axes[1:] if result.of_numbers else axes:  # a density may be above 1
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("position in the sequence")
    save(figure, path)


def save_training_figure(
    records: list[dict], path: Path, name: str, unit: str, loss_name: str = "nats"
) -> None:
    """Save `training_figure`; missing folders are created. No records, no figure."""
    if records:
        save(training_figure(records, name, unit, loss_name), path)


def training_figure(records: list[dict], name: str, unit: str, loss_name: str = "nats") -> "Figure":
    """Draw a run's losses per stage and its held-out losses.

    Args:
        records: from `MetricsFile.read`, at least one.
        name: name of the run.
        unit: what one target is, such as "pixel".
        loss_name: what losses are in, `Task.loss_name`.
    """
    stages = [(stage, list(lines)) for stage, lines in groupby(records, lambda r: r["stage"])]
    evaluated = [record for record in records if _nats(record, "rnn") is not None]
    figure, grid = panels(1, len(stages) + bool(evaluated), width=4.2, height=3.6)
    for axes, (stage, lines) in zip(grid[0], stages, strict=False):
        _draw_stage(axes, stage, lines)
    if evaluated:
        _draw_evaluations(grid[0, -1], evaluated)
    for axes in grid[0]:
        axes.set_ylabel(f"{loss_name} per {unit}")
        if axes.lines:  # a legend below the panel hides no line
            place: dict[str, Any] = dict(loc="upper center", bbox_to_anchor=(0.5, -0.16))
            axes.legend(frameon=False, fontsize=8, ncols=3, **place)
    figure.suptitle(name, fontsize=10)
    return figure


def _draw_stage(axes: "Axes", stage: str, lines: list[dict]) -> None:
    drawn: list[float] = []
    for key, colour in LOSSES.items():
        steps, values = smoothed(lines, key)
        if len(values):
            axes.plot(steps, values, color=colour, linewidth=1.2, label=key)
            drawn += values.tolist()
    _scale(axes, drawn)
    steps, values = smoothed(lines, "dynamics")
    if len(values):
        right = axes.twinx()
        right.plot(steps, values, color=DYNAMICS, linewidth=1)
        _scale(right, values.tolist())
        right.set_ylabel("dynamics", color=DYNAMICS)
        right.grid(visible=False)  # the left axis has one
        right.spines["top"].set_visible(False)
    axes.set_title(f"{stage}: losses on its batches")
    axes.set_xlabel("step")


def _draw_evaluations(axes: "Axes", evaluated: list[dict]) -> None:
    drawn = []
    for key in ("teacher", "rnn"):
        points = [
            (one["total_steps"], nats) for one in evaluated if (nats := _nats(one, key)) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **LINES[key])
            drawn += [nats for _, nats in points]
    for one, following in pairwise(evaluated):
        if one["stage"] != following["stage"]:
            axes.axvline(one["total_steps"], color=GREY, linestyle=":", linewidth=1)
    _scale(axes, drawn)
    axes.set_title("held-out sequences while training")
    axes.set_xlabel("step of all stages")


def _scale(axes: "Axes", values: list[float]) -> None:
    """Make the y axis logarithmic if the values, whose first ones are large, span a wide range."""
    axes.tick_params(axis="y", labelsize=8)
    if values and min(values) > 0 and max(values) > LOG_RATIO * min(values):
        log_y_axis(axes, values)


def smoothed(lines: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric, neighbours averaged to at most `POINTS` points."""
    points = [
        (line["step"], value) for line in lines if (value := _number(line.get(key))) is not None
    ]
    if not points:
        return np.empty(0), np.empty(0)
    size = math.ceil(len(points) / POINTS)
    chunks = [points[at : at + size] for at in range(0, len(points), size)]
    steps, values = np.array([np.mean(chunk, axis=0) for chunk in chunks]).T
    return steps, values


def _nats(record: dict, key: str) -> float | None:
    """Held-out loss in a line of metrics, if there is one."""
    found = record.get("evaluation")
    scores = found.get(key) if isinstance(found, dict) else None
    return _number(scores.get("nats")) if isinstance(scores, dict) else None


def _number(value: object) -> float | None:
    """A finite number, or None: metrics may be damaged."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def save_grid(
    path: Path,
    pictures: Pixels,
    *,
    originals: Pixels | None = None,
    made: UInt8[np.ndarray, "H W"] | None = None,
    columns: int = 0,
) -> None:
    """Write images atomically as a near-square grid, enlarging small ones.

    Args:
        path: the PNG; missing folders are created.
        pictures: grey, 0 is black, or in colour.
        originals: the image that each picture completes, shown in a row above it.
        made: 1 where pixels were generated; these are tinted in grey images, and not in colour
            images, whose colours a tint would change.
        columns: images per row (0: about as many as rows).
    """
    from PIL import Image

    count, height = pictures.shape[:2]
    colour = _in_colour(pictures)
    if made is not None and pictures.ndim == 3:
        tinted = (0.6 * colour + 0.4 * MADE).astype(np.uint8)
        colour = np.where(made[None, :, :, None].astype(bool), tinted, colour)
    if originals is None:
        usual, tiles = math.ceil(math.sqrt(count)), colour[None]
    else:
        usual, tiles = min(count, 8), np.stack([_in_colour(originals), colour])
    columns = columns or usual
    scale = max(1, 48 // height)
    tiles = tiles.repeat(scale, axis=2).repeat(scale, axis=3)  # (kinds, N, H, W, 3)
    gap, empty = max(2, scale), -count % columns
    tiles = np.pad(tiles, [(0, 0), (0, empty), (gap, 0), (gap, 0), (0, 0)], constant_values=PAPER)
    kinds, places, height, width, _ = tiles.shape
    canvas = tiles.reshape(kinds, places // columns, columns, height, width, 3)
    canvas = canvas.transpose(1, 0, 3, 2, 4, 5).reshape(-1, columns * width, 3)
    canvas = np.pad(canvas, [(0, gap), (0, gap), (0, 0)], constant_values=PAPER)
    content = io.BytesIO()
    Image.fromarray(canvas).save(content, format="PNG")
    write_output(path, content.getvalue())


def _in_colour(pictures: Pixels) -> UInt8[np.ndarray, "N H W 3"]:
    return pictures if pictures.ndim == 4 else np.repeat(pictures[..., None], 3, axis=-1)
