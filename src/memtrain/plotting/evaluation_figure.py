"""An evaluation as a figure: losses and drift against the position in the sequence."""

from pathlib import Path
from typing import Any

from memtrain.evaluation.evaluate import Evaluation
from memtrain.plotting.style import COLOURS, GREY, panels, save

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


def save_figure(result: Evaluation, path: Path, name: str, unit: str) -> None:
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
