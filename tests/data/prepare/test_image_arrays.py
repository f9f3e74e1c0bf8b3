"""Images from .npy files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from memtrain.data.images import ImageFormat, decode_images
from memtrain.data.prepare import prepare_images, prepare_path
from memtrain.data.prepare.image_arrays import read_array
from memtrain.errors import MemtrainError

NOISE = np.random.default_rng(0)
GRAY = NOISE.integers(0, 256, (12, 4, 6), np.uint8)
COLOUR = NOISE.integers(0, 256, (12, 4, 6, 3), np.uint8)


def npy(tmp_path: Path, array: np.ndarray) -> Path:
    np.save(tmp_path / "images.npy", array)
    return tmp_path / "images.npy"


def test_bytes_are_read_as_they_are(tmp_path: Path):
    found = read_array(npy(tmp_path, GRAY))
    assert np.array_equal(found.pixels, GRAY)
    assert found.names == tuple(map(str, range(12))) and len(set(found.digests)) == 12
    assert np.array_equal(read_array(npy(tmp_path, COLOUR), colour=True).pixels, COLOUR)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_from_black_to_white(tmp_path: Path, dtype: type):
    floats = (GRAY / 255).astype(dtype)
    assert np.array_equal(read_array(npy(tmp_path, floats)).pixels, GRAY)


def test_colour_becomes_grey_unless_it_is_wanted(tmp_path: Path):
    path = npy(tmp_path, COLOUR)
    found = read_array(path)
    expected = [np.asarray(Image.fromarray(image).convert("L")) for image in COLOUR]
    assert np.array_equal(found.pixels, expected) and found.coloured == 12
    store = prepare_path(path, tmp_path / "out")
    assert store.meta.notes[0].startswith("12 images have colours, read in grey; --option")


def test_arrays_are_resized(tmp_path: Path):
    found = read_array(npy(tmp_path, COLOUR), (2, 3), colour=True)
    expected = Image.fromarray(COLOUR[5]).resize((3, 2), Image.Resampling.LANCZOS)
    assert found.pixels.shape == (12, 2, 3, 3)
    assert np.array_equal(found.pixels[5], np.asarray(expected))


def test_an_array_becomes_a_store(tmp_path: Path):
    store = prepare_images(npy(tmp_path, GRAY), tmp_path / "out", levels=4)
    assert store.meta.picture == ImageFormat(height=4, width=6, levels=4)
    assert sum(info.documents for info in store.splits.values()) == 12
    exact = prepare_images(npy(tmp_path, COLOUR[:, :2, :2]), tmp_path / "c", colour=True, levels=99)
    assert exact.meta.picture is not None and exact.meta.picture.palette
    shown = decode_images(exact.tokens("train").reshape(-1, 4), exact.meta.picture)
    known = {image.tobytes() for image in COLOUR[:, :2, :2]}
    assert {image.tobytes() for image in shown} <= known
    assert "every pixel keeps its colour" in exact.meta.notes[-1]


def test_a_dark_array_is_noted(tmp_path: Path):
    store = prepare_images(npy(tmp_path, GRAY // 16), tmp_path / "out")
    assert store.meta.notes == (
        "the brightest pixel is 15 of 255; scale the images if white is another value",
    )


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        (GRAY.astype(np.int64), {}, "images are uint8, or floats in 0..1; array.astype(np.uint8)"),
        (GRAY / 1.0, {}, "holds 255; floats must be 0..1: divide by the largest"),
        (GRAY / -255, {}, "holds -1; floats must be 0..1"),
        (GRAY / 1.0, {}, "numbers over time by memtrain train series --data"),
        (np.full((3, 2, 2), np.nan), {}, "holds nan; floats must be 0..1"),
        (COLOUR[..., :1], {}, "colour images are (N, H, W, 3); array[..., 0] is grey"),
        (np.zeros((9, 4, 4, 4), np.uint8), {}, "array[..., :3] has the colours"),
        (np.zeros((9, 3, 4, 5), np.uint8), {}, "np.moveaxis(array, 1, -1) puts the colours last"),
        (np.zeros((0, 4, 4), np.uint8), {}, "holds no pixels; at least 2 images are needed"),
        (GRAY, {"colour": True}, "holds grey images, (12, 4, 6); leave colour out"),
        (GRAY, {"size": 0}, "size=0x0: must be 1..4,096 pixels each"),
        (GRAY[[0, 0, 0]], {}, "different images: 1, at least 2 are needed to hold one out"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, array: np.ndarray, options: dict, message: str):
    path = npy(tmp_path, array)
    with pytest.raises(MemtrainError) as caught:
        prepare_images(path, tmp_path / "out", **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_array_that_would_not_fit_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("memtrain.data.prepare.image_files.MAX_BYTES", 100)
    with pytest.raises(MemtrainError, match="12 images of 4x6 pixels take 288 bytes, more than"):
        read_array(npy(tmp_path, GRAY))
