"""Data for the figures: prepared data sets at the scales gpu and paper, toy data below.

Toy data needs no download: scikit-learn's 8x8 digits for MNIST, stories from a small grammar for
TinyStories, polygons for Sketchy. It shows how a figure behaves at a small size; the results do not
carry over to the data set itself.
"""

from dataclasses import replace
from pathlib import Path
from shlex import quote

import numpy as np
from jaxtyping import UInt8

from memtrain.config import RunConfig, Stream
from memtrain.data.codec import TEXT_VOCAB
from memtrain.data.images import ImageFormat, encode_images
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.store import Split, Store, StoreMeta
from memtrain.errors import MemtrainError
from memtrain.files import refuse_links
from memtrain.paper.base import TOY_DATA, Setup

LABELS = "train.labels.npy"
EVALUATE_LENGTH = {"mnist": 783, "tinystories": 1024, "sketchy": 1023}
"""Tokens in a held-out sequence: an image without its last pixel, which is only a target."""


def store(setup: Setup, name: str) -> tuple[str, int]:
    """The path of a data set, and its held-out length. Toy data is generated if it is missing.

    The path of toy data begins with the setup's root; `located` makes it a real path.
    """
    if setup.scale in ("gpu", "paper"):
        path = setup.data_dir / name
        if setup.prepares and not (path / "meta.json").is_file():
            raise MemtrainError(
                f"{path}: {name} is not prepared there; "
                f"run memtrain data {name} --out {quote(str(path))} once"
            )
        return str(path), EVALUATE_LENGTH[name]
    path = setup.folder / "data" / name
    files = ["meta.json", *([LABELS] if name != "tinystories" else [])]
    if setup.prepares and not all((path / file).is_file() for file in files):
        refuse_links(path, setup.folder)
        MAKERS[name](path, setup)
    text = setup.pick(smoke=48, cpu=192, gpu=0, paper=0)
    lengths = {"mnist": 8 * 8 - 1, "tinystories": text, "sketchy": (_side(setup) // 2) ** 2 - 1}
    return f"{setup.root}/data/{name}", lengths[name]


def check_labels(setup: Setup, name: str) -> None:
    """Refuse a prepared data set without labels before anything is trained on it."""
    path = setup.data_dir / name
    if setup.prepares and setup.scale in ("gpu", "paper") and not (path / LABELS).is_file():
        raise MemtrainError(
            f"{path}: was prepared without labels, which this figure needs; run memtrain data "
            f"{name} --out {quote(str(path))} --overwrite once, from files with labels"
        )


def located(config: RunConfig, root: str, folder: Path) -> RunConfig:
    """A config of a grid, with the path of its toy data in the sweep's folder."""
    if not isinstance(config.data, Stream) or not config.data.path.startswith(f"{root}/data/"):
        return config
    path = str(folder / "data") + config.data.path.removeprefix(f"{root}/data")
    return replace(config, data=replace(config.data, path=path))


def _side(setup: Setup) -> int:
    """Pixels per side of a polygon's image."""
    return setup.pick(smoke=16, cpu=24, gpu=64, paper=64)


def _digits(path: Path, setup: Setup) -> Store:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    tokens = np.asarray(pixels, dtype=np.uint8)
    order = np.random.default_rng(0).permutation(len(tokens))
    picture = ImageFormat(height=8, width=8, levels=17)
    meta = StoreMeta(
        name="digits",
        vocab_size=17,
        source=TOY_DATA["mnist"],
        document_length=64,
        picture=picture,
    )
    return write_store(
        path, meta, _split(tokens[order], np.asarray(labels)[order], 250), overwrite=True
    )


def _split(tokens: np.ndarray, labels: np.ndarray, held_out: int) -> dict[str, Split]:
    parts = {"train": slice(held_out, None), "test": slice(held_out)}
    return {name: Split(tokens[part].ravel(), labels=labels[part]) for name, part in parts.items()}


# ------------------------------------------------------------------------------------- stories

NAMES = ["Tom", "Lily", "Ben", "Mia", "Sam", "Anna", "Max", "Sue"]
THINGS = ["ball", "kite", "boat", "drum", "hat", "cake", "shell", "book", "stone", "lamp"]
PLACES = ("the park", "the sea", "the barn", "school", "the hill")
MOODS = ("happy", "sad", "proud", "tired")


def make_story(random: np.random.Generator) -> str:
    """A short story, whose end repeats names and objects of its beginning."""
    name, friend = random.choice(NAMES, 2, replace=False)
    thing, other = random.choice(THINGS, 2, replace=False)
    place, mood = random.choice(PLACES), random.choice(MOODS)
    middle = random.choice(
        [
            f"{friend} had a {other}. They played all day.",
            f"{friend} came too. The sun was hot and the {other} was lost.",
            f"It began to rain, and {friend} ran home with the {other}.",
        ]
    )
    return (
        f"One day {name} took a {thing} to {place}. {middle} "
        f"{name} was {mood}. At night {name} put the {thing} away.\n"
    )


def _stories(path: Path, setup: Setup) -> Store:
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", setup.pick(smoke=60, cpu=4000, gpu=0, paper=0)), ("test", 60)):
        stories = [np.frombuffer(make_story(random).encode(), np.uint8) for _ in range(count)]
        ends = np.cumsum([len(story) for story in stories])
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        splits[split] = Split(np.concatenate(stories), starts)
    meta = StoreMeta(
        name="stories",
        vocab_size=TEXT_VOCAB,
        source=TOY_DATA["tinystories"],
        text=True,
    )
    return write_store(path, meta, splits)


# ------------------------------------------------------------------------------------ sketches

CAT = (
    (0.16, 0.92), (0.12, 0.62), (0.22, 0.42), (0.20, 0.14), (0.34, 0.28), (0.46, 0.27),
    (0.58, 0.12), (0.60, 0.44), (0.74, 0.58), (0.78, 0.80), (0.90, 0.62), (0.95, 0.68),
    (0.84, 0.92),
)  # fmt: skip
"""A sitting cat: corners of a polygon, x to the right and y down."""


def draw_polygon(corners: np.ndarray, side: int) -> UInt8[np.ndarray, "H W"]:
    """Draw the outline of a closed polygon with corners in 0..1, dark on white."""
    image = np.full((side, side), 255, np.uint8)
    for begin, end in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        along = np.linspace(0, 1, 4 * side)[:, None]
        column, row = np.rint((begin + along * (end - begin)) * (side - 1)).astype(int).T
        image[row.clip(0, side - 1), column.clip(0, side - 1)] = 0
    return image


def draw_cat(side: int) -> UInt8[np.ndarray, "H W"]:
    return draw_polygon(np.array(CAT), side)


def _sketches(path: Path, setup: Setup) -> Store:
    random = np.random.default_rng(0)
    side = _side(setup)
    images, kinds = [], []
    for _ in range(setup.pick(smoke=120, cpu=2000, gpu=0, paper=0)):
        corners = int(random.integers(3, 6))
        kinds.append(corners - 3)  # its label
        angles = np.sort(random.uniform(0, 2 * np.pi, corners))
        radius = random.uniform(0.25, 0.45, (corners, 1))
        around = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        images.append(draw_polygon(0.5 + radius * around, side))
    tokens = encode_images(np.stack(images), levels=2, patch=2)
    picture = ImageFormat(height=side, width=side, levels=2, patch=2)
    meta = StoreMeta(
        name="polygons",
        vocab_size=picture.vocab_size,
        source=TOY_DATA["sketchy"],
        document_length=picture.length,
        picture=picture,
    )
    splits = _split(tokens, np.array(kinds), len(tokens) // 6)
    return write_store(path, meta, splits, overwrite=True)


MAKERS = {"mnist": _digits, "tinystories": _stories, "sketchy": _sketches}
