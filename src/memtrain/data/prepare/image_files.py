"""Read PNG and JPEG files, alone, in folders and in zips, as grey images, within limits."""

import io
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from io import BufferedIOBase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, cast

import numpy as np
from jaxtyping import UInt8

from memtrain.data.prepare.file_kind import is_image_name, require_kind
from memtrain.data.prepare.limits import (
    Budget,
    count_kinds,
    list_files,
    one_line,
    require_memory,
    suffix_of,
    unpack_budget,
)
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
MAX_FILE_BYTES = 256 * 2**20
"""A file in a zip that claims to unpack to more than this is refused before it is read."""
MAX_DIRECTORY_BYTES = 64 * 2**20
"""A zip's directory of half a million files or more; Python takes ten times its bytes."""
_LOCAL_HEADER = 30
"""Bytes before the name of each file in a zip, at least."""
_BLOCK = 2**20
_UNPACK = "unpack it yourself and pass the folder"


@dataclass(frozen=True, slots=True)
class ImageSet:
    """The images of a folder or zip."""

    gray: UInt8[np.ndarray, "N H W"]
    names: tuple[str, ...]
    """The files, relative to the folder or zip, in sorted order."""
    skipped: tuple[str, ...]
    """The files that could not be read."""
    ignored: Counter[str] = field(default_factory=Counter)
    """The number of other files by suffix."""


def read_folder(
    path: Path,
    size: tuple[int, int] | None = None,
    accept: Callable[[str], bool] = lambda name: True,
    wanted: str = "PNG and JPEG files are read",
) -> ImageSet:
    """Read the PNG and JPEG files of a folder, its subfolders, or a zip, as grey images.

    Each is resized as it is read, so only resized images are in memory.

    Args:
        path: a folder or a .zip.
        size: (height, width) to resize to (Lanczos); by default all must have one size.
        accept: decides by relative name whether a file is read.
        wanted: describes the accepted files, for the error if there are none.
    """
    if size is not None and not 1 <= min(size) <= max(size) <= MAX_SIDE:
        raise MemtrainError(f"size={size[0]}x{size[1]}: must be 1..{MAX_SIDE:,} pixels each")
    if not path.is_dir():
        require_kind(path, "images")
    gray: np.ndarray | None = None
    names: list[str] = []
    skipped: list[str] = []
    with _image_files(path, accept) as (files, ignored):
        budget = _pixel_budget(path, sum(size for size, _ in files.values()))
        if size is not None:
            _check_total(path, len(files), size)
        for name, (_, open_image) in files.items():
            with open_image() or nullcontext() as data:
                image = data and _decode_image(data, f"{path}: {one_line(name)}", size, budget)
            if image is None:
                skipped.append(name)
                continue
            if gray is None:
                _check_total(path, len(files), image.shape)
                gray = np.empty((len(files), *image.shape), np.uint8)
            if image.shape != gray.shape[1:]:
                (height, width), (other_height, other_width) = gray.shape[1:], image.shape
                raise MemtrainError(
                    f"{path}: mixed sizes, {one_line(names[0])} is {height}x{width} and "
                    f"{one_line(name)} is {other_height}x{other_width} (height x width); {_RESIZE}"
                )
            gray[len(names)] = image
            names.append(name)
    if gray is None:
        raise MemtrainError(f"{path}: {_none_found(skipped, ignored)}; {wanted}")
    return ImageSet(gray[: len(names)], tuple(names), tuple(skipped), ignored)


def read_image(path: Path, size: tuple[int, int]) -> UInt8[np.ndarray, "H W"]:
    """Read one PNG or JPEG file as a grey image of size (height, width)."""
    try:
        with open_regular(path) as data:
            budget = _pixel_budget(path, 0)
            gray = _decode_image(data, str(path), size, budget)
    except FileNotFoundError:
        raise MemtrainError(f"{path}: no such image") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    if gray is None:
        raise MemtrainError(f"{path}: cannot be read as an image; must be a PNG or JPEG file")
    return gray


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


def _check_total(path: Path, count: int, shape: tuple[int, ...]) -> None:
    """Refuse images that would not fit in memory, before it is allocated."""
    height, width = shape
    total = count * height * width
    if total > MAX_BYTES:
        raise MemtrainError(
            f"{path}: {count:,} images of {height}x{width} pixels take {total:,} bytes, more than "
            f"{MAX_BYTES:,}; {_RESIZE}, or take fewer"
        )
    require_memory(3 * total, str(path), _RESIZE)


def _none_found(skipped: list[str], ignored: Counter[str]) -> str:
    if skipped:
        return f"none of its {len(skipped):,} images can be read"
    held = count_kinds(ignored)
    return "holds no image to read" + (f" (but {held})" if held else "")


# --------------------------------------------------------------------------------------- decode


def _decode_image(
    data: BufferedIOBase, where: str, size: tuple[int, int] | None, budget: Budget
) -> UInt8[np.ndarray, "H W"] | None:
    """Decode an image in grey, upright, transparency as white; None if it cannot be read."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MemtrainError("reading images needs Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            # Damaged files are counted, and large ones are refused here anyway.
            warnings.simplefilter("ignore")
            with Image.open(cast(IO[bytes], data), formats=("PNG", "JPEG")) as image:
                pixels = image.width * image.height
                claim = f"{image.width}x{image.height} pixels"
                if pixels <= MAX_PIXELS:
                    budget.spend(pixels)
                    ImageOps.exif_transpose(image, in_place=True)
                    gray = _gray(image)
                    if size is None:
                        return np.array(gray)
                    height, width = size
                    return np.array(gray.resize((width, height), Image.Resampling.LANCZOS))
    except MemtrainError:
        raise
    except Image.DecompressionBombError:
        claim = "too many pixels"
    except Exception:  # damage raises many kinds of errors
        return None
    raise MemtrainError(f"{where}: refused, claims {claim}, more than {MAX_PIXELS:,}")


def _gray(image: Any) -> Any:
    """A Pillow image as mode L."""
    from PIL import Image

    deep = image.mode.startswith("I")  # 16 bits per pixel, which Pillow would clip at 255
    if not deep and not ("A" in image.getbands() or "transparency" in image.info):
        return image.convert("L")
    gray = Image.new("L", image.size)
    for top in range(0, image.height, _STRIP):
        strip = image.crop((0, top, image.width, min(top + _STRIP, image.height)))
        if deep:
            strip = Image.fromarray((np.asarray(strip) >> 8).clip(0, 255).astype(np.uint8))
        else:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        gray.paste(strip.convert("L"), (0, top))
    return gray


# ----------------------------------------------------------------------------------------- zips


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip; nothing is unpacked to disk."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    with file:
        limited = _DirectoryLimit(file, str(path))
        try:
            archive = zipfile.ZipFile(limited)
        except MemtrainError:
            raise
        except Exception as error:  # damage raises many kinds of errors
            raise MemtrainError(f"{path}: not a zip, damaged or cut short ({error})") from None
        limited.limit = path.stat().st_size
        _check_members(path, archive.infolist())
        yield archive


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> BufferedIOBase | None:
    """Unpack a file of a zip in memory; None if it cannot be read."""
    try:
        if member.compress_type in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
            return io.BytesIO(_decompressed(archive, member))
        content = io.BytesIO()
        with archive.open(member) as file:
            while block := file.read(_BLOCK):
                content.write(block)
    except Exception:  # damaged, encrypted, or an unknown compression
        return None
    content.seek(0)
    return content


def _decompressed(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Unpack bzip2 or LZMA up to the claimed size; Python's own reader unpacks more."""
    stored: Any = copy(member)
    stored.compress_type, stored.file_size, stored.CRC = 0, member.compress_size, None
    with archive.open(stored) as file:
        raw = file.read(MAX_FILE_BYTES)
    if member.compress_type == zipfile.ZIP_BZIP2:
        import bz2  # like lzma, not in every Python

        content = bz2.BZ2Decompressor().decompress(raw, member.file_size)
    else:
        size = int.from_bytes(raw[2:4], "little")
        content = _lzma(raw[4 : 4 + size]).decompress(raw[4 + size :], member.file_size)
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile("not what was packed")
    return content


def _lzma(properties: bytes) -> Any:
    """The decompressor for a file's properties; it allocates its dictionary at once."""
    import lzma

    dictionary = int.from_bytes(properties[1:5], "little")
    if dictionary > MAX_FILE_BYTES:
        raise zipfile.BadZipFile("a dictionary larger than any file")
    rest, lc = divmod(properties[0], 9)
    pb, lp = divmod(rest, 5)
    filters = {"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": lc, "lp": lp, "pb": pb}
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[filters])


class _DirectoryLimit:
    """An open file that refuses to read more bytes at once than a limit."""

    def __init__(self, file: BufferedIOBase, where: str) -> None:
        self.where, self.limit = where, MAX_DIRECTORY_BYTES
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self._read = file.read

    def read(self, size: int = -1, /) -> bytes:
        if size > self.limit:
            raise MemtrainError(
                f"{self.where}: refused, its directory claims {size:,} bytes, more than "
                f"{self.limit:,}; {_UNPACK}"
            )
        return self._read(size)


def _check_members(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    size = path.stat().st_size
    budget = unpack_budget(str(path), size, _UNPACK)
    end, before = 0, ""
    for member in sorted(members, key=lambda member: member.header_offset):
        name = one_line(member.filename)
        windows = PureWindowsPath(member.filename)  # also splits at \ and knows drives
        if windows.drive or windows.root or ".." in windows.parts:
            raise MemtrainError(f"{path}: refused, its file {name!r} points outside of the zip")
        if member.compress_size > size:  # Python would allocate all it claims
            raise MemtrainError(
                f"{path}: refused, its file {name!r} claims {member.compress_size:,} bytes, more "
                "than the zip has"
            )
        if member.file_size > MAX_FILE_BYTES:
            raise MemtrainError(
                f"{path}: refused, its file {name!r} unpacks to {member.file_size:,} bytes, "
                f"more than {MAX_FILE_BYTES:,}"
            )
        if member.header_offset < 0:
            raise MemtrainError(f"{path}: not a zip, damaged or cut short (where is {name!r}?)")
        if member.header_offset < end:
            raise MemtrainError(
                f"{path}: refused, its files {before!r} and {name!r} overlap, which no program "
                "writes; get it again"
            )
        budget.spend(member.file_size)
        end = member.header_offset + _LOCAL_HEADER + member.compress_size
        before = name
