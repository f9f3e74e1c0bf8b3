"""Read a .npy of images: (N, H, W) grey or (N, H, W, 3) colour, uint8 or floats in 0..1."""

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from memtrain.data.images import Pixels
from memtrain.data.prepare.image_files import ImageSet, check_size, check_total
from memtrain.data.prepare.limits import FREE
from memtrain.data.store import open_array
from memtrain.errors import MemtrainError

DARK = 64
"""Images whose largest byte is below this were perhaps meant as 0..16 or 0..1, or have 12 bits."""


def read_array(
    path: Path, size: tuple[int, int] | None = None, *, colour: bool = False
) -> ImageSet:
    """Read a .npy of images.

    Args:
        path: the file; images are named by their row.
        size: (height, width) to resize to (Lanczos).
        colour: keep the colours of (N, H, W, 3).
    """
    check_size(size)
    try:
        array = open_array(path)
    except (OSError, ValueError) as error:
        raise MemtrainError(f"{path}: {str(error).splitlines()[0]}") from None
    _check_array(path, array)
    if colour and array.ndim == 3:
        raise MemtrainError(
            f"colour=True: {path} holds grey images, {array.shape}; leave colour out, or save "
            "them as (N, H, W, 3)"
        )
    shape = (*(size or array.shape[1:3]), *([3] * colour))
    check_total(path, (len(array), *shape))
    pixels = np.empty((len(array), *shape), np.uint8)
    digests = []
    step = max(1, FREE // array[0].nbytes)
    for first in range(0, len(array), step):
        block = slice(first, first + step)
        images = _bytes(path, array[block])
        digests += [hashlib.sha256(image.tobytes()).digest() for image in images]
        pixels[block] = resized(images, size, "RGB" if colour else "L")
    grey = len(array) if array.ndim == 4 and not colour else 0
    names = tuple(map(str, range(len(array))))
    return ImageSet(pixels, names, digests=tuple(digests), coloured=grey)


def dark_note(images: ImageSet) -> tuple[str, ...]:
    """A note on images that are so dark that their scale may be another one."""
    brightest = int(images.pixels.max())
    if brightest >= DARK:
        return ()
    return (
        f"the brightest pixel is {brightest} of 255; scale the images if white is another value",
    )


def resized(
    images: Pixels, size: tuple[int, int] | None, mode: str
) -> UInt8[np.ndarray, "N height width *channels"]:
    """Images in Pillow's mode L or RGB, resized to (height, width) (Lanczos)."""
    if size is None and (images.ndim == 4) == (mode == "RGB"):
        return images
    try:
        from PIL import Image
    except ImportError:
        raise MemtrainError("resizing images needs Pillow: pip install pillow") from None
    shown = (Image.fromarray(np.ascontiguousarray(image)).convert(mode) for image in images)
    if size is not None:
        height, width = size
        shown = (image.resize((width, height), Image.Resampling.LANCZOS) for image in shown)
    return np.stack([np.asarray(image) for image in shown])


def _check_array(path: Path, array: np.ndarray) -> None:
    what = f"{path}: {array.dtype} of shape {array.shape}"
    if array.ndim == 4 and array.shape[3] != 3:
        remedy = "array[..., :3] has the colours without a fourth channel"
        if array.shape[3] == 1:
            remedy = "array[..., 0] is grey"
        elif array.shape[1] == 3:
            remedy = "np.moveaxis(array, 1, -1) puts the colours last"
        raise MemtrainError(f"{what}: colour images are (N, H, W, 3); {remedy}")
    if array.ndim not in (3, 4):
        raise MemtrainError(
            f"{what}: images are (N, H, W), or (N, H, W, 3) in colour; tokens are learned by "
            f"memtrain train tokens --data {path}"
        )
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise MemtrainError(
            f"{what}: images are uint8, or floats in 0..1; array.astype(np.uint8) converts values "
            "of 0..255"
        )
    if not array.size:
        raise MemtrainError(f"{what}: holds no pixels; at least 2 images are needed")


def _bytes(path: Path, images: np.ndarray) -> UInt8[np.ndarray, "N H W *colour"]:
    """Images as bytes; floats are 0..1."""
    if images.dtype == np.uint8:
        return np.asarray(images)
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):  # also of NaN
        wrong = low if not low >= 0 else high
        series = f", and numbers over time by memtrain train series --data {path}"
        raise MemtrainError(
            f"{path}: holds {wrong:g}; floats must be 0..1: divide by the largest, or save uint8 "
            f"of 0..255{series if images.ndim == 3 else ''}"
        )
    return np.rint(images.astype(np.float64) * 255).astype(np.uint8)
