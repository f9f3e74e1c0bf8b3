"""Read image files, alone, in folders and in zips, in grey or in colour, within limits."""

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import numpy as np
from jaxtyping import UInt8

from memtrain.data.images import Pixels
from memtrain.data.prepare.file_kind import IMAGE_FORMATS, is_image_name, require_kind
from memtrain.data.prepare.limits import (
    Budget,
    count_kinds,
    list_files,
    one_line,
    require_memory,
    suffix_of,
)
from memtrain.data.prepare.zip_files import open_zip, read_member
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

MAX_PIXELS = 64 * 2**20
"""An image whose header claims more than this is refused before it is decoded."""
MAX_SIDE = 4096
"""The largest height and width to resize to."""
MAX_BYTES = 2**31
"""All images together, one byte per pixel, after resizing."""
PIXELS_PER_BYTE = 500
"""Pixels per byte over all files; line drawings have up to 300."""
FREE_PIXELS = 2**27
"""Pixels that may always be decoded: a second or two of work."""
_STRIP = 256
"""Rows that are converted at once, if that takes several bytes per pixel."""
_RESIZE = "resize them: --option size 28"


FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""By content: the name of a file may say another one of them."""
_GREY_MODES = ("1", "L", "LA", "I", "F")


@dataclass(frozen=True, slots=True)
class ImageSet:
    """The images of a folder, a zip or an array."""

    pixels: Pixels
    names: tuple[str, ...]
    """The files, relative to the folder or zip, in sorted order; or numbers of rows."""
    skipped: tuple[str, ...] = ()
    """The files that could not be read."""
    ignored: Counter[str] = field(default_factory=Counter)
    """The number of other files by suffix."""
    digests: tuple[bytes, ...] = ()
    """A checksum of each image's pixels as decoded, before it is resized."""
    animated: int = 0
    """Files of several frames, of which the first is read."""
    coloured: int = 0
    """Images that have colours, but are read in grey."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    """One image: (H, W), or (H, W, 3) in colour."""

    pixels: UInt8[np.ndarray, "H W *colour"]
    digest: bytes
    animated: bool
    coloured: bool


def read_folder(
    path: Path,
    size: tuple[int, int] | None = None,
    *,
    colour: bool = False,
    accept: Callable[[str], bool] = lambda name: True,
    wanted: str = f"{IMAGE_FORMATS} files are read",
) -> ImageSet:
    """Read the image files of a folder, its subfolders, or a zip.

    Each is resized as it is read, so only resized images are in memory.

    Args:
        path: a folder or a .zip.
        size: (height, width) to resize to (Lanczos); by default all must have one size.
        colour: read them in colour, and not in grey.
        accept: decides by relative name whether a file is read.
        wanted: describes the accepted files, for the error if there are none.
    """
    check_size(size)
    if not path.is_dir():
        require_kind(path, "images")
    pixels: np.ndarray | None = None
    names: list[str] = []
    skipped: list[str] = []
    digests: list[bytes] = []
    animated = coloured = 0
    with _image_files(path, accept) as (files, ignored):
        budget = _pixel_budget(path, sum(size for size, _ in files.values()))
        if size is not None:
            check_total(path, (len(files), *size, *([3] * colour)))
        for name, (_, open_image) in files.items():
            with open_image() or nullcontext() as data:
                where = f"{path}: {one_line(name)}"
                image = data and _decode_image(data, where, size, colour, budget)
            if image is None:
                skipped.append(name)
                continue
            if pixels is None:
                check_total(path, (len(files), *image.pixels.shape))
                pixels = np.empty((len(files), *image.pixels.shape), np.uint8)
            if image.pixels.shape != pixels.shape[1:]:
                (height, width), (other_height, other_width) = (
                    shape[:2] for shape in (pixels.shape[1:], image.pixels.shape)
                )
                raise MemtrainError(
                    f"{path}: mixed sizes, {one_line(names[0])} is {height}x{width} and "
                    f"{one_line(name)} is {other_height}x{other_width} (height x width); {_RESIZE}"
                )
            pixels[len(names)] = image.pixels
            names.append(name)
            digests.append(image.digest)
            animated, coloured = animated + image.animated, coloured + image.coloured
    if pixels is None:
        raise MemtrainError(f"{path}: {_none_found(skipped, ignored)}; {wanted}")
    return ImageSet(
        pixels[: len(names)],
        tuple(names),
        tuple(skipped),
        ignored,
        tuple(digests),
        animated,
        coloured,
    )


def read_image(
    path: Path, size: tuple[int, int], *, colour: bool = False
) -> UInt8[np.ndarray, "H W *colour"]:
    """Read one image file, resized to (height, width), in grey or in colour."""
    try:
        with open_regular(path) as data:
            image = _decode_image(data, str(path), size, colour, _pixel_budget(path, 0))
    except FileNotFoundError:
        raise MemtrainError(f"{path}: no such image") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    if image is None:
        raise MemtrainError(f"{path}: cannot be read as an image; must be {IMAGE_FORMATS}")
    return image.pixels


def check_size(size: tuple[int, int] | None) -> None:
    """Refuse an absurd (height, width) to resize to."""
    if size is not None and not 1 <= min(size) <= max(size) <= MAX_SIDE:
        raise MemtrainError(f"size={size[0]}x{size[1]}: must be 1..{MAX_SIDE:,} pixels each")


def check_total(path: Path, shape: tuple[int, ...]) -> None:
    """Refuse images that would not fit in memory, before it is allocated."""
    (count, height, width), total = shape[:3], math.prod(shape)
    if total > MAX_BYTES:
        raise MemtrainError(
            f"{path}: {count:,} images of {height}x{width} pixels take {total:,} bytes, more than "
            f"{MAX_BYTES:,}; {_RESIZE}, or take fewer"
        )
    require_memory(3 * total, str(path), _RESIZE)


# ---------------------------------------------------------------------------------------- files


@contextmanager
def _image_files(
    path: Path, accept: Callable[[str], bool]
) -> Iterator[tuple[dict[str, tuple[int, Callable]], Counter[str]]]:
    """The stored size and opener of each image by name, and the number of other files by suffix."""

    def split(names: list[str]) -> tuple[list[str], Counter[str]]:
        # macOS adds a hidden "._" file without an image to every file it zips.
        seen = [name for name in names if not PurePosixPath(name).name.startswith(".")]
        read = {name for name in seen if is_image_name(name) and accept(name)}
        return sorted(read), Counter(suffix_of(name) for name in seen if name not in read)

    if path.is_dir():
        listing = list_files(path)
        names, others = split(listing.names)
        found = {name: (_size(path / name), partial(_open_file, path / name)) for name in names}
        yield found, others + listing.others
        return
    with open_zip(path) as archive:
        # The later of two files with one name counts, as in other programs.
        members = {m.filename: m for m in archive.infolist() if not m.is_dir()}
        names, others = split(list(members))
        found = {
            name: (members[name].compress_size, partial(read_member, archive, members[name]))
            for name in names
        }
        yield found, others


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _open_file(path: Path) -> BufferedIOBase | None:
    try:
        return open_regular(path)
    except (OSError, MemtrainError):
        return None


def _pixel_budget(path: Path, size: int) -> Budget:
    limit = max(FREE_PIXELS, PIXELS_PER_BYTE * size)
    rule = f"claims more than {limit:,} pixels in {size:,} bytes"
    return Budget(str(path), limit, rule, "resize the images and write them again")


def _none_found(skipped: list[str], ignored: Counter[str]) -> str:
    if skipped:
        return f"none of its {len(skipped):,} images can be read"
    held = count_kinds(ignored)
    return "holds no image to read" + (f" (but {held})" if held else "")


# --------------------------------------------------------------------------------------- decode


def _decode_image(
    data: BufferedIOBase, where: str, size: tuple[int, int] | None, colour: bool, budget: Budget
) -> _Decoded | None:
    """Decode the first frame, upright, transparency as white; None if it cannot be read."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MemtrainError("reading images needs Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            # Damaged files are counted, and large ones are refused here anyway.
            warnings.simplefilter("ignore")
            with Image.open(cast(IO[bytes], data), formats=FORMATS) as image:
                pixels = image.width * image.height
                claim = f"{image.width}x{image.height} pixels"
                if pixels <= MAX_PIXELS:
                    budget.spend(pixels)
                    animated = bool(getattr(image, "is_animated", False))
                    ImageOps.exif_transpose(image, in_place=True)
                    coloured = not colour and _has_colours(image)
                    flat = _flattened(image, "RGB" if colour else "L")
                    digest = _digest(flat)
                    if size is not None:
                        flat = flat.resize(size[::-1], Image.Resampling.LANCZOS)
                    return _Decoded(np.array(flat), digest, animated, coloured)
    except MemtrainError:
        raise
    except Image.DecompressionBombError:
        claim = "too many pixels"
    except Exception:  # damage raises many kinds of errors
        return None
    raise MemtrainError(f"{where}: refused, claims {claim}, more than {MAX_PIXELS:,}")


def _flattened(image: Any, mode: str) -> Any:
    """A Pillow image in mode L or RGB, transparency on white."""
    from PIL import Image

    deep = image.mode.startswith("I")  # 16 bits per pixel, which Pillow would clip at 255
    if not deep and not ("A" in image.getbands() or "transparency" in image.info):
        return image.convert(mode)
    flat = Image.new(mode, image.size)
    for top, strip in _strips(image):
        if deep:
            strip = Image.fromarray((np.asarray(strip) >> 8).clip(0, 255).astype(np.uint8))
        else:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        flat.paste(strip.convert(mode), (0, top))
    return flat


def _has_colours(image: Any) -> bool:
    """Whether some of 16x16 pixels of a Pillow image have a colour that one would see."""
    if image.mode.startswith(_GREY_MODES):
        return False
    some = np.asarray(image.resize((16, 16), 0).convert("RGB"))  # 0: the nearest pixels
    return bool(np.ptp(some, axis=-1).max() > 16)


def _digest(image: Any) -> bytes:
    """A checksum of a Pillow image's size and pixels."""
    found = hashlib.sha256(f"{image.mode} {image.size}".encode())
    for _, strip in _strips(image):
        found.update(strip.tobytes())
    return found.digest()


def _strips(image: Any) -> Iterator[tuple[int, Any]]:
    """Some rows of a Pillow image at a time, and the first of them."""
    for top in range(0, image.height, _STRIP):
        yield top, image.crop((0, top, image.width, min(top + _STRIP, image.height)))
