"""Prepare the user's own files: text, images, and arrays of tokens."""

from pathlib import Path

import numpy as np

from memtrain.data.codec import SEPARATOR_TOKEN, TEXT_VOCAB
from memtrain.data.images import Augmentation
from memtrain.data.prepare import download
from memtrain.data.prepare.encode import (
    check_share,
    encode_texts,
    held_out_count,
    held_out_names,
    non_ascii_note,
    skipped_note,
    split_stream,
    write_images,
)
from memtrain.data.prepare.file_kind import mixed_note, require_kind
from memtrain.data.prepare.image_files import read_folder
from memtrain.data.prepare.limits import ignored_note, one_line, require_memory
from memtrain.data.prepare.store_writer import check_place, write_store
from memtrain.data.prepare.text_files import read_text
from memtrain.data.store import MAX_VOCAB, Split, Store, StoreMeta, open_array
from memtrain.errors import MemtrainError


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
    levels: int = 256,
    patch: int = 1,
    threshold: int | None = None,
    held_out: float = 0.1,
    mirror: bool = False,
    shift: int = 0,
    overwrite: bool = False,
) -> Store:
    """Prepare a folder or zip of PNG and JPEG files, in grey.

    Args:
        path: the folder or zip.
        size: (height, width), or one number for both, to resize to.
        levels: grey levels.
        patch: side of the squares that make one token.
        threshold: darker pixels are ink; needs two levels.
        held_out: share of the images in test, chosen by a hash of their names.
        mirror: add mirrored images to train.
        shift: add images shifted by this many pixels in eight directions to train.
    """
    check_place(out, overwrite)
    check_share(held_out)
    augmentation = Augmentation(mirror=mirror, shift=shift)  # checks the options first
    kind = require_kind(path, "images")
    images = read_folder(path, (size, size) if isinstance(size, int) else size)
    held = held_out_names(images.names, held_out)
    return write_images(
        out,
        images,
        [name in held for name in images.names],
        augmentation,
        name=path.resolve().stem,
        source=str(path),
        notes=(
            *mixed_note(path, kind, "images"),
            *skipped_note(images),
            *ignored_note(images.ignored),
        ),
        levels=levels,
        patch=patch,
        threshold=threshold,
        overwrite=overwrite,
    )


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
    if array.ndim > 2:
        return "images are read as PNG files: memtrain train images --data FOLDER"
    return (
        "numbers over time are learned by memtrain train series --data FILE, or convert them to "
        "tokens: np.save('tokens.npy', array.astype(np.uint16))"
    )
