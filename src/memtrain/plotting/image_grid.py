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
        columns, tiles = math.ceil(math.sqrt(count)), colour[None]
    else:
        columns, tiles = min(count, 8), np.stack([np.repeat(originals[..., None], 3, -1), colour])
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
