"""Read and write files that may have come from anybody.

Reading takes regular files only, up to a size limit: a named pipe or a device would block or never
end. Writing never follows a symbolic link, and replaces a file whole or not at all.
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
    """Open a regular file for reading; a link to one counts as one.

    Raises:
        MemtrainError: it is a folder, a named pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a socket, links that go round in a circle
            raise MemtrainError(f"{path}: is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MemtrainError(f"{path}: is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        MemtrainError: it is larger, which is seen before it is read, or not a regular file.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise MemtrainError(
            f"{path.name}: larger than {limit:,} bytes, which memtrain never writes"
        )
    return content


def read_text(path: Path, limit: int) -> str:
    """A file of UTF-8 of at most `limit` bytes.

    Raises:
        MemtrainError: it is larger, not a regular file, or not UTF-8.
    """
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise MemtrainError(f"{path.name}: not UTF-8 text ({error})") from None


def parse_json(text: str, what: str) -> Any:
    """Parse JSON; too many digits or too deep nesting is an error like any other.

    Raises:
        MemtrainError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MemtrainError(f"{what}: {error}") from None


def strict_json(value: Any) -> str:
    """A value as JSON, in which null takes the place of numbers that are not finite."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------------------------- write


def refuse_links(path: Path, root: Path) -> None:
    """Refuse to write to `path` where it, or a folder between it and `root`, is a symbolic link.

    `root` is the folder that the user named; it may be a link itself. What lies inside may have
    come with an archive, and a link in it may point anywhere.
    """
    inside = path.relative_to(root)
    for part in (*reversed(inside.parents), inside):
        if part != Path() and (root / part).is_symlink():
            raise MemtrainError(
                f"{root / part}: is a symbolic link; memtrain writes to no link inside a folder: "
                "remove it, or link the whole folder instead"
            )


def open_new(path: Path) -> BufferedWriter:
    """Create a file for writing; one that is there already, or a link, is an error (EEXIST)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def open_append(path: Path) -> BufferedWriter:
    """Open a regular file to append to, or create it.

    Raises:
        MemtrainError: it is a symbolic link, or not a regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MemtrainError(f"{path}: is a symbolic link; remove it") from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe that nobody reads, a socket
            raise MemtrainError(f"{path}: is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MemtrainError(f"{path}: is not a regular file")
    return os.fdopen(descriptor, "ab")


def unique_name(prefix: str) -> str:
    """A file name that no other process makes, on this machine or another one."""
    return f"{prefix}{secrets.token_hex(6)}"


def sync(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file: a reader, or a crash, finds the old content or the new one.

    A link at `path` is replaced, not followed. Folders on the way are: see `refuse_links`.

    Raises:
        OSError: it names `path`, and the old content is still there.
    """
    draft = path.with_name(unique_name(f".draft-{path.name}-"))
    try:
        with open_new(draft) as file:
            file.write(content)
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


def write_named(path: Path, content: bytes) -> None:
    """Write a file that the user may have named, as `write_whole` does; its folders are made.

    What lies in /dev or /proc, such as /dev/stdout, is written to and not replaced.
    """
    if os.path.abspath(path).startswith(("/dev/", "/proc/")):
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


# ----------------------------------------------------------------------------------------- lock


class Locked(MemtrainError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, busy: str, *, wait: bool = False, keep: bool = True) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel releases when the process dies.

    The lock's file holds the holder's machine and process. On a network file system the lock holds
    between machines as far as the file system supports `flock`.

    Args:
        path: the lock's file; its folder must exist.
        busy: begins the error if another process holds it.
        wait: wait for the other process instead.
        keep: leave the file there afterwards; all who use a lock must agree on this.

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
                    raise  # else the file system has no locks: go on without
            if not keep and not _is_at(file, path):
                continue  # the holder before removed it: others lock another file
            with suppress(OSError):
                os.ftruncate(file.fileno(), 0)
                file.write(f"{socket.gethostname()} {os.getpid()}\n".encode())
                file.flush()
            try:
                yield
            finally:
                if not keep:
                    with suppress(OSError):
                        path.unlink()  # before it is released: who waits for it looks again
            return


def _is_at(file: BufferedWriter, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """Who holds a lock, if its file says so."""
    try:
        host, process = read_text(path, 1024).split()
    except (OSError, ValueError):
        return ""
    return f" (process {process} on {host})"
