"""Opens a store and reads it into memory, if its meta and its files are as they were written."""

import hashlib
import io
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
from jaxtyping import Int64
from numpy.lib.format import read_array

from memtrain.data.images import ImageFormat
from memtrain.data.store.format import (
    MIN_TOKENS,
    SPLITS,
    STORE_VERSION,
    LoadedSplit,
    SplitInfo,
    Store,
    StoreMeta,
    are_starts,
    blocks,
    check_tokens,
    open_array,
)
from memtrain.errors import MemtrainError
from memtrain.files import open_regular, parse_json, read_bytes, read_text

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
