"""Prepared data: token streams on disk, written once and memory-mapped afterwards.

A store is a folder with

- `train.bin` and `test.bin`: tokens as little-endian uint8 or uint16 and nothing else;
- `train.starts.npy` and `test.starts.npy`: where each document starts, as int64; absent when
  every document has the same length;
- `meta.json`: what the tokens are, how many, and a sha256 of each `.bin`.

It is written beside its place, synced to disk and renamed, so a reader never meets half of one.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
from jaxtyping import Int64, Integer, UInt8, UInt16
from numpy.lib.format import open_memmap

from memtrain.bounded import parse_json, read_text
from memtrain.data.pictures import Picture
from memtrain.errors import MemtrainError, nearest

STORE_VERSION = 1
SPLITS = ("train", "test")
MAX_VOCAB = 2**16
MIN_TOKENS = 2
"""The shortest split: one token to read and one to predict."""
MAX_META_BYTES = 2**20
_FILES = {"meta.json", *(f"{s}.{end}" for s in SPLITS for end in ("bin", "starts.npy"))}
_BLOCK = 2**24
"""Tokens are checked and written this many at a time: a memory map need not fit in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMeta:
    """What the tokens of a store are."""

    name: str
    vocab_size: int
    source: str
    """Where the data came from, for a person."""
    document_length: int | None = None
    """Tokens in every document; None if documents differ."""
    picture: Picture | None = None
    """How a document spells a picture, if it does."""
    text: bool = False
    """Whether the tokens are the bytes of a text."""
    separator: int | None = None
    """The token between documents, if there is one."""
    notes: tuple[str, ...] = ()
    """What preparing changed or left out, with counts, for a person."""

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= MAX_VOCAB:
            raise MemtrainError(f"vocab_size={self.vocab_size}: must be 2..{MAX_VOCAB:,}")
        if self.document_length is not None and self.document_length < 1:
            raise MemtrainError(f"document_length={self.document_length}: must be at least 1")
        if self.separator is not None and not 0 <= self.separator < self.vocab_size:
            raise MemtrainError(f"separator={self.separator}: must be 0..{self.vocab_size - 1}")
        spelled = self.picture and (self.picture.length, self.picture.vocab_size)
        if spelled and spelled != (self.document_length, self.vocab_size):
            raise MemtrainError(
                f"document_length={self.document_length}, vocab_size={self.vocab_size}: "
                f"the picture has {spelled[0]} tokens of {spelled[1]}"
            )

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u1" if self.vocab_size <= 256 else "<u2")


@dataclass(frozen=True, slots=True)
class Split:
    """The tokens of one split, and where its documents start unless all have one length."""

    tokens: Integer[np.ndarray, " N"]
    starts: Int64[np.ndarray, " K"] | None = None


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """What is known of a split without reading it."""

    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Store:
    """A prepared data set."""

    folder: Path
    meta: StoreMeta
    splits: Mapping[str, SplitInfo]

    def tokens(self, split: str) -> UInt8[np.ndarray, " N"] | UInt16[np.ndarray, " N"]:
        """All tokens of a split, a read-only map of the file."""
        self._check(split)
        return np.memmap(self.folder / f"{split}.bin", self.meta.dtype, "r")

    def starts(self, split: str) -> Int64[np.ndarray, " K"]:
        """Where each document starts."""
        self._check(split)
        if self.meta.document_length is not None:
            return np.arange(0, self.splits[split].tokens, self.meta.document_length)
        return open_array(self.folder / f"{split}.starts.npy")

    def _check(self, split: str) -> None:
        if split not in self.splits:
            raise MemtrainError(f"split={split!r}: {nearest(split, self.splits)}")


def open_array(path: Path) -> np.ndarray:
    """A .npy file, mapped: it need not fit in memory, and is never unpickled.

    Raises:
        ValueError: it is none, or cut short.
        OSError: it cannot be read.
    """
    try:
        return open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as Python source, which fails in many ways
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"no .npy file of numbers, or cut short ({reason})") from None


def require_tokens(store: Store, split: str, needed: int) -> None:
    """Refuse a split that is too short, saying how many tokens are needed."""
    found = len(store.tokens(split))
    if found < needed:
        raise MemtrainError(
            f"{store.folder}: {split} holds {found:,} tokens, at least {needed:,} are needed; "
            "prepare more data or take shorter sequences (--data.evaluate-length)"
        )


# -------------------------------------------------------------------------------------- writing


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
        raise MemtrainError(f"{folder}: is prepared already; open it, or overwrite it")


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
    elif split.starts is None or not _are_starts(split.starts, length):
        raise MemtrainError(f"{meta.name}: {name} needs the starts of its documents, 0 first")


def _are_starts(starts: np.ndarray, tokens: int) -> bool:
    shaped = starts.dtype == np.int64 and starts.ndim == 1 and len(starts) > 0
    return bool(
        shaped and starts[0] == 0 and starts[-1] < tokens and (starts[1:] > starts[:-1]).all()
    )


def _write_split(draft: Path, meta: StoreMeta, name: str, split: Split) -> SplitInfo:
    digest = hashlib.sha256()
    with (draft / f"{name}.bin").open("wb") as file:
        for first in range(0, len(split.tokens), _BLOCK):
            block = split.tokens[first : first + _BLOCK]
            _check_tokens(block, meta, name)
            raw = np.ascontiguousarray(block, meta.dtype).data
            digest.update(raw)
            file.write(raw)
    if split.starts is None:
        documents = len(split.tokens) // (meta.document_length or 1)
    else:
        documents = len(split.starts)
        np.save(draft / f"{name}.starts.npy", split.starts)
    return SplitInfo(len(split.tokens), documents, digest.hexdigest())


def _check_tokens(block: Integer[np.ndarray, " N"], meta: StoreMeta, name: str) -> None:
    low, high = int(block.min()), int(block.max())
    if low < 0 or high >= meta.vocab_size:
        raise MemtrainError(
            f"{meta.name}: {name} holds the token {low if low < 0 else high}, outside the "
            f"vocabulary 0..{meta.vocab_size - 1}"
        )


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


# -------------------------------------------------------------------------------------- opening


def open_store(folder: Path, *, verify: bool = False) -> Store:
    """Open a store that `write_store` made.

    Args:
        folder: where it is.
        verify: also compare the checksums, which reads every byte.

    Raises:
        MemtrainError: there is none, another version wrote it, or its files are not as written.
    """
    path = folder / "meta.json"
    if not path.is_file():
        raise MemtrainError(f"{folder}: no prepared data here (no meta.json); prepare it first")
    try:
        plain = parse_json(read_text(path, MAX_META_BYTES), "meta.json")
        meta, splits = _read_meta(plain)
        store = Store(folder, meta, splits)
        for name in SPLITS:
            _check_files(store, name, verify)
    except MemtrainError as error:
        raise MemtrainError(f"{folder}: {error}; prepare it again") from None
    except OSError as error:
        raise MemtrainError(f"{folder}: {error.filename}: {error.strerror or error}") from None
    except ValueError as error:  # JSON, UTF-8
        raise MemtrainError(f"{path}: {error}; prepare it again") from None
    return store


def _read_meta(plain: Any) -> tuple[StoreMeta, dict[str, SplitInfo]]:
    if not isinstance(plain, dict):
        raise MemtrainError("meta.json: must be a JSON object")
    version = plain.pop("version", None)
    if version != STORE_VERSION:
        raise MemtrainError(f"version {version}, this memtrain reads version {STORE_VERSION}")
    dtype, splits = plain.pop("dtype", None), plain.pop("splits", None)
    if isinstance(plain.get("notes"), list):
        plain["notes"] = tuple(plain["notes"])
    if isinstance(plain.get("picture"), dict):
        plain["picture"] = _record(Picture, plain["picture"], "meta.json: picture")
    meta = _record(StoreMeta, plain, "meta.json")
    if dtype != meta.dtype.name:
        raise MemtrainError(
            f"meta.json: dtype {dtype!r}: {meta.vocab_size} tokens are stored as {meta.dtype.name}"
        )
    if not isinstance(splits, dict) or splits.keys() != set(SPLITS):
        raise MemtrainError(f"meta.json: splits: must be {' and '.join(SPLITS)}")
    infos = {name: _record(SplitInfo, splits[name], f"meta.json: {name}") for name in SPLITS}
    return meta, infos


def _record(cls: type, plain: Any, where: str) -> Any:
    """Make a dataclass of a JSON object that has exactly its fields, each of its type."""
    kinds: dict[str, Any] = {field.name: field.type for field in fields(cls)}
    if not isinstance(plain, dict):
        raise MemtrainError(f"{where}: must be a JSON object")
    for name in sorted(kinds.keys() ^ plain.keys()):
        raise MemtrainError(f"{where}: {name}: {'missing' if name in kinds else 'unknown field'}")
    for name, kind in kinds.items():
        value = plain[name]
        if get_origin(kind) is tuple:
            right = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        else:
            # bool is an int to Python, not to a reader.
            right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right:
            raise MemtrainError(f"{where}: {name}={value!r}: wrong type")
    return cls(**plain)


def _check_files(store: Store, name: str, verify: bool) -> None:
    info, meta = store.splits[name], store.meta
    if info.tokens < MIN_TOKENS:
        raise MemtrainError(f"{name}: {info.tokens} tokens, at least {MIN_TOKENS} are needed")
    path = store.folder / f"{name}.bin"
    found, expected = path.stat().st_size, info.tokens * meta.dtype.itemsize
    if found != expected:
        raise MemtrainError(f"{name}.bin has {found:,} bytes, {expected:,} were written")
    if verify:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != info.sha256:
            raise MemtrainError(f"{name}.bin is not what was written (checksum)")
    _check_documents(store, name)
    if meta.vocab_size <= np.iinfo(meta.dtype).max:  # else every number is a token
        tokens = store.tokens(name)
        for first in range(0, len(tokens), _BLOCK):
            _check_tokens(tokens[first : first + _BLOCK], meta, name)


def _check_documents(store: Store, name: str) -> None:
    info, length = store.splits[name], store.meta.document_length
    if length is not None:
        right = info.documents * length == info.tokens
    else:
        try:
            starts = open_array(store.folder / f"{name}.starts.npy")
        except ValueError:  # no array, a pickle, cut short
            raise MemtrainError(f"{name}.starts.npy is not what was written") from None
        right = starts.shape == (info.documents,) and _are_starts(starts, info.tokens)
    if not right:
        raise MemtrainError(f"{name} does not hold {info.documents:,} documents, as its meta says")
