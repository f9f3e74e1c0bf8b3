"""Prepare the user's own files: text, images, and arrays of tokens."""

from pathlib import Path

import numpy as np

from memtrain.data.codec import SEPARATOR_TOKEN, TEXT_VOCAB
from memtrain.data.images import Augmentation
from memtrain.data.prepare import download
from memtrain.data.prepare.encode import (
    check_share,
    encode_texts,
    equal_note,
    groups_of,
    held_out_count,
    held_out_names,
    non_ascii_note,
    split_stream,
)
from memtrain.data.prepare.file_kind import mixed_note, require_kind
from memtrain.data.prepare.image_arrays import dark_note, read_array
from memtrain.data.prepare.image_classes import label_file, read_classes
from memtrain.data.prepare.image_files import read_folder
from memtrain.data.prepare.image_store import reading_notes, write_images
from memtrain.data.prepare.limits import ignored_note, one_line, require_memory
from memtrain.data.prepare.store_writer import check_place, write_store
from memtrain.data.prepare.text_files import read_text
from memtrain.data.store import MAX_VOCAB, Split, Store, StoreMeta, open_array
from memtrain.errors import MemtrainError

GREYS, COLOURS = 256, 64
"""Levels of images by default."""


def prepare_text(
    path: Path,
    out: Path,
    *,
    mode: str = "bytes",
    separator: bool = False,
    column: str | None = None,
    held_out: float = 0.1,
    overwrite: bool = False,
) -> Store:
    """Prepare a text file or a folder of them; see `read_text` for the formats.

    Args:
        path: the file or folder.
        mode: "bytes" keeps all bytes, "ascii" drops non-ASCII characters.
        separator: put token 0 between documents.
        column: the column to read of JSONL, CSV and parquet; `text` by default.
        held_out: share of the documents in test, the last ones, or the end of a single document.
    """
    check_place(out, overwrite)
    check_share(held_out)
    kind = require_kind(path, "text")
    texts = read_text(path, column)
    if mode == "ascii" and texts.not_utf8:
        raise MemtrainError(
            f"mode=ascii: {one_line(texts.not_utf8[0])} is not UTF-8, so its characters are "
            "unknown; convert it: iconv -f LATIN1 -t UTF-8 FILE > NEW"
        )
    encoded = encode_texts(texts, mode, separator, str(path))
    meta = StoreMeta(
        name=path.resolve().stem,
        vocab_size=TEXT_VOCAB,
        source=str(path),
        text=True,
        separator=SEPARATOR_TOKEN if separator else None,
        notes=(*mixed_note(path, kind, "text"), *texts.notes, *non_ascii_note(encoded, "")),
    )
    splits = split_stream(encoded.tokens, encoded.starts, held_out)
    return write_store(out, meta, splits, overwrite=overwrite)


def prepare_images(
    path: Path,
    out: Path,
    *,
    size: int | tuple[int, int] | None = None,
    colour: bool = False,
    levels: int | None = None,
    patch: int = 1,
    threshold: int | None = None,
    labels: bool | str = False,
    held_out: float = 0.1,
    mirror: bool = False,
    shift: int = 0,
    overwrite: bool = False,
) -> Store:
    """Prepare a folder or zip of image files, or a .npy of images, in grey or in colour.

    Args:
        path: the folder, zip or .npy.
        size: (height, width), or one number for both, to resize to.
        colour: keep the colours, each pixel as the nearest of a palette; else images are grey.
        levels: grey levels (256), or colours of the palette (64).
        patch: side of the squares that make one token; only in grey.
        threshold: darker pixels are ink; needs two grey levels.
        labels: begin each image with its class: true for the names of folders, or the labels
            beside a .npy; or a file of labels (see `read_classes`).
        held_out: share of the images in test, chosen by a hash of their names; equal images are
            all in train or all in test.
        mirror: add mirrored images to train.
        shift: add images shifted by this many pixels in eight directions to train.
    """
    check_place(out, overwrite)
    check_share(held_out)
    augmentation = Augmentation(mirror=mirror, shift=shift)  # checks the options first
    levels = (COLOURS if colour else GREYS) if levels is None else levels
    _check_colour(colour, levels, patch, threshold)
    kind = require_kind(path, "images")
    if labels:
        label_file(path, labels)  # before all images are read
    read = read_array if kind.format == "npy" else read_folder
    images = read(path, (size, size) if isinstance(size, int) else size, colour=colour)
    groups = groups_of(images.names, images.digests)
    held = held_out_names(groups, held_out)
    return write_images(
        out,
        images,
        [group in held for group in groups],
        augmentation,
        classes=read_classes(path, images, labels),
        class_tokens=bool(labels),
        name=path.resolve().stem,
        source=str(path),
        notes=(
            *mixed_note(path, kind, "images"),
            *reading_notes(images),
            *ignored_note(images.ignored),
            *equal_note(images.digests),
            *(dark_note(images) if kind.format == "npy" else ()),
        ),
        colour=colour,
        levels=levels,
        patch=patch,
        threshold=threshold,
        overwrite=overwrite,
    )


def _check_colour(colour: bool, levels: int, patch: int, threshold: int | None) -> None:
    """Refuse options that colours do not have."""
    if not colour:
        return
    if patch != 1:
        raise MemtrainError(
            f"patch={patch} with colour: a colour token is one pixel; leave patch out, or make "
            "the images smaller (--option size 16)"
        )
    if threshold is not None:
        raise MemtrainError(f"threshold={threshold} with colour: is for grey; leave it out")
    if not 2 <= levels <= GREYS:
        raise MemtrainError(f"levels={levels} with colour: must be 2..{GREYS} colours; 64 is usual")


def prepare_tokens(
    path: Path,
    out: Path,
    *,
    vocab_size: int | None = None,
    held_out: float = 0.1,
    overwrite: bool = False,
) -> Store:
    """Prepare a .npy of tokens: one stream (1-D), or documents of one length (2-D).

    Args:
        path: the file.
        vocab_size: the number of different tokens; the highest token + 1 by default.
        held_out: share of the documents in test, the last ones, or the end of a stream.
    """
    check_place(out, overwrite)
    check_share(held_out)
    require_kind(path, "tokens")
    try:
        array = open_array(path)
    except (OSError, ValueError) as error:
        raise MemtrainError(f"{path}: {download.first_line(error)}") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise MemtrainError(
            f"{path}: {array.dtype} of shape {array.shape}: must be whole numbers, "
            f"1-D (a stream) or 2-D (documents x length); {_array_remedy(array)}"
        )
    if not array.flags.c_contiguous:  # is copied into C order in memory
        require_memory(array.nbytes, str(path), "save it in C order: np.ascontiguousarray(array)")
    if not array.size:
        raise MemtrainError(f"{path}: holds no tokens, at least 4 are needed, 2 per split")
    low, high = int(array.min()), int(array.max())
    if low < 0:
        raise MemtrainError(f"{path}: holds {low}; tokens are 0 or more")
    if vocab_size is not None and high >= vocab_size:
        raise MemtrainError(f"vocab_size={vocab_size}: {path} holds the token {high}")
    if high >= MAX_VOCAB:
        raise MemtrainError(f"{path}: holds the token {high:,}; tokens are below {MAX_VOCAB:,}")
    if high == 0 and vocab_size is None:
        raise MemtrainError(f"{path}: holds only zeros; there must be two different tokens")
    meta = StoreMeta(
        name=path.resolve().stem,
        vocab_size=high + 1 if vocab_size is None else vocab_size,
        source=str(path),
        document_length=array.shape[1] if array.ndim == 2 else None,
    )
    if array.ndim == 1:
        splits = split_stream(array, np.zeros(1, np.int64), held_out)
    else:
        count = held_out_count(len(array), held_out, f"{path}: documents")
        rows = {"train": array[:-count], "test": array[-count:]}
        splits = {name: Split(part.reshape(-1)) for name, part in rows.items()}
    return write_store(out, meta, splits, overwrite=overwrite)


def _array_remedy(array: np.ndarray) -> str:
    return (
        "numbers over time are learned by memtrain train series --data FILE, or convert them to "
        "tokens: np.save('tokens.npy', array.astype(np.uint16))"
    )
