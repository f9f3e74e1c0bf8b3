"""Encode texts and images as tokens, and split them into train and test."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from memtrain.data.codec import EncodedText, encode_text
from memtrain.data.images import Augmentation, ImageFormat, encode_images
from memtrain.data.prepare.image_files import ImageSet
from memtrain.data.prepare.limits import name_some, require_memory
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.prepare.text_files import Texts
from memtrain.data.store import Split, Store, StoreMeta
from memtrain.errors import MemtrainError

_BLOCK = 2**24
"""Pixels that are encoded at once."""

# ----------------------------------------------------------------------------------------- text


def encode_texts(
    texts: Texts, mode: str, separator: bool, where: str, divider: str = ""
) -> EncodedText:
    """Encode texts as tokens; an error begins with `where`."""
    try:
        return encode_text(texts.raw, mode, separator=separator, divider=divider)
    except MemtrainError as error:
        raise MemtrainError(f"{where}: {error}") from None


def non_ascii_note(encoded: EncodedText, prefix: str) -> tuple[str, ...]:
    """A note on non-ASCII characters that were kept or dropped, if any."""
    if encoded.kept_bytes:
        kept = f"kept {encoded.kept_bytes:,} bytes beyond ASCII"
        return (f"{prefix}{kept}; --option mode ascii drops them",)
    if not encoded.dropped_bytes:
        return ()
    characters, count = encoded.dropped_characters, encoded.dropped_bytes
    return (f"{prefix}dropped {characters:,} non-ASCII characters ({count:,} bytes)",)


def split_stream(
    tokens: Integer[np.ndarray, " N"],
    starts: Int64[np.ndarray, " K"],
    share: float,
    *,
    whole_characters: bool = False,
) -> dict[str, Split]:
    """Hold out the last documents, or the end of a single one.

    With `whole_characters`, tokens are the bytes of UTF-8, and none of its characters is cut.
    """
    if len(starts) < 2:
        cut = len(tokens) - round(share * len(tokens))
        while whole_characters and 0 < cut < len(tokens) and 128 <= tokens[cut] < 192:
            cut += 1
        start = np.zeros(1, np.int64)
        return {"train": Split(tokens[:cut], start), "test": Split(tokens[cut:], start)}
    first = len(starts) - held_out_count(len(starts), share, "documents")
    cut = int(starts[first])
    return {
        "train": Split(tokens[:cut], starts[:first]),
        "test": Split(tokens[cut:], starts[first:] - cut),
    }


def join_splits(parts: Sequence[Mapping[str, Split]], separator: int | None) -> dict[str, Split]:
    """Join the splits of several texts, each with its own held-out part.

    Args:
        parts: train and test of each text, as bytes.
        separator: the token between documents, if there is one.
    """
    return {name: _joined([part[name] for part in parts], separator) for name in parts[0]}


def _joined(splits: list[Split], separator: int | None) -> Split:
    tokens: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    length = 0
    for number, split in enumerate(splits):
        if number and separator is not None and tokens[-1][-1] != separator:
            tokens.append(np.array([separator], split.tokens.dtype))
            length += 1
        assert split.starts is not None
        tokens.append(split.tokens)
        starts.append(split.starts + length)
        length += len(split.tokens)
    whole = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
    marks = 0 if separator is None else int(np.count_nonzero(whole == separator))
    return Split(whole, np.concatenate(starts), text_bytes=len(whole) - marks)


# --------------------------------------------------------------------------------------- images


def write_images(
    out: Path,
    images: ImageSet,
    held_out: Sequence[bool],
    augmentation: Augmentation,
    *,
    labels: Integer[np.ndarray, " N"] | None = None,
    name: str,
    source: str,
    notes: Iterable[str],
    levels: int,
    patch: int,
    threshold: int | None,
    overwrite: bool,
) -> Store:
    """Encode images and write them as a store; those marked `held_out` are not augmented.

    `labels` are the images' classes, if they have any.
    """
    count, height, width = images.gray.shape
    image = ImageFormat(height=height, width=width, levels=levels, patch=patch)
    test = np.array(held_out)
    dtype = np.dtype(np.uint8 if image.vocab_size <= 256 else np.uint16)
    shape = (augmentation.count, count - int(test.sum()), image.length)
    remedy = "make them smaller (--option size 28), or augment less"
    require_memory(2 * math.prod(shape) * dtype.itemsize, "images", remedy)

    def encode(gray: UInt8[np.ndarray, "N H W"]) -> Integer[np.ndarray, "N L"]:
        return encode_images(gray, levels=levels, patch=patch, threshold=threshold)

    train, step = np.empty(shape, dtype), max(1, _BLOCK // (height * width))
    chosen = np.flatnonzero(~test)
    for first in range(0, len(chosen), step):  # augmenting all images at once takes much memory
        block = slice(first, first + step)
        for number, gray in enumerate(augmentation.apply(images.gray[chosen[block]])):
            train[number, block] = encode(gray)
    tokens = {"train": train.reshape(-1), "test": encode(images.gray[test]).reshape(-1)}
    meta = StoreMeta(
        name=name,
        vocab_size=image.vocab_size,
        source=source,
        document_length=image.length,
        picture=image,
        notes=(*notes, *_augmentation_note(augmentation)),
    )
    splits = {name: Split(one) for name, one in tokens.items()}
    if labels is not None:
        known = {"train": np.tile(labels[~test], augmentation.count), "test": labels[test]}
        splits = {name: Split(tokens[name], labels=known[name]) for name in tokens}
    return write_store(out, meta, splits, overwrite=overwrite)


def _augmentation_note(augmentation: Augmentation) -> tuple[str, ...]:
    """A note on augmented images, if there are any."""
    if augmentation.count == 1:
        return ()
    ways = ["mirrored"] * augmentation.mirror
    ways += [f"shifted by {augmentation.shift}"] * bool(augmentation.shift)
    return (f"train holds {augmentation.count} variants of each image: {' and '.join(ways)}",)


def skipped_note(images: ImageSet) -> tuple[str, ...]:
    """A note on files that could not be read, if there are any."""
    if not images.skipped:
        return ()
    files = "file" if len(images.skipped) == 1 else "files"
    return (f"skipped {len(images.skipped):,} unreadable {files}: {name_some(images.skipped)}",)


# ------------------------------------------------------------------------------------- held out


def check_share(held_out: float) -> None:
    """Refuse to hold out nothing or everything."""
    if not 0 < held_out < 1:
        raise MemtrainError(f"held_out={held_out}: must be above 0 and below 1; 0.1 is usual")


def held_out_count(total: int, share: float, what: str) -> int:
    """The number of held-out items: at least one, and never all."""
    if total < 2:
        raise MemtrainError(f"{what}: {total}, at least 2 are needed to hold one out")
    return min(total - 1, max(1, round(share * total)))


def held_out_names(names: Iterable[str], share: float) -> set[str]:
    """Choose names to hold out by a hash of each, so that adding others moves none.

    If a side would be empty, the name nearest to the boundary changes sides.
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
    """A hash of a name, in 0..1; file names need not be UTF-8."""
    raw = name.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(raw).digest()[:8]) / 2**64
