"""Draw the pictures of docs/concepts.md: `python scripts/draw_concepts.py docs/images`."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from memtrain.plotting.style import COLOURS, GREY, INK, SOFT

BLUE, ORANGE, GREEN = COLOURS[:3]
STEPS = 5


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Axes without ticks, in which one unit is half an inch both ways."""
    figure = Figure(figsize=(width / 2, height / 2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def box(axes: Axes, x: float, y: float, text: str, colour: str, width: float = 1.1) -> None:
    """A box with its centre at (x, y)."""
    shape: Any = "round,pad=0,rounding_size=0.14"
    left, bottom = x - width / 2, y - 0.35
    axes.add_patch(FancyBboxPatch((left, bottom), width, 0.7, shape, fc="white", ec=colour, lw=1.6))
    axes.text(x, y, text, ha="center", va="center", color=INK, size=11)


def arrow(axes: Axes, start: tuple, end: tuple, colour: str = SOFT, **options: Any) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, **{**style, **options}))


def note(axes: Axes, x: float, y: float, text: str, colour: str = SOFT, **options: Any) -> None:
    axes.text(x, y, text, **{"ha": "left", "va": "center", "color": colour, "size": 11, **options})


def draw_method() -> Figure:
    """The teacher makes memories of all timesteps; each pair of neighbours trains the cell."""
    figure, axes = canvas(14.4, 8.2)
    places = [3.6 + 2.3 * step for step in range(STEPS)]
    left, right = places[0] - 0.6, places[-1] + 0.6
    box(axes, (left + right) / 2, 5.0, "encoder of the teacher", BLUE, width=right - left)
    box(axes, (left + right) / 2, 7.4, "decoder: predicts the future", BLUE, width=right - left)
    for step, x in enumerate(places, 1):
        box(axes, x, 3.8, f"$x_{step}$", GREY, width=0.9)
        arrow(axes, (x, 4.15), (x, 4.65))
        box(axes, x, 6.2, f"$m_{step}$", BLUE, width=0.9)
        arrow(axes, (x, 5.35), (x, 5.85), BLUE)
        arrow(axes, (x, 6.55), (x, 7.05), BLUE)
    for step, (x, following) in enumerate(zip(places, places[1:], strict=False), 1):
        middle = (x + following) / 2
        box(axes, middle, 1.7, "cell", ORANGE, width=0.9)
        note(axes, middle, 2.6, f"$m_{step},\\ x_{step + 1}$", ha="center")
        arrow(axes, (middle, 2.38), (middle, 2.05), ORANGE)
        arrow(axes, (middle, 1.35), (middle, 0.98), ORANGE)
        note(axes, middle, 0.62, f"$\\approx m_{step + 1}$", ha="center")
    note(axes, 0.2, 6.2, "1. Memories", BLUE, weight="bold")
    note(axes, 0.2, 5.7, "that predict\nthe future", va="top")
    note(axes, 0.2, 2.3, "2. Single steps", ORANGE, weight="bold")
    note(axes, 0.2, 1.8, "all at the\nsame time", va="top")
    return figure


def draw_depth() -> Figure:
    """What has to be done one after another in a training step."""
    figure, axes = canvas(14.4, 6.6)
    places = [1.0 + 1.7 * step for step in range(4)]
    note(axes, 0.4, 6.1, "BPTT", GREY, weight="bold", size=12)
    note(axes, 0.4, 5.45, "forward, step after step, and back")
    for x in places:
        box(axes, x, 3.6, "cell", GREY, width=0.95)
        note(axes, x, 2.6, "$x$", ha="center")
        arrow(axes, (x, 2.8), (x, 3.2))
    for x, following in zip(places, places[1:], strict=False):
        arrow(axes, (x + 0.5, 3.75), (following - 0.5, 3.75))
        arrow(axes, (following - 0.5, 3.45), (x + 0.5, 3.45), ORANGE)
    arrow(axes, (places[-1], 4.0), (places[-1], 4.5))
    note(axes, places[-1], 4.75, "loss", ha="center")
    note(axes, 0.4, 1.7, "A path of 2T cells: slow, and gradients")
    note(axes, 0.4, 1.15, "vanish or explode along it.")
    axes.axvline(7.35, 0.1, 0.95, color="#eceef0", lw=1.5)
    places = [8.3 + 1.7 * step for step in range(4)]
    note(axes, 7.8, 6.1, "SMT", BLUE, weight="bold", size=12)
    note(axes, 7.8, 5.45, "all timesteps at once")
    for x in places:
        box(axes, x, 3.6, "cell", BLUE, width=0.95)
        note(axes, x, 2.6, "$m, x$", ha="center")
        arrow(axes, (x - 0.12, 2.8), (x - 0.12, 3.2))
        arrow(axes, (x + 0.12, 3.2), (x + 0.12, 2.8), ORANGE)
        arrow(axes, (x, 4.0), (x, 4.5))
        note(axes, x, 4.75, "loss", ha="center")
    note(axes, 7.8, 1.7, "A path of one cell, however long the")
    note(axes, 7.8, 1.15, "sequence: gradients stay one step long.")
    note(axes, 0.4, 0.4, "Orange: gradients", ORANGE)
    return figure


def draw_drift() -> Figure:
    """The rollout leaves the teacher's path; DMT learns the way back from where it went."""
    figure, axes = canvas(14.4, 5.8)
    t = np.linspace(0, 1, 9)
    for left, title in ((0.4, "After SMT"), (7.6, "In DMT")):
        x = left + 0.3 + 5.6 * t
        path = 1.2 + 1.1 * t + 0.5 * np.sin(4 * t)
        axes.plot(x, path, color=BLUE, lw=1.8, marker="o", ms=4.5)
        note(axes, left, 5.3, title, INK, weight="bold", size=12)
        drift = (2.4 if left < 1 else 1.2) * t**1.7 + 0.12 * np.sin(9 * t)
        rollout = path + drift
        axes.plot(x, rollout, color=ORANGE, lw=1.8, marker="o", ms=4.5)
        if left < 1:
            note(axes, x[-1] + 0.1, rollout[-1] + 0.4, "rollout", ORANGE, ha="right")
        else:
            note(axes, x[-1] + 0.1, rollout[-1] + 0.45, "rollout", ORANGE, ha="right")
            for step in range(2, 9):
                start, end = (x[step - 1], rollout[step - 1]), (x[step], path[step] + 0.06)
                arrow(axes, start, end, GREEN, lw=1.2, shrinkA=4, shrinkB=4, mutation_scale=9)
        note(axes, x[-1] + 0.1, path[-1] - 0.42, "memories of the teacher", BLUE, ha="right")
    note(axes, 0.4, 0.35, "Small errors of single steps add up.")
    note(axes, 7.6, 0.35, "From where it is, the cell learns to step back.", GREEN)
    return figure


DRAWINGS = {"method": draw_method, "depth": draw_depth, "drift": draw_drift}


def main(folder: Path) -> list[Path]:
    """Write one SVG per drawing; the same version of matplotlib writes the same bytes."""
    paths = []
    style: dict[Any, Any] = {"svg.hashsalt": "memtrain", "mathtext.fontset": "cm"}
    with rc_context(style):
        for name, draw in DRAWINGS.items():
            paths.append(folder / f"concept-{name}.svg")
            draw().savefig(paths[-1], facecolor="white", metadata={"Date": None})
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
