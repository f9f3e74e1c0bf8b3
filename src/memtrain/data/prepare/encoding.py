"""Text and pictures as tokens, and the notes on what was left out on the way."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer, UInt8

from memtrain.data.augmentation import Augmentation
from memtrain.data.images import ImageFormat, encode_images
from memtrain.data.prepare.image_files import ImageSet
from memtrain.data.prepare.limits import require_memory, show
from memtrain.data.prepare.text_files import Texts
from memtrain.data.store import Split
from memtrain.data.text import EncodedText, encode_text
from memtrain.errors import MemtrainError

_BLOCK = 2**24
"""Pixels that are turned into tokens at once."""


def encode_named(texts: Texts, mode: str, separator: bool, where: str) -> EncodedText:
    """The tokens of a text; an error says where the text is."""
    try:
        return encode_text(texts.raw, mode, separator=separator)
    except MemtrainError as error:
        raise MemtrainError(f"{where}: {error}") from None


def non_ascii_note(encoded: EncodedText, prefix: str) -> tuple[str, ...]:
    """A note on what is beyond ASCII, if anything is: dropped, or kept as bytes."""
    if encoded.kept_bytes:
        kept = f"kept {encoded.kept_bytes:,} bytes beyond ASCII"
        return (f"{prefix}{kept}; --option mode ascii drops them",)
    if not encoded.dropped_bytes:
        return ()
    characters, count = encoded.dropped_characters, encoded.dropped_bytes
    return (f"{prefix}dropped {characters:,} non-ASCII characters ({count:,} bytes)",)


def image_codec(
    pictures: ImageSet,
    held: Sequence[bool],
    *,
    levels: int,
    patch: int,
    threshold: int | None,
    copies: Augmentation,
) -> tuple[ImageFormat, dict[str, Split]]:
    """How pictures are spelled, and the tokens of both splits.

    Args:
        pictures: all of them.
        held: which are held out; these have no copies.
        levels: grey levels.
        patch: side of the squares that make one token.
        threshold: darker is ink.
        copies: what else is learned of the others.
    """
    count, height, width = pictures.gray.shape
    picture = ImageFormat(height=height, width=width, levels=levels, patch=patch)
    test = np.array(held)
    dtype = np.dtype(np.uint8 if picture.vocab_size <= 256 else np.uint16)
    shape = (copies.count, count - int(test.sum()), picture.length)
    remedy = "make them smaller (--option size 28), or take fewer copies"
    require_memory(2 * math.prod(shape) * dtype.itemsize, "images", remedy)

    def tokens(gray: UInt8[np.ndarray, "N H W"]) -> Integer[np.ndarray, "N L"]:
        return encode_images(gray, levels=levels, patch=patch, threshold=threshold)

    train, step = np.empty(shape, dtype), max(1, _BLOCK // (height * width))
    chosen = np.flatnonzero(~test)
    for first in range(0, len(chosen), step):  # copies of all pictures at once take much memory
        part = slice(first, first + step)
        for number, gray in enumerate(copies.of(pictures.gray[chosen[part]])):
            train[number, part] = tokens(gray)
    splits = {"train": train.reshape(-1), "test": tokens(pictures.gray[test]).reshape(-1)}
    return picture, {name: Split(spelled) for name, spelled in splits.items()}


def copies_note(copies: Augmentation) -> tuple[str, ...]:
    """A note on the copies that are in train, if any are."""
    if copies.count == 1:
        return ()
    ways = ["mirrored"] * copies.mirror + [f"moved by {copies.shift}"] * bool(copies.shift)
    return (f"train holds {copies.count} copies of a picture: {' and '.join(ways)}",)


def skipped_note(pictures: ImageSet) -> tuple[str, ...]:
    """A note on the files that were skipped, if any were."""
    if not pictures.skipped:
        return ()
    named = ", ".join(map(show, pictures.skipped[:5])) + (
        ", ..." if len(pictures.skipped) > 5 else ""
    )
    files = "file" if len(pictures.skipped) == 1 else "files"
    return (f"skipped {len(pictures.skipped):,} unreadable {files}: {named}",)
