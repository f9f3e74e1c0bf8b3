"""Open prepared data: read its meta, check its files, load its splits.

Everything on disk may be damaged or replaced by another process meanwhile: each check ends in an
error that names the store and a remedy.
"""

import hashlib
import io
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from numpy.lib.format import read_array

from memtrain.config.serialize import structure
from memtrain.data.store import (
    ADDED_FIELDS,
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
from memtrain.files import open_regular, read_bytes, read_json

SCANNED_TOKENS = 2**26
"""Opening a store checks each token of a split up to this size; those of a larger split are checked
as they are read."""
MAX_META_BYTES = 2**20
MAX_HEADER_BYTES = 2**12
"""Of a .npy file."""


def open_store(folder: Path, *, verify: bool = False) -> Store:
    """Open a store that `write_store` made.

    Args:
        folder: the store's folder.
        verify: also compare the checksums, which reads every byte.

    Raises:
        MemtrainError: there is none, another version wrote it, or its files have changed.
    """
    if not (folder / "meta.json").is_file():
        raise MemtrainError(
            f"{folder}: no prepared data here (meta.json is missing); {_remedy(folder)}"
        )
    try:
        store = Store(folder, *_read_meta(folder))
        for name in SPLITS:
            _check_files(store, name, verify)
        store.tokenizer()
    except (MemtrainError, OSError) as error:
        raise _with_folder(folder, error) from None
    return store


def _remedy(folder: Path) -> str:
    """The command that prepares the data that a recipe or a run expects in a folder."""
    name = folder.name
    if name in ("text", "images", "tokens"):  # the default paths of recipes for the user's data
        return f"name yours: memtrain train {name} --data PATH"
    files = {"sketchy": " --data-dir FOLDER", "enwik8": " --data-dir FILE"}.get(name, "")
    if name in ("mnist", "tinystories", "enwik8", "sketchy"):
        return f"memtrain data {name}{files} --out {folder} prepares it"
    return f"memtrain data SOURCE --out {folder} prepares it, with the same --option as before"


def load_store(
    folder: Path, on_disk: Callable[[Store], bool] = lambda store: False
) -> tuple[Store, dict[str, LoadedSplit]]:
    """Open a store and load its splits; once more if another process replaces it meanwhile.

    Args:
        folder: the store's folder.
        on_disk: whether the tokens of a store stay there.
    """
    with suppress(MemtrainError):
        store = open_store(folder)
        return store, load_splits(store, on_disk=on_disk(store))
    time.sleep(0.05)  # a store that is being replaced is missing for a moment
    store = open_store(folder)
    return store, load_splits(store, on_disk=on_disk(store))


def load_splits(store: Store, *, on_disk: bool = False) -> dict[str, LoadedSplit]:
    """Read all starts of a store into memory, and all tokens unless they stay on disk.

    Tokens in memory are compared with their checksum, which takes seconds per gigabyte; those on
    disk are not.

    Raises:
        MemtrainError: the files changed since the store was opened: damaged, or replaced.
    """
    try:
        splits = {name: _load_split(store, name, on_disk) for name in SPLITS}
        replaced = _read_meta(store.folder) != (store.meta, store.splits)
    except (MemtrainError, OSError) as error:
        raise _with_folder(store.folder, error) from None
    if replaced:  # the starts may belong to other tokens
        raise MemtrainError(f"{store.folder}: was replaced while it was read; try again")
    return splits


def _load_split(store: Store, name: str, on_disk: bool) -> LoadedSplit:
    info = store.splits[name]
    if on_disk:
        return LoadedSplit(store.token_file(name), _load_starts(store, name))
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
    try:  # not memory-mapped: if the file is cut short while mapped, the process dies
        raw = read_bytes(store.folder / file, 8 * info.documents + MAX_HEADER_BYTES)
        starts = read_array(io.BytesIO(raw), allow_pickle=False)
    except OSError:
        raise
    except Exception:  # numpy evaluates the header as Python source
        raise MemtrainError(f"{file} is not what was written") from None
    _check_documents(store, name, starts)
    return starts


def _read_meta(folder: Path) -> tuple[StoreMeta, dict[str, SplitInfo]]:
    plain = read_json(folder / "meta.json", MAX_META_BYTES)
    if not isinstance(plain, dict):
        raise MemtrainError("meta.json: must be a JSON object")
    version = plain.pop("version", None)
    if version != STORE_VERSION:
        raise MemtrainError(f"version {version}, this memtrain reads version {STORE_VERSION}")
    dtype, splits = plain.pop("dtype", None), plain.pop("splits", None)
    meta = structure(plain, StoreMeta, "meta.json")
    # A writer leaves no field out: a default here would hide damage.
    missing = [name for name in asdict(meta) if name not in plain]
    if meta.picture is not None:
        missing += [f"picture.{key}" for key in asdict(meta.picture) if key not in plain["picture"]]
    missing = [name for name in missing if name not in ADDED_FIELDS]
    if missing:
        raise MemtrainError(f"meta.json: {missing[0]}: missing")
    if dtype != meta.dtype.name:
        raise MemtrainError(
            f"meta.json: dtype {dtype!r}: {meta.vocab_size} tokens are stored as {meta.dtype.name}"
        )
    if not isinstance(splits, dict) or splits.keys() != set(SPLITS):
        raise MemtrainError(f"meta.json: splits: must be {' and '.join(SPLITS)}")
    infos = {name: structure(splits[name], SplitInfo, f"meta.json: {name}") for name in SPLITS}
    return meta, infos


def _with_folder(folder: Path, error: MemtrainError | OSError) -> MemtrainError:
    """An error that names the store and a remedy."""
    if isinstance(error, OSError):
        return MemtrainError(f"{folder}: {error.filename}: {error.strerror or error}")
    return MemtrainError(f"{folder}: {error}; remove it and prepare it again")


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
    file = store.folder / f"{name}.starts.npy"
    try:
        starts = None if meta.document_length else open_array(file)
    except ValueError:  # not an array, a pickle, cut short
        raise MemtrainError(f"{name}.starts.npy is not what was written") from None
    _check_documents(store, name, starts)
    whole = meta.vocab_size > np.iinfo(meta.dtype).max  # every number is a token
    if not whole and info.tokens <= SCANNED_TOKENS:
        for block in blocks(store.tokens(name)):
            check_tokens(block, meta, name)


def _check_documents(store: Store, name: str, starts: np.ndarray | None) -> None:
    info, length = store.splits[name], store.meta.document_length
    if starts is None:
        right = info.documents * (length or 1) == info.tokens
    else:
        right = starts.shape == (info.documents,) and are_starts(starts, info.tokens)
    if not right:
        raise MemtrainError(f"{name} does not hold {info.documents:,} documents, as its meta says")
