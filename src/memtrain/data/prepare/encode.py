"""Encode texts and images as tokens, and split them into train and test."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from memtrain.data.codec import EncodedText, encode_text
from memtrain.data.images import Augmentation, ImageFormat, Pixels, encode_images
from memtrain.data.palette import Palette, learn_palette, nearest_colours
from memtrain.data.prepare.image_classes import Classes
from memtrain.data.prepare.image_files import ImageSet
from memtrain.data.prepare.limits import name_some, require_memory
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.prepare.text_files import Texts
from memtrain.data.store import MAX_VOCAB, Split, Store, StoreMeta
from memtrain.errors import MemtrainError

_BLOCK = 2**24
"""Pixels that are encoded at once."""

# ----------------------------------------------------------------------------------------- text


def encode_texts(texts: Texts, mode: str, separator: bool, where: str) -> EncodedText:
    """Encode texts as tokens; an error begins with `where`."""
    try:
        return encode_text(texts.raw, mode, separator=separator)
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
    tokens: Integer[np.ndarray, " N"], starts: Int64[np.ndarray, " K"], share: float
) -> dict[str, Split]:
    """Hold out the last documents, or the end of a single one."""
    if len(starts) < 2:
        cut = len(tokens) - round(share * len(tokens))
        start = np.zeros(1, np.int64)
        return {"train": Split(tokens[:cut], start), "test": Split(tokens[cut:], start)}
    first = len(starts) - held_out_count(len(starts), share, "documents")
    cut = int(starts[first])
    return {
        "train": Split(tokens[:cut], starts[:first]),
        "test": Split(tokens[cut:], starts[first:] - cut),
    }


# --------------------------------------------------------------------------------------- images


def write_images(
    out: Path,
    images: ImageSet,
    held_out: Sequence[bool],
    augmentation: Augmentation,
    *,
    classes: Classes | None = None,
    class_tokens: bool = False,
    name: str,
    source: str,
    notes: Iterable[str],
    colour: bool = False,
    levels: int,
    patch: int = 1,
    threshold: int | None = None,
    overwrite: bool,
) -> Store:
    """Encode images and write them as a store; those marked `held_out` are not augmented.

    Args:
        out: the store's folder.
        images: in colour, if `colour`.
        held_out: whether each image is held out.
        augmentation: of the training images.
        classes: of the images, if they have any.
        class_tokens: begin each image with the token of its class.
        name: of the store.
        source: origin of the images, as shown to the user.
        notes: to which those on colours, classes and augmentation are added.
        colour: take the nearest of `levels` colours, which are learned from the training images.
        levels: of grey, or colours.
        patch, threshold: see `encode_images`.
        overwrite: replace an existing store.
    """
    test = np.array(held_out)
    notes = [*notes, *(classes.notes if classes else ())]
    palette = ()
    if colour:
        palette = learn_palette(images.pixels[~test].reshape(-1, 3), levels)
        levels = len(palette)
        if levels < 2:
            raise MemtrainError("colour=True: the training images have one colour only")
        notes.append(_palette_note(images.pixels[~test], palette))
    count, height, width = images.pixels.shape[:3]
    image = ImageFormat(height=height, width=width, levels=levels, patch=patch, palette=palette)
    names = classes.names if classes and class_tokens else ()
    vocab_size = image.vocab_size + len(names)
    if vocab_size > MAX_VOCAB:
        raise MemtrainError(
            f"levels={levels} with patch={patch} and {len(names)} classes: {vocab_size:,} tokens, "
            f"at most {MAX_VOCAB:,} are possible; set a smaller levels or patch"
        )
    dtype = np.dtype(np.uint8 if vocab_size <= 256 else np.uint16)
    shape = (augmentation.count, count - int(test.sum()), bool(names) + image.length)
    remedy = "make them smaller (--option size 28), or augment less"
    require_memory(2 * math.prod(shape) * dtype.itemsize, "images", remedy)

    def encode(some: Pixels, labels: Int64[np.ndarray, " N"] | None) -> Integer[np.ndarray, "N L"]:
        tokens = encode_images(
            some, levels=levels, patch=patch, threshold=threshold, palette=palette
        ).astype(dtype)
        if not names or labels is None:
            return tokens
        first = (image.vocab_size + labels).astype(dtype)
        return np.concatenate([first[:, None], tokens], axis=1)

    train, step = np.empty(shape, dtype), max(1, _BLOCK // (height * width))
    chosen, index = np.flatnonzero(~test), classes.index if classes else None
    for first in range(0, len(chosen), step):  # augmenting all images at once takes much memory
        block = slice(first, first + step)
        labels = None if index is None else index[chosen[block]]
        for number, some in enumerate(augmentation.apply(images.pixels[chosen[block]])):
            train[number, block] = encode(some, labels)
    held = encode(images.pixels[test], None if index is None else index[test])
    tokens = {"train": train.reshape(-1), "test": held.reshape(-1)}
    meta = StoreMeta(
        name=name,
        vocab_size=vocab_size,
        source=source,
        document_length=shape[2],
        picture=image,
        notes=(*notes, *_class_note(classes, names), *_augmentation_note(augmentation)),
        classes=names,
    )
    splits = {name: Split(one) for name, one in tokens.items()}
    if index is not None:
        known = {"train": np.tile(index[~test], augmentation.count), "test": index[test]}
        splits = {name: Split(tokens[name], labels=known[name]) for name in tokens}
    return write_store(out, meta, splits, overwrite=overwrite)


def _palette_note(pixels: Pixels, palette: Palette) -> str:
    """A note on how near a palette is to the training images."""
    some = pixels[:: -(-pixels.size // _BLOCK)]
    nearest = np.array(palette)[nearest_colours(some, palette)]
    error = math.sqrt(np.square(some - nearest).mean())
    exact = "every pixel keeps its colour" if not error else f"off by {error:.1f} of 255 (RMS)"
    return f"palette of {len(palette)} colours, {exact}"


def _class_note(classes: Classes | None, names: Sequence[str]) -> tuple[str, ...]:
    """A note on the classes of a conditional model, if it is one."""
    if classes is None or not names:
        return ()
    return (f"each image begins with its class, one of {len(names):,}: {name_some(names)}",)


def _augmentation_note(augmentation: Augmentation) -> tuple[str, ...]:
    """A note on augmented images, if there are any."""
    if augmentation.count == 1:
        return ()
    ways = ["mirrored"] * augmentation.mirror
    ways += [f"shifted by {augmentation.shift}"] * bool(augmentation.shift)
    return (f"train holds {augmentation.count} variants of each image: {' and '.join(ways)}",)


def reading_notes(images: ImageSet) -> tuple[str, ...]:
    """Notes on files that could not be read, on frames and colours that were left out."""
    notes = []
    if images.skipped:
        files = "file" if len(images.skipped) == 1 else "files"
        shown = name_some(images.skipped)
        notes.append(f"skipped {len(images.skipped):,} unreadable {files}: {shown}")
    if images.animated:
        files = "1 file has" if images.animated == 1 else f"{images.animated:,} files have"
        notes.append(f"{files} several frames; the first is read")
    if images.coloured:
        of = "1 image has" if images.coloured == 1 else f"{images.coloured:,} images have"
        notes.append(f"{of} colours, read in grey; --option colour true keeps them")
    return tuple(notes)


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


def groups_of(keys: Sequence[str], digests: Sequence[bytes]) -> list[str]:
    """The group of each image, named by its first key in the alphabet.

    Images with the same key or the same digest are in one group, and so are those that are
    connected by others.
    """
    group = {key: key for key in keys}

    def find(key: str) -> str:
        while group[key] != key:
            group[key] = group[group[key]]  # halves the way for the next time
            key = group[key]
        return key

    first: dict[bytes, str] = {}
    for key, digest in zip(keys, digests, strict=True):
        one, other = find(key), find(first.setdefault(digest, key))
        group[max(one, other)] = min(one, other)
    return [find(key) for key in keys]


def equal_note(digests: Sequence[bytes]) -> tuple[str, ...]:
    """A note on images that are equal, if there are any."""
    repeated = len(digests) - len(set(digests))
    if not repeated:
        return ()
    images = "1 image repeats" if repeated == 1 else f"{repeated:,} images repeat"
    return (f"{images} the pixels of another; equal images are all in train or all in test",)


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
