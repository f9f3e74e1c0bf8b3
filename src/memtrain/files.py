"""Read and write untrusted files.

Reading takes regular files only, up to a size limit: a named pipe or a device would block or never
end. Writing never follows a symbolic link, and replaces a file completely or not at all.
"""

import errno
import fcntl
import json
import math
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

from memtrain.errors import MemtrainError

# ----------------------------------------------------------------------------------------- read


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises:
        MemtrainError: it is a folder, a named pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file; one of more than `limit` bytes is refused."""
    with open_regular(path) as file:
        # No more than is there: memory for all that is asked for is taken before reading.
        content = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > limit:
        raise MemtrainError(f"{path.name}: larger than {limit:,} bytes; memtrain never writes that")
    return content


def read_text(path: Path, limit: int) -> str:
    """Read a UTF-8 file; one of more than `limit` bytes is refused."""
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise MemtrainError(f"{path.name}: not UTF-8 text ({error})") from None


# ----------------------------------------------------------------------------------------- JSON


def read_json(path: Path, limit: int) -> Any:
    """Read a JSON file; more than `limit` bytes, repeated keys and NaN are refused."""
    return parse_json(read_text(path, limit), path.name, strict=True)


def parse_json(text: str | bytes, where: str, *, strict: bool = False) -> Any:
    """Parse JSON; too many digits or too deep nesting is an error like any other.

    Args:
        text: the JSON, in UTF-8 if bytes.
        where: begins the error.
        strict: refuse repeated keys, NaN and infinity.

    Raises:
        MemtrainError: it is not JSON.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _refuse_constant}
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, **(hooks if strict else {}))
    except (ValueError, RecursionError) as error:
        raise MemtrainError(f"{where}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(found := dict(pairs)) < len(names):
        raise ValueError(f"the key {max(names, key=names.count)!r} is repeated")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def strict_json(value: Any) -> str:
    """Write a value as JSON, with null in place of numbers that are not finite."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """A file of one JSON object per line, which is only ever appended to or cut back."""

    def __init__(self, path: Path, limit: int, line_limit: int | None = None) -> None:
        """Larger files and longer lines than these limits, in bytes, are not read."""
        self.path, self.limit, self.line_limit = path, limit, line_limit or limit
        self.lost = 0
        """Bytes that were appended and have since been removed by somebody else."""
        self._end: int | None = None

    def append(self, record: Any, *, durable: bool = False) -> None:
        """Append a line; `durable` forces it to disk."""
        with open_append(self.path) as file:
            if self._end is not None:
                self.lost += max(0, self._end - os.fstat(file.fileno()).st_size)
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            if durable:
                os.fsync(file.fileno())
            self._end = os.fstat(file.fileno()).st_size

    def read(self) -> list[Any]:
        """Read all complete lines; a last line that a crash cut short is left out."""
        try:
            file = open_regular(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        records, line = [], b"\n"
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > self.limit:
                raise MemtrainError(
                    f"{self.path}: has {size:,} bytes; at most {self.limit:,} are read"
                )
            while (line := file.readline(self.line_limit + 1)).endswith(b"\n"):
                records.append(parse_json(line, f"{self.path}: line {len(records) + 1}"))
        if len(line) > self.line_limit:
            raise MemtrainError(
                f"{self.path}: line {len(records) + 1} is longer than {self.line_limit:,} bytes"
            )
        return records

    def length(self) -> int:
        """The file's bytes; 0 if there is none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def truncate(self, length: int | None = None) -> int:
        """Cut off a torn last line, and all beyond `length` bytes; return the new length."""
        self._end = None
        if not self.path.is_symlink() and not self.path.exists():
            return 0
        with open_append(self.path) as file:
            found = os.fstat(file.fileno()).st_size
            end = self._line_end(found if length is None else min(found, length))
            os.ftruncate(file.fileno(), end)
        return end

    def _line_end(self, end: int) -> int:
        """The end of the last complete line before `end`, found by reading backwards."""
        with open_regular(self.path) as file:
            while end > 0:
                begin = max(0, end - 2**16)
                file.seek(begin)
                if (at := file.read(end - begin).rfind(b"\n")) >= 0:
                    return begin + at + 1
                end = begin
        return 0


# ---------------------------------------------------------------------------------------- write


def refuse_links(path: Path, root: Path) -> None:
    """Refuse to write to `path` if it, or a folder between it and `root`, is a symbolic link.

    `root` is the folder that the user named; it may be a link itself. Its content may have come
    with an archive, and a link in there may point anywhere.
    """
    inside = path.relative_to(root)
    for part in (*reversed(inside.parents), inside):
        if part != Path() and (root / part).is_symlink():
            raise MemtrainError(
                f"{root / part}: is a symbolic link; memtrain writes to no link inside a folder: "
                "remove it, or link the whole folder instead"
            )


def open_new(path: Path) -> BufferedWriter:
    """Create a file for writing; an existing file or link is an error (EEXIST)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def open_append(path: Path) -> BufferedWriter:
    """Open a regular file to append to, or create it; a symbolic link is refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(_open(path, flags), "ab")


def _open(path: Path, flags: int) -> int:
    """Open a regular file without waiting: a named pipe without a writer would block."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise MemtrainError(f"{path}: is a symbolic link; remove it") from None
        # A socket or a pipe without a reader; links in a circle; a folder opened for writing.
        if error.errno in (errno.ENXIO, errno.ELOOP, errno.EISDIR):
            raise MemtrainError(f"{path}: is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MemtrainError(f"{path}: is not a regular file")
    return descriptor


def unique_name(prefix: str) -> str:
    """A file name that no other process uses, on this machine or another one."""
    return f"{prefix}{secrets.token_hex(6)}"


def sync(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file: a reader, or a crash, finds the old content or the new one.

    A link at `path` is replaced, not followed; for links above it see `refuse_links`.

    Raises:
        OSError: it names `path`, and the old content is still there.
    """
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BufferedWriter]:
    """Like `write_atomic`, for content that is written in pieces to the file that it yields."""
    draft = path.with_name(unique_name(f".draft-{path.name}-"))
    try:
        with open_new(draft) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):  # a full disk names no file, other errors the draft
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync(path.parent)


def write_output(path: Path, content: bytes) -> None:
    """Write a file named by the user like `write_atomic`, and create its folders.

    A path in /dev or /proc, such as /dev/stdout, is written to and not replaced.
    """
    if os.path.abspath(path).startswith(("/dev/", "/proc/")):
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)


# ----------------------------------------------------------------------------------------- lock


class Locked(MemtrainError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, busy: str, *, wait: bool = False, keep: bool = True) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel releases when the process dies.

    The lock's file holds the machine and process of its holder. On a network file system the lock
    works between machines as far as the file system supports `flock`.

    Args:
        path: the lock's file; its folder must exist.
        busy: begins the error if another process holds it.
        wait: wait for the other process instead.
        keep: keep the file afterwards; all users of a lock must agree on this.

    Raises:
        Locked: another process holds it.
    """
    while True:
        with open_append(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise Locked(f"{busy}{_holder(path)}") from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise  # else the file system has no locks: continue without
            if not keep and not _is_at(file, path):
                continue  # the previous holder removed it: others lock another file
            with suppress(OSError):
                os.ftruncate(file.fileno(), 0)
                file.write(f"{socket.gethostname()} {os.getpid()}\n".encode())
                file.flush()
            try:
                yield
            finally:
                if not keep:
                    with suppress(OSError):
                        path.unlink()  # before the release: waiting processes check `_is_at`
            return


def _is_at(file: BufferedWriter, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """The holder of a lock, if its file names it."""
    try:
        host, process = read_text(path, 1024).split()
    except (OSError, ValueError):
        return ""
    return f" (process {process} on {host})"
