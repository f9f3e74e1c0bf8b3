"""Curves of one run: its evaluation by position, and its training."""

import math
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from memtrain.evaluation.evaluate import Evaluation
from memtrain.plotting.style import COLOURS, GREY, log_y_axis, panels, save

INK = {"teacher": GREY, "rnn": COLOURS[0], "rnn_from_teacher": COLOURS[1]}
LINES: dict[str, dict[str, Any]] = {
    "teacher": dict(linewidth=1.5, marker="."),
    "rnn": dict(linewidth=2.8, marker="."),
    # Thin dashes: where both are alike, as they should be, both are seen.
    "rnn_from_teacher": dict(linewidth=1.4, linestyle=(0, (5, 5))),
}
LABEL = {
    "teacher": "teacher",
    "rnn": "RNN, empty memory",
    "rnn_from_teacher": "RNN, teacher's memory",
}


def save_evaluation_figure(result: Evaluation, path: Path, name: str, unit: str) -> None:
    """Draw the losses of teacher and RNN by position, and below them the drift, 1-R²."""
    curves = result.by_position
    ends = zip(curves.edges[:-1], curves.edges[1:], strict=True)
    middles = [(first + end - 1) / 2 for first, end in ends]
    rows = 1 if curves.unexplained is None else 2
    figure, grid = panels(rows, 1, width=7.0, height=2.8 + 0.8 / rows, sharex=True)
    axes = grid[:, 0]
    for key, colour in INK.items():
        values = getattr(curves, key)
        if values is None:
            continue
        points = [(x, y) for x, y in zip(middles, values, strict=True) if y is not None]
        if points:
            axes[0].plot(*zip(*points, strict=True), color=colour, label=LABEL[key], **LINES[key])
    for style, baseline in zip((":", "-.", "--"), result.baselines, strict=False):
        axes[0].axhline(
            baseline.nats, color=COLOURS[4], linestyle=style, linewidth=1, label=baseline.name
        )
    axes[0].set_ylabel(f"nats per {unit}")
    axes[0].set_ylim(bottom=0)
    axes[0].set_title(f"{name}: {result.sequences} held-out sequences")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if curves.unexplained is not None:
        axes[1].plot(middles, curves.unexplained, color=INK["rnn"], marker=".")
        axes[1].set_ylabel("drift of the memory, 1-R²")
        axes[1].set_ylim(bottom=0)
    axes[-1].set_xlabel("position in the sequence")
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


LOSSES = {"decode": INK["teacher"], "next": COLOURS[1], "readout": INK["rnn"]}
"""Losses in nats, as metrics name them; dynamics, which is none, has an axis of its own."""
DYNAMICS = COLOURS[2]
WIDE = 4
"""From which ratio of largest to smallest value on an axis is logarithmic."""
POINTS = 60
"""Means that a curve is drawn with at most: single batches are noisy."""


def save_training_figure(records: list[dict], path: Path, name: str, unit: str) -> None:
    """Draw the lines of a run's metrics, if there are any.

    Args:
        records: as `MetricsFile.read` returns them.
        path: the figure's file; its folder is made.
        name: the run's.
        unit: what a token is.
    """
    if not records:
        return
    stages = [(stage, list(lines)) for stage, lines in groupby(records, lambda r: r["stage"])]
    looks = [record for record in records if _nats(record, "rnn") is not None]
    figure, grid = panels(1, len(stages) + bool(looks), width=4.2, height=3.6)
    axes = grid[0]
    for axis, (stage, lines) in zip(axes, stages, strict=False):
        _draw_stage(axis, stage, lines)
        axis.set_ylabel(f"nats per {unit}")
    if looks:
        _draw_looks(axes[-1], looks)
        axes[-1].set_ylabel(f"nats per {unit}")
    figure.suptitle(name, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def _draw_stage(axis, stage: str, lines: list[dict]) -> None:
    drawn: list[float] = []
    for key, colour in LOSSES.items():
        steps, values = smoothed(lines, key)
        if len(values):
            axis.plot(steps, values, color=colour, linewidth=1.2, label=key)
            drawn += values.tolist()
    _scale(axis, drawn)
    steps, values = smoothed(lines, "dynamics")
    if len(values):
        other = axis.twinx()
        other.plot(steps, values, color=DYNAMICS, linewidth=1)
        _scale(other, values.tolist())
        other.set_ylabel("dynamics", color=DYNAMICS)
        other.tick_params(axis="y", labelsize=8)
        other.grid(visible=False)  # the other axis has one
        other.spines["top"].set_visible(False)
    axis.set_title(f"{stage}: losses on its batches")
    axis.set_xlabel("step")
    _legend(axis)


def _draw_looks(axis, looks: list[dict]) -> None:
    drawn = []
    for key in ("teacher", "rnn"):
        points = [(look["total_steps"], nats) for look in looks if (nats := _nats(look, key))]
        if points:
            axis.plot(*zip(*points, strict=True), color=INK[key], label=LABEL[key], marker=".")
            drawn += [nats for _, nats in points]
    for one, other in pairwise(looks):
        if one["stage"] != other["stage"]:
            axis.axvline(one["total_steps"], color=GREY, linestyle=":", linewidth=1)
    _scale(axis, drawn)
    axis.set_title("held-out sequences while training")
    axis.set_xlabel("step of all stages")
    _legend(axis)


def _scale(axis, values: list[float]) -> None:
    """Show all values: the first losses are far above the others, which a logarithm makes room
    for."""
    axis.tick_params(axis="y", labelsize=8)
    if values and min(values) > 0 and max(values) > WIDE * min(values):
        log_y_axis(axis, values)


def _legend(axis) -> None:
    """Below the panel, where it hides no line."""
    if axis.lines:
        axis.legend(
            frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16)
        )


def smoothed(lines: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric, as means over neighbours so that few enough are left."""
    points = [
        (line["step"], value) for line in lines if (value := _number(line.get(key))) is not None
    ]
    if not points:
        return np.empty(0), np.empty(0)
    together = math.ceil(len(points) / POINTS)
    chunks = [points[at : at + together] for at in range(0, len(points), together)]
    steps, values = np.array([np.mean(chunk, axis=0) for chunk in chunks]).T
    return steps, values


def _nats(record: dict, key: str) -> float | None:
    """Of an evaluation while training, if the line has one."""
    found = record.get("evaluation")
    scores = found.get(key) if isinstance(found, dict) else None
    return _number(scores.get("nats")) if isinstance(scores, dict) else None


def _number(value: object) -> float | None:
    """Files may be damaged: what is no finite number is not drawn."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
