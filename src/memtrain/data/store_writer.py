"""Write a store: next to its final place, synced to disk, then renamed."""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from memtrain.data.store import (
    MIN_TOKENS,
    SPLITS,
    STORE_VERSION,
    Split,
    SplitInfo,
    Store,
    StoreMeta,
    are_starts,
    blocks,
    check_tokens,
    open_store,
)
from memtrain.errors import MemtrainError, printable
from memtrain.files import Locked, locked, open_new, sync, unique_name

_FILES = {"meta.json", *(f"{s}.{end}" for s in SPLITS for end in ("bin", "starts.npy"))}
_FILES |= {"options.json"}  # written by data/prepare/cache.py
_DRAFT = re.compile(r"\.draft-.+-([0-9a-f]{12}|\d+)(-old)?")  # digits: of earlier versions
STALE_SECONDS = 3600
"""A draft that nobody has written to for so long is left from a process that was killed. Where
locks do not reach the other machine, nothing else says so."""


def check_place(folder: Path, overwrite: bool) -> None:
    """Refuse a place where a store must not be written: nothing but a store is ever replaced."""
    if os.path.islink(folder):
        raise MemtrainError(
            f"{folder}: is a symbolic link; memtrain writes no data through a link: name the "
            f"folder itself, {os.readlink(folder)}, or remove the link"
        )
    try:
        inside = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise MemtrainError(f"{folder}: is a file, or under one; choose another folder") from None
    except OSError as error:
        raise MemtrainError(f"{folder}: {error.strerror or error}") from None
    if inside and not ("meta.json" in inside and inside <= _FILES):
        raise MemtrainError(f"{folder}: holds something else; choose another folder")
    if inside and not overwrite:
        raise MemtrainError(
            f"{folder}: is prepared already; --overwrite replaces it, --out takes another folder"
        )


def write_store(
    folder: Path, meta: StoreMeta, splits: Mapping[str, Split], *, overwrite: bool = False
) -> Store:
    """Write a store and open it. On failure there is what there was before.

    Raises:
        MemtrainError: tokens outside the vocabulary, a split too short, a place that is taken.
    """
    check_place(folder, overwrite)
    for name in SPLITS:
        _check_split(meta, name, splits[name])
    # What is above may be a link of the user's, what is written may not.
    folder = folder.parent.resolve() / folder.name if folder.name else folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder), drafted(folder) as draft:
            infos = {name: _write_split(draft, meta, name, splits[name]) for name in SPLITS}
            plain = {
                "version": STORE_VERSION,
                **asdict(meta),
                "dtype": meta.dtype.name,
                "splits": {name: asdict(info) for name, info in infos.items()},
            }
            with open_new(draft / "meta.json") as file:
                file.write(f"{json.dumps(plain, indent=2)}\n".encode())
            publish(draft, folder, overwrite)
    except OSError as error:
        raise MemtrainError(f"{folder}: {error.strerror or error}") from None
    return open_store(folder)


@contextmanager
def alone(folder: Path, name: str = "") -> Iterator[None]:
    """Hold the lock of a store that is being prepared; one line on stderr says whom it waits for.

    Args:
        folder: the store; its lock is beside it, and goes when it is released.
        name: of the store in that line.
    """
    lock = folder.with_name(f".lock-{folder.name}")
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, "", keep=False))
        except Locked as holder:
            line = f"waiting for another process that prepares {name or folder}{holder}"
            print(printable(line), file=sys.stderr, flush=True)
            held.enter_context(locked(lock, "", wait=True, keep=False))
        yield


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """A new folder beside the store, which is gone afterwards unless it was published."""
    draft = folder.with_name(unique_name(f".draft-{folder.name}-"))
    draft.mkdir()
    try:
        _clear_drafts(draft)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, folder: Path, overwrite: bool) -> None:
    """Sync a draft to disk and rename it into place.

    What was there goes only when the new store stands. The old one is away for a moment; a store
    that is there is always whole.
    """
    for path in (*draft.iterdir(), draft):
        sync(path)
    check_place(folder, overwrite)  # again: another process may have been quicker
    old = draft.with_name(f"{draft.name}-old")
    if folder.exists():
        folder.rename(old)
    try:
        draft.rename(folder)  # fails if another process put a store there, where locks do not work
    except BaseException:
        with suppress(OSError):
            old.rename(folder)
        raise
    finally:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
    sync(folder.parent)


def _check_split(meta: StoreMeta, name: str, split: Split) -> None:
    length = len(split.tokens)
    if length < MIN_TOKENS:
        raise MemtrainError(
            f"{meta.name}: {name} would hold {length} {'token' if length == 1 else 'tokens'}, "
            f"at least {MIN_TOKENS} are needed"
        )
    if meta.document_length is not None:
        if split.starts is not None or length % meta.document_length:
            raise MemtrainError(
                f"{meta.name}: {name} has {length:,} tokens, which are not documents of "
                f"{meta.document_length:,}"
            )
    elif split.starts is None or not are_starts(split.starts, length):
        raise MemtrainError(f"{meta.name}: {name} needs the starts of its documents, 0 first")


def _write_split(draft: Path, meta: StoreMeta, name: str, split: Split) -> SplitInfo:
    digest = hashlib.sha256()
    with open_new(draft / f"{name}.bin") as file:
        for block in blocks(split.tokens):
            check_tokens(block, meta, name)
            raw = np.ascontiguousarray(block, meta.dtype).data
            digest.update(raw)
            file.write(raw)
    if split.starts is None:
        documents = len(split.tokens) // (meta.document_length or 1)
    else:
        documents = len(split.starts)
        with open_new(draft / f"{name}.starts.npy") as file:
            np.save(file, split.starts)
    return SplitInfo(len(split.tokens), documents, digest.hexdigest())


def _clear_drafts(draft: Path) -> None:
    """Remove what killed processes left beside a new draft, which says what time it is there."""
    now = draft.stat().st_ctime
    for path in draft.parent.iterdir():
        if path == draft or not _DRAFT.fullmatch(path.name):
            continue
        if path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):  # its process removes it itself
            inside = list(path.iterdir())
            changed = [max(p.lstat().st_mtime, p.lstat().st_ctime) for p in (path, *inside)]
            ours = {p.name for p in inside} <= _FILES
            if ours and max(changed) < now - STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
