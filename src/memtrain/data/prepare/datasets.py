"""Prepare MNIST, TinyStories, enwik8 and Sketchy."""

import gzip
import math
import re
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import UInt8

from memtrain.data.codec import SEPARATOR_TOKEN, TEXT_VOCAB
from memtrain.data.images import Augmentation, ImageFormat
from memtrain.data.prepare import download
from memtrain.data.prepare.encode import (
    check_share,
    encode_texts,
    equal_note,
    groups_of,
    held_out_names,
    non_ascii_note,
)
from memtrain.data.prepare.image_arrays import resized
from memtrain.data.prepare.image_classes import Classes
from memtrain.data.prepare.image_files import ImageSet, check_size, read_folder
from memtrain.data.prepare.image_store import reading_notes, write_images
from memtrain.data.prepare.limits import FREE, GROWTH, require_memory
from memtrain.data.prepare.store_writer import check_place, write_store
from memtrain.data.prepare.text_files import read_texts
from memtrain.data.store import Split, Store, StoreMeta
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import open_regular

MAX_IDX_BYTES = 4 * 2**30
"""An IDX file that claims to hold more than this is refused before it is read."""
ENWIK8_BYTES = 10**8
SKETCHY_NAME = re.compile(r"(?P<photo>.+)-\d+\.png")


def _check_folder(name: str, data_dir: Path) -> None:
    if not data_dir.exists():
        raise MemtrainError(f"{name}: data_dir={data_dir}: no such folder")


def _first_existing(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).exists()), None)


# ---------------------------------------------------------------------------------------- MNIST


def prepare_mnist(
    data_dir: Path | None,
    out: Path,
    *,
    size: int | None = None,
    levels: int = 256,
    patch: int = 1,
    labels: bool = False,
    overwrite: bool = False,
) -> Store:
    """Prepare MNIST: 28x28 digits of 256 grey levels.

    Args:
        data_dir: the folder with the IDX files of the images, and of the labels if digits are
            drawn by class, or the figures' samples are to be judged; they are downloaded by
            default.
        size: height and width to resize to (28).
        levels: grey levels; 4 with patch 2 give 196 tokens of 256 per digit.
        patch: side of the squares that make one token.
        labels: begin each image with the token of its class, 0 to 9.
    """
    side = 28 if size is None else size
    check_size((side, side))
    ImageFormat(height=side, width=side, levels=levels, patch=patch)  # checks the options first
    check_place(out, overwrite)
    images, known = [], []
    with _mnist_files(data_dir) as files:
        for path, label_path in files:
            gray = read_idx(path)
            if gray.shape[1:] != (28, 28):
                raise MemtrainError(f"{path}: shape {gray.shape}, MNIST's images are 28x28")
            images.append(gray)
            if label_path is not None:
                known.append(read_idx(label_path))
                if known[-1].shape != gray.shape[:1]:
                    raise MemtrainError(
                        f"{label_path}: shape {known[-1].shape}, {path} has {len(gray)} images"
                    )
    if labels and len(known) < len(images):
        missing = " and ".join(download.MNIST_LABELS_SHA256)
        raise MemtrainError(f"labels=true: needs {missing} in {data_dir} too")
    classes = None
    if len(known) == len(images):
        digits = np.concatenate(known).astype(np.int64)
        names = tuple(map(str, range(max(10, int(digits.max()) + 1))))
        classes = Classes(names, digits)
    pixels = resized(np.concatenate(images), None if size is None else (side, side), "L")
    return write_images(
        out,
        ImageSet(pixels, ()),
        np.repeat([False, True], [len(gray) for gray in images]).tolist(),
        Augmentation(),
        classes=classes,
        class_tokens=labels,
        name="mnist",
        source=f"MNIST (LeCun and Cortes), from {data_dir or download.MNIST_URL}",
        notes=(),
        levels=levels,
        patch=patch,
        overwrite=overwrite,
    )


@contextmanager
def _mnist_files(data_dir: Path | None) -> Iterator[list[tuple[Path, Path | None]]]:
    """The images of train and test, each with its labels, if there are any."""
    if data_dir is None:
        with tempfile.TemporaryDirectory() as folder:
            train, test, *labels = download.download_mnist(Path(folder))
            yield list(zip((train, test), labels, strict=True))
        return
    _check_folder("mnist", data_dir)

    def find(names: Iterable[str]) -> list[Path | None]:
        return [_first_existing(data_dir, name, name.removesuffix(".gz")) for name in names]

    images, names = find(download.MNIST_SHA256), download.MNIST_SHA256
    missing = [name for name, path in zip(names, images, strict=True) if path is None]
    if missing:
        raise MemtrainError(f"mnist: {data_dir} has no {' and no '.join(missing)}")
    pairs = zip(images, find(download.MNIST_LABELS_SHA256), strict=True)
    yield [(path, labels) for path, labels in pairs if path is not None]


def read_idx(path: Path) -> UInt8[np.ndarray, "N H W"] | UInt8[np.ndarray, " N"]:
    """Read an IDX file of byte images or labels, plain or gzipped."""
    try:
        with (
            open_regular(path) as stored,
            gzip.open(stored) if path.suffix == ".gz" else stored as file,
        ):
            magic = file.read(4)
            if magic not in (b"\0\0\x08\x03", b"\0\0\x08\x01"):
                raise MemtrainError(
                    f"{path}: starts with {magic.hex() or 'nothing'}, not with the magic number of "
                    "an IDX file of byte images (00000803) or labels (00000801)"
                )
            header = file.read(4 * magic[3])
            if len(header) < 4 * magic[3]:
                raise MemtrainError(f"{path}: cut short in its header; get it again")
            shape = struct.unpack(f">{magic[3]}I", header)
            size = math.prod(shape)
            limit = min(MAX_IDX_BYTES, max(FREE, GROWTH * path.stat().st_size))
            if not 0 < size <= limit:
                raise MemtrainError(f"{path}: its header claims {shape}: {size:,} bytes")
            data = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MemtrainError(f"{path}: damaged or cut short ({error}); get it again") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    if len(data) != size:
        held = "more" if len(data) > size else f"{len(data):,}"
        raise MemtrainError(f"{path}: its header claims {size:,} bytes, it holds {held}")
    return np.frombuffer(data, np.uint8).reshape(shape)


# ---------------------------------------------------------------------------------- TinyStories


def prepare_tinystories(
    data_dir: Path | None, out: Path, *, separator: bool = False, overwrite: bool = False
) -> Store:
    """Prepare TinyStories as ASCII characters; stories are joined directly, as in the paper.

    Args:
        data_dir: the folder with train and valid as .txt, .txt.gz or parquet; they are downloaded
            by default.
        separator: put token 0 between stories.
    """
    check_place(out, overwrite)
    splits, notes = {}, []
    for split, paths in zip(("train", "test"), _tinystories_files(data_dir), strict=True):
        texts = read_texts(paths, any_bytes=True)
        encoded = encode_texts(texts, "ascii", separator, ", ".join(map(str, paths)))
        size = len(encoded.tokens) - (len(encoded.starts) - 1 if separator else 0)
        splits[split] = Split(encoded.tokens, encoded.starts, text_bytes=size)
        notes += non_ascii_note(encoded, f"{split}: ")
    meta = StoreMeta(
        name="tinystories",
        vocab_size=TEXT_VOCAB,
        source=f"TinyStories (Eldan and Li 2023), from {data_dir or download.TINYSTORIES_REPO}",
        text=True,
        separator=SEPARATOR_TOKEN if separator else None,
        notes=tuple(notes),
    )
    return write_store(out, meta, splits, overwrite=overwrite)


def _tinystories_files(data_dir: Path | None) -> list[list[Path]]:
    """The files of train and of test."""
    if data_dir is None:
        return [[path] for path in download.download_tinystories()]
    _check_folder("tinystories", data_dir)
    found, missing = [], []
    for split in ("train", "valid"):
        stems = (f"{split}.txt", f"TinyStories-{split}.txt")
        text = _first_existing(data_dir, *(stem + end for stem in stems for end in ("", ".gz")))
        tables = sorted(data_dir.glob(f"{split}*.parquet"))
        tables = tables or sorted(data_dir.glob(f"data/{split}*.parquet"))
        found.append([text] if text else tables)
        if not found[-1]:
            missing.append(f"{split}.txt, {split}.txt.gz or {split}*.parquet")
    if missing:
        raise MemtrainError(f"tinystories: {data_dir} has no {' and no '.join(missing)}")
    return found


# --------------------------------------------------------------------------------------- enwik8


def prepare_enwik8(
    data_dir: Path | None, out: Path, *, held_out: str = "validation", overwrite: bool = False
) -> Store:
    """Prepare enwik8, the first 100 million bytes of Wikipedia, as bytes with its usual split.

    The first 90 million bytes are for training, the next 5 million for validation, the last 5
    million for the test. Both parts that are held out make a store with the same training part.

    Args:
        data_dir: the file enwik8 or enwik8.gz, or a folder with one.
        held_out: "validation", to train and choose a checkpoint with; or "test".
    """
    check_place(out, overwrite)
    parts = {"validation": (90, 95), "test": (95, 100)}
    if held_out not in parts:
        raise MemtrainError(f"held_out={held_out!r}: {did_you_mean(held_out, parts)}")
    path = _enwik8_file(data_dir)
    whole = _read_enwik8(path)
    begin, end = (len(whole) * percent // 100 for percent in parts[held_out])
    start = np.zeros(1, np.int64)
    cut = {"train": whole[: len(whole) * 90 // 100], "test": whole[begin:end]}
    splits = {name: Split(one, start, text_bytes=len(one)) for name, one in cut.items()}
    notes = (f"held out: the {held_out} part, bytes {begin:,} to {end:,}",)
    if len(whole) != ENWIK8_BYTES:
        notes += (
            f"not enwik8: {len(whole):,} bytes instead of {ENWIK8_BYTES:,}; split 90 : 5 : 5",
        )
    meta = StoreMeta(
        name="enwik8",
        vocab_size=TEXT_VOCAB,
        source=f"enwik8 (Mahoney 2006), from {path}",
        text=True,
        notes=notes,
    )
    return write_store(out, meta, splits, overwrite=overwrite)


def _read_enwik8(path: Path) -> UInt8[np.ndarray, " N"]:
    """Every byte of the file, plain or gzipped."""
    require_memory(2 * ENWIK8_BYTES, str(path), "close other programs")
    try:
        with open_regular(path) as file:
            magic = file.read(2)
        if magic == b"PK":
            raise MemtrainError(f"{path}: is a zip; unpack it first")
        with (
            open_regular(path) as stored,
            gzip.open(stored) if magic == b"\x1f\x8b" else stored as file,
        ):
            raw = file.read(ENWIK8_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MemtrainError(f"{path}: damaged or cut short ({error}); get it again") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    if len(raw) > ENWIK8_BYTES:
        raise MemtrainError(
            f"{path}: has more than the {ENWIK8_BYTES:,} bytes of enwik8; memtrain data {path} "
            "prepares any text"
        )
    return np.frombuffer(raw, np.uint8)


def _enwik8_file(data_dir: Path | None) -> Path:
    if data_dir is None:
        raise MemtrainError(
            "enwik8: has no direct download; get enwik8.zip from "
            "https://mattmahoney.net/dc/textdata.html, unpack it and pass --data-dir enwik8"
        )
    _check_folder("enwik8", data_dir)
    found = _first_existing(data_dir, "enwik8", "enwik8.gz") if data_dir.is_dir() else data_dir
    if found is None:
        raise MemtrainError(f"enwik8: {data_dir} has no enwik8 and no enwik8.gz")
    return found


# -------------------------------------------------------------------------------------- Sketchy


def prepare_sketchy(
    data_dir: Path | None,
    out: Path,
    *,
    threshold: int = 192,
    held_out: float = 0.1,
    mirror: bool = False,
    shift: int = 0,
    labels: bool = False,
    overwrite: bool = False,
) -> Store:
    """Prepare Sketchy: sketches at 64x64 (Lanczos), binarised, as 1,024 tokens of 2x2 pixels.

    Sketches of one photo are alike, so all of them are in train or all in test.

    Args:
        data_dir: a zip or folder of `<class>/<photo>-<number>.png`, or a folder with one.
        threshold: darker pixels are ink. Resizing greys thin strokes: 128 breaks them up.
        held_out: share of the photos in test, chosen by a hash of their names.
        mirror: add mirrored sketches to train.
        shift: add sketches shifted by this many pixels in eight directions to train.
        labels: begin each sketch with the token of its class.
    """
    check_place(out, overwrite)
    check_share(held_out)
    augmentation = Augmentation(mirror=mirror, shift=shift)  # checks the options first
    if data_dir is None:
        raise MemtrainError(
            "sketchy: has no direct download; get the sketches (256x256 PNG) from "
            "https://sketchy.eye.gatech.edu and pass --data-dir FOLDER"
        )
    path = _sketchy_files(data_dir)
    images = read_folder(
        path,
        (64, 64),
        accept=lambda name: _photo(name) is not None,
        wanted="sketches are PNG or JPEG files named PHOTO-NUMBER, as n02691156_58-1.png",
    )
    photos = [_photo(name) or "" for name in images.names]
    # Without folders, photos still begin with the number of their class: n02691156_58.
    kinds = [PurePosixPath(name).parent.name or _photo_class(name) for name in images.names]
    names, index = np.unique(kinds, return_inverse=True)
    groups = groups_of(photos, images.digests)
    held = held_out_names(groups, held_out)
    parted = {photo: group in held for photo, group in zip(photos, groups, strict=True)}
    return write_images(
        out,
        images,
        [parted[photo] for photo in photos],
        augmentation,
        classes=Classes(tuple(names.tolist()), index),
        class_tokens=labels,
        name="sketchy",
        source=f"Sketchy (Sangkloy et al. 2016), from {path}",
        notes=(
            *reading_notes(replace(images, coloured=0)),
            *equal_note(images.digests),
            f"ink: grey below {threshold}",
            f"split by photo: {len(parted) - sum(parted.values()):,} in train, "
            f"{sum(parted.values()):,} in test",
        ),
        levels=2,
        patch=2,
        threshold=threshold,
        overwrite=overwrite,
    )


def _sketchy_files(data_dir: Path) -> Path:
    """The zip or folder of sketches."""
    _check_folder("sketchy", data_dir)
    if data_dir.is_file():
        return data_dir
    # The database's own zip holds each sketch several times, moved and scaled: take the plain one.
    plain = ("256x256/sketch/tx_000000000000", "sketch/tx_000000000000", "sketch")
    known = _first_existing(data_dir, "sketchy_256x256_png.zip", *plain)
    if known:
        return known
    zips = sorted(data_dir.glob("*.zip"))
    if len(zips) > 1:
        named = ", ".join(path.name for path in zips)
        raise MemtrainError(f"sketchy: {data_dir} has several zips ({named}); pass the one to read")
    return zips[0] if zips else data_dir


def _photo_class(name: str) -> str:
    return PurePosixPath(name).name.partition("_")[0]


def _photo(name: str) -> str | None:
    """The photo of a sketch; None for other files."""
    match = SKETCHY_NAME.fullmatch(PurePosixPath(name).name)
    return match and match["photo"]
