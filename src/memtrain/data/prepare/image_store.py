"""Encode images as tokens, with their classes, and write them as a store."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from memtrain.data.images import Augmentation, ImageFormat, Pixels, encode_images
from memtrain.data.palette import Palette, learn_palette, nearest_colours
from memtrain.data.prepare.image_classes import Classes
from memtrain.data.prepare.image_files import ImageSet
from memtrain.data.prepare.limits import name_some, require_memory
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.store import MAX_VOCAB, Split, Store, StoreMeta
from memtrain.errors import MemtrainError

_BLOCK = 2**24
"""Pixels that are encoded at once."""


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
