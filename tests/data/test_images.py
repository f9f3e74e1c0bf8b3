"""Data augmentation: horizontal flips and shifts."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from memtrain.data.images import Augmentation, ImageFormat, decode_images, encode_images
from memtrain.data.prepare import prepare, prepare_path
from memtrain.errors import MemtrainError

NOISE = np.random.default_rng(0)
GRAY = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def save(folder: Path, names: list[str], side: int) -> Path:
    """PNG files of noise."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(NOISE.integers(0, 256, (side, side), np.uint8)).save(path)
    return folder


def sketches(folder: Path, count: int) -> Path:
    return save(folder / "raw", [f"cat/n{photo:03d}_7-1.png" for photo in range(count)], 64)


PALETTE = ((0, 0, 0), (200, 0, 0), (255, 255, 255))


def test_a_colour_token_is_the_nearest_colour_of_the_palette():
    pixels = np.array([[[[9, 0, 0], [255, 30, 30]], [[250, 250, 240], [0, 0, 0]]]], np.uint8)
    tokens = encode_images(pixels, levels=3, palette=PALETTE)
    assert tokens.tolist() == [[0, 1, 2, 0]]
    image = ImageFormat(height=2, width=2, levels=3, palette=PALETTE)
    assert (image.vocab_size, image.length) == (3, 4)
    shown = decode_images(tokens, image)
    assert shown.shape == (1, 2, 2, 3) and shown[0, 0].tolist() == [[0, 0, 0], [200, 0, 0]]
    assert np.array_equal(encode_images(shown, levels=3, palette=PALETTE), tokens)


def test_two_colours_are_no_ink():
    image = ImageFormat(height=1, width=2, levels=2, palette=PALETTE[:2])
    shown = decode_images(np.array([[0, 1]]), image)
    assert shown.tolist() == [[[[0, 0, 0], [200, 0, 0]]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 4}, "palette: 3 colours for 4 levels"),
        ({"levels": 3, "patch": 2}, "patch=2 with colour: a colour token is one pixel"),
        ({"levels": 3, "palette": (*PALETTE[:2], (0, 256, 0))}, "must be 0..255"),
    ],
)
def test_an_impossible_palette_is_refused(options: dict, message: str):
    with pytest.raises(MemtrainError, match=message):
        ImageFormat(**{"height": 2, "width": 2, "palette": PALETTE} | options)


def test_colour_images_are_augmented_too():
    pixels = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    copies = list(Augmentation(mirror=True, shift=1).apply(pixels))
    assert len(copies) == 18 and all(copy.shape == pixels.shape for copy in copies)
    assert np.array_equal(copies[9], pixels[:, :, ::-1])
    by_channel = list(Augmentation(mirror=True, shift=1).apply(pixels[..., 1]))
    assert np.array_equal([copy[..., 1] for copy in copies], by_channel)


def test_without_augmentation_the_image_is_unchanged():
    (only,) = Augmentation().apply(GRAY)
    assert np.array_equal(only, GRAY) and Augmentation().count == 1


def test_mirroring_swaps_left_and_right():
    same, mirrored = Augmentation(mirror=True).apply(GRAY)
    assert np.array_equal(same, GRAY)
    assert np.array_equal(mirrored[0], [[3, 2, 1, 0], [7, 6, 5, 4], [11, 10, 9, 8]])


def test_images_shift_in_eight_directions_and_the_border_is_repeated():
    copies = list(Augmentation(shift=1).apply(GRAY))
    assert len(copies) == Augmentation(shift=1).count == 9
    assert np.array_equal(copies[0], GRAY)
    assert len({copy.tobytes() for copy in copies}) == 9
    moved_up_and_left = [[5, 6, 7, 7], [9, 10, 11, 11], [9, 10, 11, 11]]
    moved_down_and_right = [[0, 0, 1, 2], [0, 0, 1, 2], [4, 4, 5, 6]]
    shown = [copy[0].tolist() for copy in copies]
    assert moved_up_and_left in shown and moved_down_and_right in shown


def test_shift_and_mirror_combine():
    copies = list(Augmentation(mirror=True, shift=2).apply(GRAY))
    assert len(copies) == Augmentation(mirror=True, shift=2).count == 18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": -1}, "shift=-1: must be at least 0 pixels"),
        ({"shift": 1.5}, "shift=1.5: must be a whole number"),
        ({"mirror": 2}, "mirror=2: must be true or false"),
        ({"shift": 64}, "shift=64: images have 64x64"),
    ],
)
def test_impossible_augmentation_is_refused(tmp_path: Path, options: dict, message: str):
    raw = sketches(tmp_path, 4)
    with pytest.raises(MemtrainError, match=message):
        prepare("sketchy", data_dir=raw, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_only_training_images_are_augmented(tmp_path: Path):
    raw = sketches(tmp_path, 20)
    plain = prepare("sketchy", data_dir=raw, out=tmp_path / "plain")
    many = prepare("sketchy", data_dir=raw, out=tmp_path / "many", mirror=True, shift=1)
    assert many.splits["train"].documents == 18 * plain.splits["train"].documents
    assert np.array_equal(many.tokens("test"), plain.tokens("test"))
    assert np.array_equal(many.tokens("train")[: len(plain.tokens("train"))], plain.tokens("train"))
    assert many.meta.notes[-1] == "train holds 18 variants of each image: mirrored and shifted by 1"


def test_user_images_are_augmented_too(tmp_path: Path):
    folder = save(tmp_path / "pictures", [f"{number}.png" for number in range(5)], 4)
    store = prepare_path(folder, tmp_path / "out", mirror=True)
    assert store.meta.picture is not None
    shown = decode_images(store.tokens("train").reshape(-1, 16), store.meta.picture)
    half = len(shown) // 2
    assert half and np.array_equal(shown[half:], shown[:half, :, ::-1])
