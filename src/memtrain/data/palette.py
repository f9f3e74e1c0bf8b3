"""A palette of colours, learned from images by k-means, and the nearest colour of every pixel."""

import numpy as np
from jaxtyping import Float, Int, UInt8

Palette = tuple[tuple[int, int, int], ...]
"""Red, green and blue of each colour, 0..255, from dark to light."""

ROUNDS = 25
"""Of k-means; later ones move colours by less than a level."""
CELL_BITS = 5
"""Pixels are counted in cells of 8x8x8 colours, at most 32,768."""
SAMPLED = 2**24
"""Pixels that are counted at most, evenly spread."""
_BLOCK = 2**15
_LIGHTNESS = np.array([0.299, 0.587, 0.114])


def learn_palette(colours: UInt8[np.ndarray, "N 3"], count: int) -> Palette:
    """The `count` colours nearest to all pixels (k-means in RGB), always the same ones.

    Fewer, and then all colours exactly, if the pixels have no more than `count`.
    """
    colours = colours[:: -(-len(colours) // SAMPLED)]
    codes = colours.astype(np.int64) @ (2**16, 2**8, 1)
    known, counts = np.unique(codes, return_counts=True)
    exact = np.stack([known >> 16, known >> 8 & 255, known & 255], axis=1)
    if len(exact) > count:
        points, weights = _cells(exact, counts)
        exact = np.unique(np.rint(_k_means(points, weights, count)).astype(np.int64), axis=0)
    order = np.lexsort((*exact.T, exact @ _LIGHTNESS))
    return tuple((int(r), int(g), int(b)) for r, g, b in exact[order])


def nearest_colours(
    pixels: UInt8[np.ndarray, "*shape 3"], palette: Palette
) -> UInt8[np.ndarray, "*shape"]:
    """The number of the palette's colour that is nearest to each pixel."""
    centres = np.array(palette, np.float32)
    flat = pixels.reshape(-1, 3)
    found = np.empty(len(flat), np.uint8)
    for first in range(0, len(flat), _BLOCK):
        block = flat[first : first + _BLOCK].astype(np.float32)
        found[first : first + _BLOCK] = _nearest(block, centres)
    return found.reshape(pixels.shape[:-1])


def _cells(
    colours: Int[np.ndarray, "N 3"], counts: Int[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, "K 3"], Float[np.ndarray, " K"]]:
    """The mean colour and the number of pixels of every cell that has any."""
    cells = (colours >> (8 - CELL_BITS)) @ (2 ** (2 * CELL_BITS), 2**CELL_BITS, 1)
    _, cell = np.unique(cells, return_inverse=True)
    weights = np.bincount(cell, counts)
    sums = [np.bincount(cell, counts * channel) for channel in colours.T]
    return (np.stack(sums, axis=1) / weights[:, None]).astype(np.float32), weights


def _k_means(
    points: Float[np.ndarray, "K 3"], weights: Float[np.ndarray, " K"], count: int
) -> Float[np.ndarray, "C 3"]:
    """K-means from centres that are far apart (k-means++)."""
    random = np.random.default_rng(0)
    count = min(count, len(points))
    centres = points[[int(weights.argmax())]]
    distance = np.full(len(points), np.inf)
    while len(centres) < count:
        distance = np.minimum(distance, np.square(points - centres[-1]).sum(axis=1))
        chance = distance * weights
        chosen = np.searchsorted(chance.cumsum(), random.random() * chance.sum(), side="right")
        centres = np.concatenate([centres, points[[min(int(chosen), len(points) - 1)]]])
    for _ in range(ROUNDS):
        own = _nearest(points, centres)
        total = np.bincount(own, weights, count)
        sums = [np.bincount(own, weights * channel, count) for channel in points.T]
        means = np.stack(sums, axis=1) / total.clip(min=1)[:, None]
        centres = np.where(total[:, None] > 0, means, centres).astype(np.float32)
    return centres


def _nearest(
    points: Float[np.ndarray, "N 3"], centres: Float[np.ndarray, "C 3"]
) -> Int[np.ndarray, " N"]:
    return (np.square(centres).sum(axis=1) - 2 * points @ centres.T).argmin(axis=1)
