"""PNG and JPEG files, alone, in folders and in zips, read as grey pictures and with care."""

import io
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from jaxtyping import UInt8

from memtrain.errors import MemtrainError

MAX_PIXELS = 64 * 2**20
"""A picture that claims more than this is refused from its header, before it is decoded."""
MAX_FILE_BYTES = 256 * 2**20
"""A file of a zip that claims to unpack to more than this is refused before it is read."""
SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a folder or a zip of images held."""

    gray: UInt8[np.ndarray, "N H W"]
    names: tuple[str, ...]
    """The files, relative to the folder or zip, in sorted order."""
    skipped: tuple[str, ...]
    """The files that could not be read."""


def read_folder(
    path: Path,
    size: tuple[int, int] | None = None,
    accept: Callable[[str], bool] = lambda name: True,
    wanted: str = "PNG and JPEG files are wanted",
) -> Pictures:
    """Read the PNG and JPEG files of a folder, its subfolders, or a zip, as grey pictures.

    Args:
        path: a folder or a .zip.
        size: (height, width) to resize to (Lanczos); without it all must have one size.
        accept: told a relative name, says whether the file is wanted.
        wanted: that, for a person who has none.

    Raises:
        MemtrainError: mixed sizes, no image at all, an unsafe or damaged zip, an image bomb.
    """
    if size is not None and min(size) < 1:
        raise MemtrainError(f"size={size[0]}x{size[1]}: must be at least 1x1")
    rows: list[np.ndarray] = []
    names: list[str] = []
    skipped: list[str] = []
    for name, data in _image_files(path, accept):
        gray = None if data is None else _decode_image(data, f"{path}: {name}", size)
        if gray is None:
            skipped.append(name)
            continue
        if rows and gray.shape != rows[0].shape:
            (height, width), (other_height, other_width) = rows[0].shape, gray.shape
            raise MemtrainError(
                f"{path}: mixed sizes, {names[0]} is {height}x{width} and {name} is "
                f"{other_height}x{other_width} (height x width); resize them: --option size 28"
            )
        rows.append(gray)
        names.append(name)
    if not rows:
        found = f"none of its {len(skipped)} images can be read" if skipped else "holds no image"
        raise MemtrainError(f"{path}: {found}; {wanted}")
    return Pictures(np.stack(rows), tuple(names), tuple(skipped))


def read_image(path: Path, size: tuple[int, int]) -> UInt8[np.ndarray, "H W"]:
    """One PNG or JPEG file as a grey picture of (height, width)."""
    if not path.is_file():
        raise MemtrainError(f"{path}: no such image")
    gray = _decode_image(path, str(path), size)
    if gray is None:
        raise MemtrainError(f"{path}: cannot be read as an image; a PNG or JPEG file is wanted")
    return gray


def _image_files(
    path: Path, accept: Callable[[str], bool]
) -> Iterator[tuple[str, io.BytesIO | Path | None]]:
    """Relative names and contents in sorted order; None for contents that cannot be read."""

    def wanted(name: str) -> bool:
        pure = PurePosixPath(name)
        # macOS puts a "._" twin with no picture in it beside every file it zips.
        return not pure.name.startswith(".") and pure.suffix.lower() in SUFFIXES and accept(name)

    if path.is_dir():
        files = {file.relative_to(path).as_posix(): file for file in path.rglob("*")}
        for name in sorted(files):
            if wanted(name) and files[name].is_file():
                yield name, files[name]
        return
    if not path.is_file():
        raise MemtrainError(f"{path}: no such folder or zip of images")
    try:
        archive = zipfile.ZipFile(path)
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # whatever Python makes of bytes that are no zip
        raise MemtrainError(f"{path}: no zip, damaged or cut short ({error})") from None
    with archive:
        members = sorted(archive.infolist(), key=lambda member: member.filename)
        for member in members:
            _check_member(path, member)
        for member in members:
            if not member.is_dir() and wanted(member.filename):
                yield member.filename, _read_member(archive, member)


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    name = member.filename
    windows = PureWindowsPath(name)  # knows \ and drives, and / as well
    if windows.drive or windows.root or ".." in windows.parts:
        raise MemtrainError(f"{path}: refused, its file {name!r} points outside of the zip")
    if member.compress_size > path.stat().st_size:  # Python would make room for all it claims
        raise MemtrainError(
            f"{path}: refused, its file {name!r} claims {member.compress_size:,} bytes, more than "
            "the zip has"
        )
    if member.file_size > MAX_FILE_BYTES:
        raise MemtrainError(
            f"{path}: refused, its file {name!r} unpacks to {member.file_size:,} bytes, "
            f"more than {MAX_FILE_BYTES:,}"
        )


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> io.BytesIO | None:
    try:
        return io.BytesIO(archive.read(member))
    # RuntimeError: it has a password; NotImplementedError: a compression Python does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError):
        return None


def _decode_image(
    data: io.BytesIO | Path, where: str, size: tuple[int, int] | None
) -> UInt8[np.ndarray, "H W"] | None:
    """One image in grey, upright, on white where it is transparent; None if it cannot be read."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MemtrainError("reading images needs Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            # Of damaged files, which are counted, and from 89 megapixels on, where the limit
            # here is lower and an error.
            warnings.simplefilter("ignore")
            with Image.open(data, formats=("PNG", "JPEG")) as image:
                if image.width * image.height <= MAX_PIXELS:
                    picture = ImageOps.exif_transpose(image)
                    if size is None:
                        return np.array(_gray(picture))
                    height, width = size
                    lanczos = Image.Resampling.LANCZOS
                    return np.array(_gray(picture).resize((width, height), lanczos))
                claim = f"{image.width}x{image.height} pixels"
    except Image.DecompressionBombError:
        claim = "too many pixels"
    except Exception:  # whatever a decoder makes of bytes that are no image
        return None
    raise MemtrainError(f"{where}: refused, claims {claim}, more than {MAX_PIXELS:,}")


def _gray(image):
    """A Pillow image as mode L."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    return image.convert("L")
