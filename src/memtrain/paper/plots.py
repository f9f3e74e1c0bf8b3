"""Shared by the figures: statistics of results, lines over seeds, and images.

Figures store images in their results as an album: the image format, and token rows by name.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrain.config.serialize import structure
from memtrain.data.images import ImageFormat, decode_images
from memtrain.data.stream import StreamTask
from memtrain.errors import MemtrainError
from memtrain.paper.base import Result, Tag
from memtrain.plotting.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memtrain.training.run import Run

STYLES = {
    "SMT → DMT": dict(color=COLOURS[0], linewidth=2.2, marker="o"),
    "SMT": dict(color=COLOURS[5], marker="s", markersize=4),
    "BPTT": dict(color=COLOURS[1], marker="^"),
    "teacher": dict(color=COLOURS[6], linestyle="--", marker="."),
}
"""Line styles of the methods, the same in all figures."""


def where(results: Iterable[Result], **tags: Tag) -> list[Result]:
    """The results with these tags."""
    return [
        result
        for result in results
        if all(result.tags.get(name) == value for name, value in tags.items())
    ]


def distinct(results: Iterable[Result], tag: str) -> list[Any]:
    """The values of a tag, in order of appearance."""
    return list(dict.fromkeys(result.tags[tag] for result in results if tag in result.tags))


def average(values: Iterable[float]) -> float:
    """The mean; nan if there are no values."""
    values = list(values)
    return fmean(values) if values else math.nan


def mean(results: Iterable[Result], value: str) -> float:
    """The mean of a measured value; nan if there is none."""
    return average(result.measured.get(value, math.nan) for result in results)


def standard_deviation(results: Iterable[Result], value: str) -> float:
    """The standard deviation of a measured value; 0 for a single result."""
    found = [result.measured[value] for result in results if value in result.measured]
    return stdev(found) if len(found) > 1 else 0.0


def best(results: Iterable[Result], value: str) -> Result:
    """The result with the lowest measured value."""

    def rank(result: Result) -> float:
        found = result.measured.get(value, math.inf)
        return found if math.isfinite(found) else math.inf

    return min(results, key=rank)


def cost_ratio(ours: Iterable[Result], theirs: Iterable[Result], name: str) -> float:
    """The mean cost of `theirs` divided by that of `ours`."""
    below = average(result.cost[name] for result in ours)
    return average(result.cost[name] for result in theirs) / below if below else math.nan


# ---------------------------------------------------------------------------------------- plots


def line(
    axes: "Axes", results: Sequence[Result], x: str, value: str, label: str, **style: Any
) -> None:
    """Plot the mean over seeds against a tag, with a band of one standard deviation."""
    style = {"markersize": 4, **STYLES.get(label, {}), **style}
    places = sorted({result.tags[x] for result in results if value in result.measured})
    groups = [where(results, **{x: place}) for place in places]
    middle = np.array([mean(group, value) for group in groups])
    band = np.array([standard_deviation(group, value) for group in groups])
    (drawn,) = axes.plot(places, middle, label=label, **style)
    if band.any():
        colour = drawn.get_color()
        axes.fill_between(places, middle - band, middle + band, color=colour, alpha=0.15, lw=0)


# --------------------------------------------------------------------------------------- images


def show_image(axes: "Axes", image: np.ndarray, title: str) -> None:
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_title(title)
    axes.set_axis_off()


def show_images(axes: "Axes", images: np.ndarray, title: str, *, columns: int = 8) -> None:
    """Show grey images (N, H, W) in rows of `columns`."""
    count, height, width = images.shape
    rows = -(-count // columns)
    canvas = np.full((rows * (height + 2), columns * (width + 2)), 200, np.uint8)
    for index, image in enumerate(images):
        top, left = (index // columns) * (height + 2) + 1, (index % columns) * (width + 2) + 1
        canvas[top : top + height, left : left + width] = image
    show_image(axes, canvas, title)


def image_stream(run: "Run") -> tuple[StreamTask, ImageFormat]:
    """The task of a run on images, and the images' format."""
    task = run.task
    assert isinstance(task, StreamTask) and task.store.meta.picture is not None
    if task.store.meta.classes:
        raise MemtrainError(
            f"{task.store.folder}: its images begin with their class; the paper's figures need "
            "data that was prepared without --option labels"
        )
    return task, task.store.meta.picture


def real_images(run: "Run", split: str, count: int) -> np.ndarray:
    """Tokens (count, L) of images of a split, evenly spaced."""
    task, picture = image_stream(run)
    tokens = task.tokens(split).cpu().numpy()
    whole = len(tokens) // picture.length
    images = tokens[: whole * picture.length].reshape(whole, picture.length)
    return images[np.linspace(0, whole - 1, min(count, whole)).astype(int)]


def album(run: "Run", **tokens: np.ndarray) -> dict[str, Any]:
    """Images as JSON: their format, and their tokens by name."""
    _, picture = image_stream(run)
    return {"picture": asdict(picture)} | {name: rows.tolist() for name, rows in tokens.items()}


def grey(album: dict[str, Any], name: str) -> np.ndarray:
    """The images of an album as grey levels (N, H, W)."""
    return decode_images(np.array(album[name]), image_format(album))


def image_format(album: dict[str, Any]) -> ImageFormat:
    """How the images of an album are encoded; albums of earlier versions have no palette."""
    return structure(album["picture"], ImageFormat)


def component_size(images: np.ndarray) -> float:
    """Mean number of ink pixels per connected component; 0 without ink."""
    from scipy.ndimage import label

    ink = components = 0
    for image in images:
        dark = image < 128
        ink += int(dark.sum())
        marked = np.asarray(label(dark, structure=np.ones((3, 3)))[0])  # type: ignore[index]
        components += int(marked.max())
    return ink / components if components else 0.0
