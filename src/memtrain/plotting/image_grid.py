"""Save images as a grid in one PNG."""

import io
import math
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from memtrain.files import write_output

PAPER = 128
"""Grey level between the images."""
MADE = np.array([214, 93, 14])
"""Tint of the pixels that a model generated, next to those it was given."""


def save_grid(
    path: Path,
    pictures: UInt8[np.ndarray, "N H W"],
    *,
    originals: UInt8[np.ndarray, "N H W"] | None = None,
    made: UInt8[np.ndarray, "H W"] | None = None,
) -> None:
    """Write images atomically as a near-square grid, enlarging small ones.

    Args:
        path: the PNG; missing folders are created.
        pictures: grey levels, 0 is black.
        originals: the image that each picture completes, shown in a row above it.
        made: 1 where pixels were generated; these are tinted.
    """
    from PIL import Image

    count, height, _ = pictures.shape
    colour = np.repeat(pictures[..., None], 3, axis=-1)
    if made is not None:
        tinted = (0.6 * colour + 0.4 * MADE).astype(np.uint8)
        colour = np.where(made[None, :, :, None].astype(bool), tinted, colour)
    if originals is None:
        columns = math.ceil(math.sqrt(count))
        rows = [colour[first : first + columns] for first in range(0, count, columns)]
    else:
        columns = min(count, 8)
        above = np.repeat(originals[..., None], 3, axis=-1)
        rows = []
        for first in range(0, count, columns):
            rows += [above[first : first + columns], colour[first : first + columns]]
    content = io.BytesIO()
    canvas = _tile(rows, columns, scale=max(1, 48 // height))
    Image.fromarray(canvas).save(content, format="PNG")
    write_output(path, content.getvalue())


def _tile(rows: list[np.ndarray], columns: int, scale: int) -> UInt8[np.ndarray, "Y X 3"]:
    """Place rows of images (n, H, W, 3) on one canvas."""
    _, height, width, _ = rows[0].shape
    height, width, gap = height * scale, width * scale, max(2, scale)
    size = (len(rows) * (height + gap) + gap, columns * (width + gap) + gap, 3)
    canvas = np.full(size, PAPER, np.uint8)
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            top, left = gap + row * (height + gap), gap + column * (width + gap)
            large = picture.repeat(scale, axis=0).repeat(scale, axis=1)
            canvas[top : top + height, left : left + width] = large
    return canvas
