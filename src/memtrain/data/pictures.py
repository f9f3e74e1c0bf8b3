"""Pictures as token sequences and back, and the readers of IDX files, image folders and zips.

Beside the letters of `shapes.py`:

| letter | meaning                                       |
| ------ | --------------------------------------------- |
| N      | pictures                                      |
| H, W   | rows and columns of pixels                    |
| L      | tokens of a picture, in raster order          |
"""

import gzip
import io
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from jaxtyping import Integer, UInt8, UInt16

from memtrain.errors import MemtrainError

MAX_PIXELS = 64 * 2**20
"""A picture that claims more than this is refused from its header, before it is decoded."""
MAX_FILE_BYTES = 256 * 2**20
"""A file of a zip that claims to unpack to more than this is refused before it is read."""
MAX_IDX_BYTES = 4 * 2**30
"""An IDX file that claims to hold more than this is refused before it is read."""
MAX_TOKENS = 2**16
"""What 16 bits can name: 4x4 pixels of 2 levels, or 2x2 pixels of 16."""
MAX_PATCH = 4
SUFFIXES = (".png", ".jpg", ".jpeg")

# ---------------------------------------------------------------------------- pixels and tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """How the pictures of a data set are spelled.

    With more than two levels a pixel is a grey level, 0 black. With two levels it is ink, 1 dark
    and 0 light. A token is a pixel, or a patch x patch square of them: written in base `levels`,
    it is the square read left to right and top to bottom, so the first (highest) digit is the
    top left.
    """

    height: int
    width: int
    levels: int = 256
    patch: int = 1

    def __post_init__(self) -> None:
        for side in ("height", "width"):
            if getattr(self, side) < 1:
                raise MemtrainError(f"{side}={getattr(self, side)}: must be at least 1")
        if not 2 <= self.levels <= 256:
            raise MemtrainError(
                f"levels={self.levels}: must be 2..256; a pixel has 256 grey levels"
            )
        if not 1 <= self.patch <= MAX_PATCH:
            raise MemtrainError(f"patch={self.patch}: must be 1..{MAX_PATCH}")
        if self.vocab_size > MAX_TOKENS:
            raise MemtrainError(
                f"levels={self.levels} with patch={self.patch}: {self.vocab_size:,} tokens, at "
                f"most {MAX_TOKENS:,} can be told apart; set levels=2 or a smaller patch"
            )
        if self.height % self.patch or self.width % self.patch:
            raise MemtrainError(
                f"patch={self.patch}: must divide the picture, {self.height}x{self.width} "
                "(height x width); choose another size"
            )

    @property
    def vocab_size(self) -> int:
        return self.levels**self.patch**2

    @property
    def length(self) -> int:
        """Tokens of one picture."""
        return (self.height // self.patch) * (self.width // self.patch)


def encode_pictures(
    gray: UInt8[np.ndarray, "N H W"],
    *,
    levels: int = 256,
    patch: int = 1,
    threshold: int | None = None,
) -> UInt8[np.ndarray, "N L"] | UInt16[np.ndarray, "N L"]:
    """Spell grey pictures as tokens; see `Picture` for what a token means.

    Args:
        gray: 0 is black.
        levels: 2 binarises, 256 keeps every grey level, others take the nearest of `levels` greys.
        patch: side of the squares of pixels that make one token.
        threshold: with two levels only: darker than this is ink; 128 unless given.
    """
    count, height, width = gray.shape
    picture = Picture(height=height, width=width, levels=levels, patch=patch)
    if levels > 2:
        if threshold is not None:
            raise MemtrainError(f"threshold={threshold} with levels={levels}: only for levels=2")
        nearest = np.rint(np.arange(256) * ((levels - 1) / 255)).astype(np.uint8)
        pixels = nearest[gray]
    else:
        threshold = 128 if threshold is None else threshold
        if not 1 <= threshold <= 255:
            raise MemtrainError(f"threshold={threshold}: must be 1..255; darker than it is ink")
        pixels = (gray < threshold).astype(np.uint8)
    if patch == 1:
        return pixels.reshape(count, picture.length)
    dtype = np.uint8 if picture.vocab_size <= 256 else np.uint16
    tokens = np.zeros((count, height // patch, width // patch), dtype)
    for row, column in _places(patch):
        tokens *= dtype(levels)
        tokens += pixels[:, row::patch, column::patch]
    return tokens.reshape(count, picture.length)


def decode_pictures(
    tokens: Integer[np.ndarray, "N L"], picture: Picture
) -> UInt8[np.ndarray, "N H W"]:
    """The grey pictures that tokens spell: exact for all that `encode_pictures` can tell apart."""
    count, length = tokens.shape
    if length != picture.length:
        raise MemtrainError(f"a picture has {picture.length} tokens, not {length}")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < picture.vocab_size):
        raise MemtrainError(
            f"tokens {tokens.min()}..{tokens.max()} are no picture: "
            f"must be 0..{picture.vocab_size - 1}"
        )
    height, width, patch = picture.height, picture.width, picture.patch
    squares = tokens.astype(np.int64).reshape(count, height // patch, width // patch)
    greys = np.rint(np.arange(picture.levels) * (255 / (picture.levels - 1))).astype(np.uint8)
    if picture.levels == 2:
        greys = greys[::-1]  # ink is dark
    gray = np.empty((count, height, width), np.uint8)
    for index, (row, column) in enumerate(_places(patch)):
        digit = squares // picture.levels ** (patch**2 - 1 - index) % picture.levels
        gray[:, row::patch, column::patch] = greys[digit]
    return gray


def _places(patch: int) -> list[tuple[int, int]]:
    """The pixels of a square in raster order."""
    return [(row, column) for row in range(patch) for column in range(patch)]


# -------------------------------------------------------------------------------------- readers


def read_idx(path: Path) -> UInt8[np.ndarray, "N H W"] | UInt8[np.ndarray, " N"]:
    """Read an IDX file of bytes, images or labels, plain or gzipped.

    Raises:
        MemtrainError: it is no such file, cut short, or longer than its header says.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            magic = file.read(4)
            if magic not in (b"\0\0\x08\x03", b"\0\0\x08\x01"):
                raise MemtrainError(
                    f"{path}: starts with {magic.hex() or 'nothing'}, not with the mark of an IDX "
                    "file of byte images (00000803) or labels (00000801)"
                )
            header = file.read(4 * magic[3])
            if len(header) < 4 * magic[3]:
                raise MemtrainError(f"{path}: cut short in its header; get it again")
            shape = struct.unpack(f">{magic[3]}I", header)
            size = math.prod(shape)
            if not 0 < size <= MAX_IDX_BYTES:
                raise MemtrainError(f"{path}: its header claims {shape}: {size:,} bytes")
            data = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MemtrainError(f"{path}: damaged or cut short ({error}); get it again") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    if len(data) != size:
        held = "more" if len(data) > size else f"{len(data):,}"
        raise MemtrainError(f"{path}: its header claims {size:,} bytes, it holds {held}")
    return np.frombuffer(data, np.uint8).reshape(shape)


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
) -> Pictures:
    """Read the PNG and JPEG files of a folder, its subfolders, or a zip, as grey pictures.

    Args:
        path: a folder or a .zip.
        size: (height, width) to resize to (Lanczos); without it all must have one size.
        accept: told a relative name, says whether the file is wanted.

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
        raise MemtrainError(f"{path}: {found}; PNG and JPEG files are wanted")
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
