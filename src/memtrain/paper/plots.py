"""What the paper's figures are drawn with: lines over seeds, pictures, heat maps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrain.paper.base import Result, mean, spread, where
from memtrain.plotting.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from dataclasses import asdict

from memtrain.data.images import ImageFormat, decode_images
from memtrain.data.stream import StreamTask
from memtrain.generation.generate import generate
from memtrain.training.run import Run

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


def stream_of(run: Run) -> tuple[StreamTask, ImageFormat]:
    """The run's task and how its pictures are spelled."""
    task = run.task
    assert isinstance(task, StreamTask) and task.store.meta.picture is not None
    return task, task.store.meta.picture


def draw(run: Run, count: int, seed: int = 0) -> np.ndarray:
    """Tokens (count, L) of pictures that the RNN draws from the empty memory."""
    return generate(run, count=count, seed=seed).tokens


def real(run: Run, split: str, count: int) -> np.ndarray:
    """Tokens (count, L) of pictures of the data, spread over the split."""
    task, picture = stream_of(run)
    tokens = task.tokens(split).cpu().numpy()
    whole = len(tokens) // picture.length
    images = tokens[: whole * picture.length].reshape(whole, picture.length)
    return images[np.linspace(0, whole - 1, min(count, whole)).astype(int)]


def album(run: Run, **tokens: np.ndarray) -> dict[str, Any]:
    """Pictures as JSON: how they are spelled, and their tokens by name."""
    _, picture = stream_of(run)
    return {"picture": asdict(picture)} | {name: rows.tolist() for name, rows in tokens.items()}


def grey(album: dict[str, Any], name: str) -> np.ndarray:
    """Pictures of an album as grey levels (N, H, W)."""
    return decode_images(np.array(album[name]), ImageFormat(**album["picture"]))


def nearest_distance(images: np.ndarray, training: np.ndarray) -> float:
    """Median distance from grey images to the nearest training image, a pixel counting 0..1."""
    flat = images.reshape(len(images), -1) / 255.0
    known = training.reshape(len(training), -1) / 255.0
    squared = (flat**2).sum(1)[:, None] + (known**2).sum(1) - 2 * flat @ known.T
    return float(np.median(np.sqrt(squared.min(axis=1).clip(min=0))))


def component_size(images: np.ndarray) -> float:
    """Mean number of ink pixels in a connected piece; 0 without ink."""
    from scipy.ndimage import label

    ink = pieces = 0
    for image in images:
        dark = image < 128
        ink += int(dark.sum())
        marked = np.asarray(label(dark, structure=np.ones((3, 3)))[0])  # type: ignore[index]
        pieces += int(marked.max())
    return ink / pieces if pieces else 0.0
