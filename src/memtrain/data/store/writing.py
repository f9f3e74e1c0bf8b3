"""Writes a store: beside its place, synced to disk, then renamed."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from memtrain.data.store.format import (
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
)
from memtrain.data.store.opening import open_store
from memtrain.errors import MemtrainError

_FILES = {"meta.json", *(f"{s}.{end}" for s in SPLITS for end in ("bin", "starts.npy"))}
_FILES |= {"options.json"}  # of whoever had it prepared (data/ready.py)


def check_place(folder: Path, overwrite: bool) -> None:
    """Refuse a place where a store must not be written: nothing but a store is ever replaced."""
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
    folder = folder.resolve()
    check_place(folder, overwrite)
    for name in SPLITS:
        _check_split(meta, name, splits[name])
    draft = folder.with_name(f".draft-{folder.name}-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear_drafts(folder)
        draft.mkdir()
        infos = {name: _write_split(draft, meta, name, splits[name]) for name in SPLITS}
        plain = {
            "version": STORE_VERSION,
            **asdict(meta),
            "dtype": meta.dtype.name,
            "splits": {name: asdict(info) for name, info in infos.items()},
        }
        (draft / "meta.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            _sync(path)
        check_place(folder, overwrite)  # again: another process may have been quicker
        _publish(draft, folder)
    except OSError as error:
        raise MemtrainError(f"{folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return open_store(folder)


def _check_split(meta: StoreMeta, name: str, split: Split) -> None:
    length = len(split.tokens)
    if length < MIN_TOKENS:
        raise MemtrainError(
            f"{meta.name}: {name} would hold {length} tokens, at least {MIN_TOKENS} are needed"
        )
    if meta.document_length is not None:
        if split.starts is not None or length % meta.document_length:
            raise MemtrainError(
                f"{meta.name}: {name} has {length:,} tokens, which are no documents of "
                f"{meta.document_length:,}"
            )
    elif split.starts is None or not are_starts(split.starts, length):
        raise MemtrainError(f"{meta.name}: {name} needs the starts of its documents, 0 first")


def _write_split(draft: Path, meta: StoreMeta, name: str, split: Split) -> SplitInfo:
    digest = hashlib.sha256()
    with (draft / f"{name}.bin").open("wb") as file:
        for block in blocks(split.tokens):
            check_tokens(block, meta, name)
            raw = np.ascontiguousarray(block, meta.dtype).data
            digest.update(raw)
            file.write(raw)
    if split.starts is None:
        documents = len(split.tokens) // (meta.document_length or 1)
    else:
        documents = len(split.starts)
        np.save(draft / f"{name}.starts.npy", split.starts)
    return SplitInfo(len(split.tokens), documents, digest.hexdigest())


def _clear_drafts(folder: Path) -> None:
    """Remove what a process that no longer runs left beside the folder."""
    name = re.compile(rf"\.draft-{re.escape(folder.name)}-(\d+)(-old)?")
    for path in folder.parent.iterdir():
        match = name.fullmatch(path.name)
        if match and not _runs(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    """Whether another process of this number runs; this one has no draft when it asks."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)  # signal 0 asks and does nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _publish(draft: Path, folder: Path) -> None:
    """Rename the draft into place; what was there goes only when the new store stands."""
    old = draft.with_name(f"{draft.name}-old")
    if folder.exists():
        folder.rename(old)
    try:
        draft.rename(folder)
    except BaseException:
        with suppress(FileNotFoundError):
            old.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
