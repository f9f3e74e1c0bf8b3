"""Write a store: next to its final place, synced to disk, then renamed."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from memtrain.data.store import (
    MIN_TOKENS,
    SPLITS,
    STORE_VERSION,
    TOKENIZER_FILE,
    Split,
    SplitInfo,
    Store,
    StoreMeta,
    alphabet_of,
    are_starts,
    blocks,
    check_tokens,
)
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError, printable
from memtrain.files import Locked, locked, open_new, sync, unique_name

PROVENANCE = "options.json"
"""Written by `prepare/cache.py`; a store is complete without it."""
_FILES = {"meta.json", PROVENANCE, TOKENIZER_FILE}
_FILES |= {f"{split}.{end}" for split in SPLITS for end in ("bin", "starts.npy", "labels.npy")}
_DRAFT = re.compile(r"\.draft-.+-([0-9a-f]{12}|\d+)(-old)?")  # digits: of earlier versions
SPACE_REMEDY = "free some, or prepare on another disk: memtrain data PATH --out FOLDER"
STALE_SECONDS = 3600
"""A draft unchanged for this long is left over from a killed process. Its age is the only evidence
where locks do not work between machines."""


def check_place(folder: Path, overwrite: bool) -> None:
    """Refuse to write a store over anything but a store."""
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
        raise MemtrainError(f"{folder}: holds other files; choose another folder")
    if inside and not overwrite:
        raise MemtrainError(
            f"{folder}: is prepared already; --overwrite replaces it, --out takes another folder"
        )


def write_store(
    folder: Path,
    meta: StoreMeta,
    splits: Mapping[str, Split],
    *,
    tokenizer: str = "",
    overwrite: bool = False,
) -> Store:
    """Write a store and open it. On failure everything is as before.

    `tokenizer` is the tokenizer.json of a text whose tokens are not its bytes.

    Raises:
        MemtrainError: tokens outside the vocabulary, a split too short, or a folder in use.
    """
    check_place(folder, overwrite)
    if tokenizer:
        meta = replace(meta, tokenizer=hashlib.sha256(tokenizer.encode()).hexdigest())
    for name in SPLITS:
        _check_split(meta, name, splits[name])
    # The parent folder may be a link of the user's, the store itself may not.
    folder = folder.parent.resolve() / folder.name if folder.name else folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _require_space(folder, sum(_bytes(meta, split) for split in splits.values()))
        with store_lock(folder), draft_folder(folder) as draft:
            infos = {name: _write_split(draft, meta, name, splits[name]) for name in SPLITS}
            plain = {
                "version": STORE_VERSION,
                **meta.to_json(),
                "dtype": meta.dtype.name,
                "splits": {name: _plain(info) for name, info in infos.items()},
            }
            with open_new(draft / "meta.json") as file:
                file.write(f"{json.dumps(plain, indent=2)}\n".encode())
            if tokenizer:
                with open_new(draft / TOKENIZER_FILE) as file:
                    file.write(tokenizer.encode())
            publish(draft, folder, overwrite)
    except OSError as error:
        remedy = ""
        if error.errno == errno.ENOSPC:
            remedy = f"; nothing is left behind; {SPACE_REMEDY}"
        raise MemtrainError(f"{folder}: {error.strerror or error}{remedy}") from None
    return open_store(folder)


def _bytes(meta: StoreMeta, split: Split) -> int:
    starts = 0 if split.starts is None else split.starts.nbytes
    return len(split.tokens) * meta.dtype.itemsize + starts


def _require_space(folder: Path, needed: int) -> None:
    """Refuse a store that the disk has no room for, before it is written."""
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise MemtrainError(
            f"{folder}: needs {needed / 1e9:,.3g} GB, its disk has {free / 1e9:,.3g} GB free; "
            f"{SPACE_REMEDY}"
        )


@contextmanager
def store_lock(folder: Path, name: str = "") -> Iterator[None]:
    """Hold the lock of a store that is being prepared; a wait for another process is logged.

    Args:
        folder: the store; the lock's file is next to it, and removed on release.
        name: of the store in the log.
    """
    lock = folder.with_name(f".lock-{folder.name}")
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, "", keep=False))
        except Locked as holder:
            line = f"waiting for another process that prepares {name or folder}{holder}"
            logging.getLogger(__name__).warning("%s", printable(line))
            held.enter_context(locked(lock, "", wait=True, keep=False))
        yield


@contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """Make a folder next to the store, removed afterwards unless it was published."""
    draft = folder.with_name(unique_name(f".draft-{folder.name}-"))
    draft.mkdir()
    try:
        _clear_drafts(draft)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, folder: Path, overwrite: bool) -> None:
    """Sync a draft to disk and rename it into place.

    An old store is removed only when the new one is in place. Between the two there is none for a
    moment, but never a partial one.
    """
    for path in (*draft.iterdir(), draft):
        sync(path)
    check_place(folder, overwrite)  # again: another process may have been faster
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
    digest, alphabet = hashlib.sha256(), ()
    with open_new(draft / f"{name}.bin") as file:
        for block in blocks(split.tokens):
            check_tokens(block, meta, name)
            raw = np.ascontiguousarray(block, meta.dtype).data
            digest.update(raw)
            file.write(raw)
            if meta.text and not meta.tokenizer and meta.dtype.itemsize == 1:  # bytes
                alphabet = tuple(sorted({*alphabet, *alphabet_of([block])}))
    if split.starts is None:
        documents = len(split.tokens) // (meta.document_length or 1)
    else:
        documents = len(split.starts)
        with open_new(draft / f"{name}.starts.npy") as file:
            np.save(file, split.starts)
    if split.labels is not None:
        if split.labels.shape != (documents,):
            raise MemtrainError(
                f"{meta.name}: {name} has {len(split.labels):,} labels for {documents:,} documents"
            )
        with open_new(draft / f"{name}.labels.npy") as file:
            np.save(file, split.labels.astype(np.uint16))
    count = len(split.tokens)
    return SplitInfo(count, documents, digest.hexdigest(), split.text_bytes, alphabet)


def _plain(info: SplitInfo) -> dict[str, Any]:
    """A split's JSON; an earlier memtrain reads it if there is no alphabet."""
    plain = asdict(info)
    return plain if info.alphabet else {name: plain[name] for name in plain if name != "alphabet"}


def _clear_drafts(draft: Path) -> None:
    """Remove drafts of killed processes; the new draft's ctime is the file system's clock."""
    now = draft.stat().st_ctime
    for path in draft.parent.iterdir():
        if path == draft or not _DRAFT.fullmatch(path.name):
            continue
        if path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):  # its process is removing it
            inside = list(path.iterdir())
            changed = [max(p.lstat().st_mtime, p.lstat().st_ctime) for p in (path, *inside)]
            ours = {p.name for p in inside} <= _FILES
            if ours and max(changed) < now - STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
