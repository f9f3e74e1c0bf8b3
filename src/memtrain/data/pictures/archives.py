"""Zips of images, read with care: nothing is unpacked to disk, and little to memory."""

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

from memtrain.data.limits import show, unpacking
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

MAX_FILE_BYTES = 256 * 2**20
"""A file of a zip that claims to unpack to more than this is refused before it is read."""
MAX_DIRECTORY_BYTES = 64 * 2**20
"""A zip's directory, for which Python takes ten times its bytes: half a million files or more."""
_LOCAL_HEADER = 30
"""Bytes before each file in a zip, at least; its name follows."""
_BLOCK = 2**20
_SMALL_BLOCK = 2**12
"""Python unpacks all of a block of bzip2 or LZMA at once; a few kB may become 80 MB."""
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


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> BinaryIO | None:
    """A file of a zip in memory; None if it cannot be read."""
    plain = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    size = _BLOCK if plain else _SMALL_BLOCK
    content = io.BytesIO()
    try:
        with archive.open(member) as file:
            while block := file.read(size):
                content.write(block)
    # Damage makes each decompressor raise errors of its own; a file may have a password, or a
    # compression that Python does not know.
    except Exception:
        return None
    content.seek(0)
    return content


class _DirectoryLimit:
    """An open file from which no more bytes are read at once than a limit, which may change."""

    def __init__(self, file: BinaryIO, where: str) -> None:
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
        if member.header_offset < end:
            raise MemtrainError(
                f"{path}: refused, its files {before!r} and {name!r} overlap, as no program writes "
                "them; get it again"
            )
        budget.spend(member.file_size)
        end = member.header_offset + _LOCAL_HEADER + member.compress_size
        before = name
