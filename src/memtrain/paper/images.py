"""Pictures that models draw, for the figures about images."""

from dataclasses import asdict
from typing import Any

import numpy as np

from memtrain.data.images import ImageFormat, decode_images
from memtrain.data.stream import StreamTask
from memtrain.generation.generate import generate
from memtrain.training.run import Run


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
