"""Read the files of a zip in memory, within limits; nothing is unpacked to disk."""

import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from io import BufferedIOBase
from pathlib import Path, PureWindowsPath
from typing import Any

from memtrain.data.prepare.limits import one_line, unpack_budget
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

MAX_FILE_BYTES = 256 * 2**20
"""A file in a zip that claims to unpack to more than this is refused before it is read."""
MAX_DIRECTORY_BYTES = 64 * 2**20
"""A zip's directory of half a million files or more; Python takes ten times its bytes."""
_LOCAL_HEADER = 30
"""Bytes before the name of each file in a zip, at least."""
_BLOCK = 2**20
_UNPACK = "unpack it yourself and pass the folder"


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
