"""A palette of colours, and the nearest colour of every pixel."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memtrain.data.palette import learn_palette, nearest_colours

NOISE = np.random.default_rng(0).integers(0, 256, (3000, 3), np.uint8)
NINE = learn_palette(NOISE, 9)


def error(pixels: np.ndarray, palette) -> float:
    chosen = np.array(palette)[nearest_colours(pixels, palette)]
    return float(np.square(pixels - chosen).mean())


@given(hnp.arrays(np.uint8, (40, 3)), st.integers(40, 256))
def test_few_colours_are_kept_exactly(pixels: np.ndarray, count: int):
    palette = learn_palette(pixels, count)
    assert set(palette) == {tuple(map(int, pixel)) for pixel in pixels}
    assert error(pixels, palette) == 0


def test_a_palette_is_sorted_from_dark_to_light():
    pixels = np.array([[255, 255, 255], [0, 0, 255], [0, 0, 0], [0, 255, 0]], np.uint8)
    assert learn_palette(pixels, 4) == ((0, 0, 0), (0, 0, 255), (0, 255, 0), (255, 255, 255))


def test_more_colours_are_nearer_and_the_palette_is_always_the_same():
    errors = [error(NOISE, learn_palette(NOISE, count)) for count in (2, 8, 32, 128)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 8
    assert learn_palette(NOISE, 16) == learn_palette(NOISE, 16)
    assert learn_palette(NOISE, 16) == learn_palette(NOISE[::-1], 16)


def test_k_means_finds_groups_of_colours():
    random = np.random.default_rng(1)
    centres = np.array([[20, 20, 20], [200, 40, 40], [40, 200, 40], [250, 250, 250]])
    pixels = centres[random.integers(4, size=2000)] + random.integers(-5, 6, (2000, 3))
    palette = np.array(learn_palette(pixels.clip(0, 255).astype(np.uint8), 4))
    for centre in centres:
        assert np.abs(palette - centre).max(axis=1).min() <= 3


@given(hnp.arrays(np.uint8, (5, 4, 3)))
def test_the_nearest_colour_has_the_least_squared_distance(pixels: np.ndarray):
    palette = NINE
    distance = np.square(pixels[..., None, :].astype(int) - np.array(palette)).sum(axis=-1)
    chosen = nearest_colours(pixels, palette)
    assert chosen.shape == (5, 4)
    taken = np.take_along_axis(distance, chosen[..., None].astype(int), axis=-1)[..., 0]
    assert np.array_equal(taken, distance.min(axis=-1))
