"""Prepared data: token streams on disk, written once and memory-mapped afterwards.

A store is a folder with

- `train.bin` and `test.bin`: tokens as little-endian uint8 or uint16 and nothing else;
- `train.starts.npy` and `test.starts.npy`: the start of each document, as int64; absent if all
  documents have the same length;
- `meta.json`: the StoreMeta, the number of tokens, and a sha256 of each `.bin`.
"""

import hashlib
import io
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
from jaxtyping import Int64, Integer, UInt8, UInt16
from numpy.lib.format import open_memmap, read_array

from memtrain.data.images import ImageFormat
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import open_regular, parse_json, read_bytes, read_text

STORE_VERSION = 1
SPLITS = ("train", "test")
MAX_VOCAB = 2**16
MIN_TOKENS = 2
"""The shortest split: one token to read and one to predict."""
BLOCK = 2**24
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
    picture: ImageFormat | None = None
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
class LoadedSplit:
    """The tokens of one split and where its documents start, both in memory."""

    tokens: UInt8[np.ndarray, " N"] | UInt16[np.ndarray, " N"]
    starts: Int64[np.ndarray, " K"]


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
        path = self.folder / f"{split}.bin"
        open_regular(path).close()
        return np.memmap(path, self.meta.dtype, "r")

    def starts(self, split: str) -> Int64[np.ndarray, " K"]:
        """Where each document starts."""
        self._check(split)
        if self.meta.document_length is not None:
            return np.arange(0, self.splits[split].tokens, self.meta.document_length)
        return open_array(self.folder / f"{split}.starts.npy")

    def _check(self, split: str) -> None:
        if split not in self.splits:
            raise MemtrainError(f"split={split!r}: {did_you_mean(split, self.splits)}")


def open_array(path: Path) -> np.ndarray:
    """A .npy file, mapped: it need not fit in memory, and is never unpickled.

    Raises:
        ValueError: it is not one, cut short, or not a regular file.
        OSError: it cannot be read.
    """
    try:
        open_regular(path).close()  # a named pipe would block
    except MemtrainError:
        raise ValueError("is not a regular file") from None
    try:
        return open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as Python source, which fails in many ways
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"not a .npy file of numbers, or cut short ({reason})") from None


def identity_of(splits: Mapping[str, SplitInfo]) -> str:
    """By which a store's tokens are told from others: a checksum of its checksums."""
    told = " ".join(f"{name} {splits[name].sha256}" for name in SPLITS)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def require_tokens(store: Store, split: str, needed: int) -> None:
    """Refuse a split that is too short, saying how many tokens are needed."""
    found = store.splits[split].tokens
    if found < needed:
        hold = "" if split == "train" else ", hold out more of it (--option held_out 0.2)"
        raise MemtrainError(
            f"{store.folder}: {split} holds {found:,} tokens, at least {needed:,} are needed; "
            f"prepare more data{hold}, or take shorter sequences (eval --length, "
            "--data.evaluate-length)"
        )


def are_starts(starts: np.ndarray, tokens: int) -> bool:
    """Whether the documents of a split with this many tokens may start there."""
    shaped = starts.dtype == np.int64 and starts.ndim == 1 and len(starts) > 0
    return bool(
        shaped and starts[0] == 0 and starts[-1] < tokens and (starts[1:] > starts[:-1]).all()
    )


def blocks(tokens: Integer[np.ndarray, " N"]) -> Iterator[Integer[np.ndarray, " block"]]:
    """The tokens, one block after another."""
    for first in range(0, len(tokens), BLOCK):
        yield tokens[first : first + BLOCK]


def check_tokens(block: Integer[np.ndarray, " N"], meta: StoreMeta, name: str) -> None:
    """Refuse tokens outside the vocabulary."""
    low, high = int(block.min()), int(block.max())
    if low < 0 or high >= meta.vocab_size:
        raise MemtrainError(
            f"{meta.name}: {name} holds the token {low if low < 0 else high}, outside the "
            f"vocabulary 0..{meta.vocab_size - 1}"
        )


MAX_META_BYTES = 2**20
MAX_HEADER_BYTES = 2**12
"""Of a .npy file."""


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
        raise MemtrainError(
            f"{folder}: no prepared data here (meta.json is missing); {_remedy(folder)}"
        )
    try:
        store = Store(folder, *_meta_of(folder))
        for name in SPLITS:
            _check_files(store, name, verify)
    except (MemtrainError, OSError) as error:
        raise _named(folder, error) from None
    return store


def _remedy(folder: Path) -> str:
    """How to prepare what a recipe or a run looks for in a folder."""
    name = folder.name
    if name in ("text", "images", "tokens"):  # where recipes look that have no data of their own
        return f"name yours: memtrain train {name} --data PATH"
    files = " --data-dir FOLDER" if name == "sketchy" else ""
    if name in ("mnist", "tinystories", "sketchy"):
        return f"memtrain data {name}{files} --out {folder} prepares it"
    return f"memtrain data SOURCE --out {folder} prepares it, with the --option of before"


def load_store(folder: Path) -> tuple[Store, dict[str, LoadedSplit]]:
    """Open a store and read all of it, once more if another process replaces it meanwhile.

    Raises:
        MemtrainError: as `open_store` and `load_splits`.
    """
    try:
        store = open_store(folder)
        return store, load_splits(store)
    except MemtrainError:
        time.sleep(0.05)  # a store that is replaced is away for a moment
        store = open_store(folder)
        return store, load_splits(store)


def load_splits(store: Store) -> dict[str, LoadedSplit]:
    """All tokens and starts of a store in memory.

    Raises:
        MemtrainError: the files are not those that were opened: damaged, or replaced meanwhile.
    """
    try:
        splits = {name: _load_split(store, name) for name in SPLITS}
        replaced = _meta_of(store.folder) != (store.meta, store.splits)
    except (MemtrainError, OSError) as error:
        raise _named(store.folder, error) from None
    if replaced:  # the starts may be those of other tokens
        raise MemtrainError(f"{store.folder}: was replaced while it was read; try again")
    return splits


def _load_split(store: Store, name: str) -> LoadedSplit:
    info = store.splits[name]
    with open_regular(store.folder / f"{name}.bin") as file:
        tokens = np.fromfile(file, store.meta.dtype, info.tokens)
        longer = bool(file.read(1))
    if longer or hashlib.sha256(tokens.data).hexdigest() != info.sha256:
        raise MemtrainError(f"{name}.bin is not what was written (checksum)")
    return LoadedSplit(tokens, _load_starts(store, name))


def _load_starts(store: Store, name: str) -> Int64[np.ndarray, " K"]:
    info = store.splits[name]
    if store.meta.document_length is not None:
        return store.starts(name)
    file = f"{name}.starts.npy"
    try:  # not mapped: a file that is cut short while it is mapped ends the process
        raw = read_bytes(store.folder / file, 8 * info.documents + MAX_HEADER_BYTES)
        starts = read_array(io.BytesIO(raw), allow_pickle=False)
    except OSError:
        raise
    except Exception:  # numpy reads the header as Python source, which fails in many ways
        raise MemtrainError(f"{file} is not what was written") from None
    if starts.shape != (info.documents,) or not are_starts(starts, info.tokens):
        raise MemtrainError(f"{name} does not hold {info.documents:,} documents, as its meta says")
    return starts


def _meta_of(folder: Path) -> tuple[StoreMeta, dict[str, SplitInfo]]:
    return _read_meta(parse_json(read_text(folder / "meta.json", MAX_META_BYTES), "meta.json"))


def _named(folder: Path, error: MemtrainError | OSError) -> MemtrainError:
    """An error that names the store and says what helps."""
    if isinstance(error, OSError):
        return MemtrainError(f"{folder}: {error.filename}: {error.strerror or error}")
    return MemtrainError(f"{folder}: {error}; remove it and prepare it again")


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
        plain["picture"] = _record(ImageFormat, plain["picture"], "meta.json: picture")
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
    if verify and hashlib.sha256(store.tokens(name).data).hexdigest() != info.sha256:
        raise MemtrainError(f"{name}.bin is not what was written (checksum)")
    _check_documents(store, name)
    if meta.vocab_size <= np.iinfo(meta.dtype).max:  # else every number is a token
        for block in blocks(store.tokens(name)):
            check_tokens(block, meta, name)


def _check_documents(store: Store, name: str) -> None:
    info, length = store.splits[name], store.meta.document_length
    if length is not None:
        right = info.documents * length == info.tokens
    else:
        try:
            starts = open_array(store.folder / f"{name}.starts.npy")
        except ValueError:  # no array, a pickle, cut short
            raise MemtrainError(f"{name}.starts.npy is not what was written") from None
        right = starts.shape == (info.documents,) and are_starts(starts, info.tokens)
    if not right:
        raise MemtrainError(f"{name} does not hold {info.documents:,} documents, as its meta says")
