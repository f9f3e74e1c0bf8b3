"""What the paper's figures are drawn with: lines over seeds, pictures, heat maps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrain.paper.base import Result, mean, spread, where
from memtrain.plotting.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = {
    "SMT → DMT": dict(color=COLOURS[0], linewidth=2.2, marker="o"),
    "SMT": dict(color=COLOURS[5], marker="s", markersize=4),
    "BPTT": dict(color=COLOURS[1], marker="^"),
    "teacher": dict(color=COLOURS[6], linestyle="--", marker="."),
}
"""They keep their colours in all figures."""


def line(
    axes: "Axes",
    results: Sequence[Result],
    x: str,
    value: str,
    label: str,
    **style: Any,
) -> None:
    """Mean over seeds against a tag, with a band of one standard deviation."""
    style = {"markersize": 4, **METHODS.get(label, {}), **style}
    places = sorted({result.tags[x] for result in results if value in result.measured})
    groups = [where(results, **{x: place}) for place in places]
    middle = np.array([mean(group, value) for group in groups])
    around = np.array([spread(group, value) for group in groups])
    (drawn,) = axes.plot(places, middle, label=label, **style)
    if around.any():
        axes.fill_between(
            places, middle - around, middle + around, color=drawn.get_color(), alpha=0.15, lw=0
        )


def strip(axes: "Axes", pictures: np.ndarray, title: str, *, columns: int = 8) -> None:
    """Grey pictures (N, H, W) in rows of `columns`."""
    count, height, width = pictures.shape
    rows = -(-count // columns)
    canvas = np.full((rows * (height + 2), columns * (width + 2)), 200, np.uint8)
    for index, picture in enumerate(pictures):
        top, left = (index // columns) * (height + 2) + 1, (index % columns) * (width + 2) + 1
        canvas[top : top + height, left : left + width] = picture
    picture_axes(axes, canvas, title)


def picture_axes(axes: "Axes", image: np.ndarray, title: str) -> None:
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_title(title)
    axes.set_axis_off()


def heat(
    figure: "Figure",
    axes: "Axes",
    cells: Mapping[tuple[Any, Any], float],
    notes: Mapping[tuple[Any, Any], str],
    labels: tuple[str, str],
) -> None:
    """A heat map of (row, column) -> value with a note in each cell."""
    rows = _sorted(row for row, _ in cells)
    columns = _sorted(column for _, column in cells)
    values = np.array([[cells.get((row, column), np.nan) for column in columns] for row in rows])
    image = axes.imshow(values, cmap="viridis_r", aspect="auto", origin="lower")
    figure.colorbar(image, ax=axes)
    dark = np.nanmean(values)
    for (row, column), note in notes.items():
        place = columns.index(column), rows.index(row)
        colour = "white" if cells[row, column] > dark else "black"
        axes.text(*place, note, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
    axes.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
    axes.set_ylabel(labels[0])
    axes.set_xlabel(labels[1])
    axes.grid(False)


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(set(values))
