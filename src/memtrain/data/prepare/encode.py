"""Encode texts and images as tokens, and split them into train and test."""

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from memtrain.data.codec import EncodedText, encode_text
from memtrain.data.images import Augmentation, ImageFormat, encode_images
from memtrain.data.prepare.image_files import ImageSet
from memtrain.data.prepare.limits import require_memory, show
from memtrain.data.prepare.text_files import Texts
from memtrain.data.store import Split
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


def check_share(held_out: float) -> None:
    """Refuse a share that would hold out nothing or everything."""
    if not 0 < held_out < 1:
        raise MemtrainError(f"held_out={held_out}: must be above 0 and below 1; 0.1 is usual")


def split_stream(
    tokens: Integer[np.ndarray, " N"], starts: Int64[np.ndarray, " K"], share: float
) -> dict[str, Split]:
    """Hold out the last documents, or the end of a single one."""
    if len(starts) < 2:
        cut = len(tokens) - round(share * len(tokens))
        whole = np.zeros(1, np.int64)
        return {"train": Split(tokens[:cut], whole), "test": Split(tokens[cut:], whole)}
    first = len(starts) - held_out_count(len(starts), share, "documents")
    cut = int(starts[first])
    return {
        "train": Split(tokens[:cut], starts[:first]),
        "test": Split(tokens[cut:], starts[first:] - cut),
    }


def held_out_count(total: int, share: float, what: str) -> int:
    """How many of `total` are held out: at least one, and never all."""
    if total < 2:
        raise MemtrainError(f"{what}: {total}, at least 2 are needed to hold one out")
    return min(total - 1, max(1, round(share * total)))


def held_out_names(names: Iterable[str], share: float) -> set[str]:
    """Which names are held out: a hash of each decides, so that others may come and go.

    Where that would leave a side empty, the name nearest to it changes sides.
    """
    rank = {name: _rank(name) for name in names}
    held_out_count(len(rank), share, "different images")
    held = {name for name, place in rank.items() if place < share}
    if not held:
        return {min(rank, key=rank.__getitem__)}
    if len(held) == len(rank):
        held.remove(max(rank, key=rank.__getitem__))
    return held


def _rank(name: str) -> float:
    """A number of 0..1 that follows from a name; names of files need not be UTF-8."""
    raw = name.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(raw).digest()[:8]) / 2**64
