"""Zips of images, read with care: nothing is unpacked to disk, and little to memory."""

import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from io import BufferedIOBase
from pathlib import Path, PureWindowsPath
from typing import Any

from memtrain.data.prepare.limits import show, unpacking
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

MAX_FILE_BYTES = 256 * 2**20
"""A file of a zip that claims to unpack to more than this is refused before it is read."""
MAX_DIRECTORY_BYTES = 64 * 2**20
"""A zip's directory, for which Python takes ten times its bytes: half a million files or more."""
_LOCAL_HEADER = 30
"""Bytes before each file in a zip, at least; its name follows."""
_BLOCK = 2**20
_UNPACK = "unpack it yourself and pass the folder"


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip.

    Raises:
        MemtrainError: not a zip, damaged, unsafe names, overlapping files, or too much in it.
    """
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
        except Exception as error:  # whatever Python makes of bytes that are not a zip
            raise MemtrainError(f"{path}: not a zip, damaged or cut short ({error})") from None
        limited.limit = path.stat().st_size
        _check_members(path, archive.infolist())
        yield archive


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> BufferedIOBase | None:
    """A file of a zip in memory; None if it cannot be read."""
    try:
        if member.compress_type in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
            return io.BytesIO(_decompressed(archive, member))
        content = io.BytesIO()
        with archive.open(member) as file:
            while block := file.read(_BLOCK):
                content.write(block)
    # Damage makes each decompressor raise errors of its own; a file may have a password, or a
    # compression that Python does not know.
    except Exception:
        return None
    content.seek(0)
    return content


def _decompressed(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """A file of bzip2 or LZMA, of which Python's own reader unpacks more than the file claims."""
    stored: Any = copy(member)
    stored.compress_type, stored.file_size, stored.CRC = 0, member.compress_size, None
    with archive.open(stored) as file:
        raw = file.read(MAX_FILE_BYTES)
    if member.compress_type == zipfile.ZIP_BZIP2:
        import bz2  # as lzma, not in every Python

        content = bz2.BZ2Decompressor().decompress(raw, member.file_size)
    else:
        size = int.from_bytes(raw[2:4], "little")
        content = _lzma(raw[4 : 4 + size]).decompress(raw[4 + size :], member.file_size)
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile("not what was packed")
    return content


def _lzma(properties: bytes) -> Any:
    """The decompressor that a file's properties describe; it takes its dictionary at once."""
    import lzma

    dictionary = int.from_bytes(properties[1:5], "little")
    if dictionary > MAX_FILE_BYTES:
        raise zipfile.BadZipFile("a dictionary larger than any file")
    rest, lc = divmod(properties[0], 9)
    pb, lp = divmod(rest, 5)
    filters = {"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": lc, "lp": lp, "pb": pb}
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[filters])


class _DirectoryLimit:
    """An open file from which no more bytes are read at once than a limit, which may change."""

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
    budget = unpacking(str(path), size, _UNPACK)
    end, before = 0, ""
    for member in sorted(members, key=lambda member: member.header_offset):
        name = show(member.filename)
        windows = PureWindowsPath(member.filename)  # knows \ and drives, and / as well
        if windows.drive or windows.root or ".." in windows.parts:
            raise MemtrainError(f"{path}: refused, its file {name!r} points outside of the zip")
        if member.compress_size > size:  # Python would make room for all it claims
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
                f"{path}: refused, its files {before!r} and {name!r} overlap, as no program writes "
                "them; get it again"
            )
        budget.spend(member.file_size)
        end = member.header_offset + _LOCAL_HEADER + member.compress_size
        before = name
