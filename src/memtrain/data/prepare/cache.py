"""Prepare the data of `--data PATH` once, and find it again.

Prepared data goes into data/NAME-KEY. The key is a checksum of the tokens and the options, so
another source or other options make another store, and no store is ever replaced by other data.

`options.json` in a store holds its key, the options, and for each source a checksum of its files'
names, sizes and times. While these are unchanged, the source is not read again.
"""

import hashlib
import inspect
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path
from typing import Any

from memtrain.config import Stream
from memtrain.data.prepare import (
    DATA_SETS,
    NOT_OPTIONS,
    USER_FILES,
    checked_options,
    prepare_path,
)
from memtrain.data.prepare.store_writer import PROVENANCE, publish, store_lock
from memtrain.data.store import Store, open_store
from memtrain.errors import MemtrainError
from memtrain.files import read_json, unique_name, write_atomic

SETTLED_SECONDS = 2.0
"""A file that changed more recently than this may change again without its times showing it."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?=\S)")


def prepared_stream(
    recipe: str,
    path: Path,
    default: Stream,
    options: dict[str, Any],
    root: Path = Path("data"),
    report: Callable[[str], None] = lambda line: None,
) -> Stream:
    """The stream of a recipe on the user's data; images are evaluated as a whole."""
    store = prepared_store(recipe, path, options, root, report)
    length = store.meta.document_length if store.meta.picture else None
    length = max(2, length or default.evaluate_length)
    return replace(default, path=str(store.folder), evaluate_length=length)


def prepared_store(
    recipe: str,
    path: Path,
    options: dict[str, Any],
    root: Path,
    report: Callable[[str], None] = lambda line: None,
) -> Store:
    """Open the store at a path, or the one prepared from it; prepare it if there is none.

    Args:
        recipe: how the path is read: mnist, tinystories, sketchy, text, images or tokens.
        path: a store; or a file or folder to prepare into `root`/NAME-KEY.
        options: of the preparation; the others have their defaults.
        root: the folder of prepared data.
        report: receives a line per note if something was prepared.
    """
    path = source_path(path)
    if (path / "meta.json").is_file():
        if options:
            raise MemtrainError(f"{path}: is prepared already; --option is for what is not")
        return _require_recipe(recipe, open_store(path))
    store, new = prepare_source(path, options, root, recipe)
    if new:
        counts = " and ".join(f"{info.tokens:,} {name}" for name, info in store.splits.items())
        for line in (f"prepared {store.folder}: {counts} tokens", *store.meta.notes):
            report(line)
    return store


def source_path(path: Path) -> Path:
    """Expand ~ in the path of the user's data."""
    if (address := _URL.match(str(path))) and not path.exists():
        url = f"{address[1]}://{str(path)[address.end() :]}"  # a Path has lost a slash
        raise MemtrainError(f"data={url}: URLs are not read; download it and name the file")
    with suppress(RuntimeError):  # no such user
        path = path.expanduser()
    if not path.exists():
        raise MemtrainError(f"data={path}: no such file or folder")
    return path


def prepare_source(
    path: Path, options: dict[str, Any], root: Path, recipe: str = ""
) -> tuple[Store, bool]:
    """Prepare a file or folder, into a folder of `root` named by its content and the options.

    Args:
        path: the file or folder.
        options: of the preparation.
        root: the folder of prepared data.
        recipe: how it is read, in which case a store prepared from the unchanged source is
            reused. By default its content decides, and it is always read.

    Returns:
        The store, and whether it is new.
    """
    function = DATA_SETS.get(recipe) or USER_FILES.get(recipe) or prepare_path
    chosen = _all_options(function, options) if recipe else options
    name = recipe if recipe in DATA_SETS else path.resolve().name.split(".")[0]
    name = name[:64] or recipe or "data"
    if recipe and (store := _find_prepared(root, name, recipe, chosen, path)):
        return store, False
    try:
        root.mkdir(parents=True, exist_ok=True)
        target = root / f"{name}-{_checksum([recipe, chosen, str(path.resolve())])[:8]}-source"
        with store_lock(target, str(path)):
            # Another process may have prepared it meanwhile.
            if recipe and (store := _find_prepared(root, name, recipe, chosen, path)):
                return store, False
            return _prepare(path, options, root, name, recipe)
    except OSError as error:
        raise MemtrainError(f"{root}: {error.strerror or error}") from None


def _prepare(
    path: Path, options: dict[str, Any], root: Path, name: str, recipe: str
) -> tuple[Store, bool]:
    """Prepare a draft next to the final folder, whose name depends on the content, and move it."""
    draft = root / unique_name(f".draft-{name}-")
    seen = source_signature(path)  # before reading, so that later changes show
    sources = {str(path.resolve()): seen} if seen else {}
    try:
        if function := DATA_SETS.get(recipe) or USER_FILES.get(recipe):
            store = function(path, draft, **checked_options(function, options))
        else:
            store = prepare_path(path, draft, **options)
        kind = recipe or _kind(store)
        chosen = _all_options(function or USER_FILES[kind], options)
        key = store_key(store, kind, chosen)
        folder = root / f"{name}-{key[:8]}"
        made = {"key": key, "kind": kind, "options": chosen, "sources": sources}
        _write_provenance(draft, made)
        with store_lock(folder):
            found = _read_provenance(folder)
            same = found.get("key") == key
            if same and _open_if_valid(folder, verify=True):
                known = found.get("sources")
                known = known if isinstance(known, dict) else {}
                if known | sources != known:
                    with suppress(OSError):  # of another user, or read-only: prepared again then
                        _write_provenance(folder, found | {"sources": known | sources})
                return open_store(folder), False
            if folder.exists() and not same:
                raise MemtrainError(f"{folder}: holds other data; rename it, or remove it")
            publish(draft, folder, overwrite=same)  # a damaged store
        return open_store(folder), True
    except MemtrainError as error:
        message = str(error)
        for place in (draft.resolve(), draft):  # a name unknown to the user
            message = message.replace(str(place), str(root / name))
        raise MemtrainError(message) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _all_options(function: Callable[..., Store], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a preparation: those given, and the defaults of the others."""
    parameters = inspect.signature(function).parameters.items()
    defaults = {name: one.default for name, one in parameters if name not in NOT_OPTIONS}
    return defaults | checked_options(function, options)


def _kind(store: Store) -> str:
    return "text" if store.meta.text else "images" if store.meta.picture else "tokens"


def _require_recipe(recipe: str, store: Store) -> Store:
    """Refuse a store of another kind than the recipe's."""
    kind = _kind(store)
    if kind != {"mnist": "images", "sketchy": "images", "tinystories": "text"}.get(recipe, recipe):
        raise MemtrainError(
            f"{store.folder}: holds {kind}; memtrain train {kind} --data {store.folder}"
        )
    return store


# ----------------------------------------------------------------------------------- provenance


def _find_prepared(
    root: Path, name: str, kind: str, options: dict[str, Any], path: Path
) -> Store | None:
    """The store prepared with these options from the unchanged source, if there is one."""
    source, seen = str(path.resolve()), ""
    for folder in sorted(root.glob(f"{escape(name)}-????????")):
        made = _read_provenance(folder)
        sources = made.get("sources")
        if made.get("kind") != kind or made.get("options") != json.loads(json.dumps(options)):
            continue
        if not isinstance(sources, dict) or source not in sources:
            continue
        seen = seen or source_signature(path)
        if seen and sources[source] == seen and (store := _open_if_valid(folder)):
            return store
    return None


def _open_if_valid(folder: Path, *, verify: bool = False) -> Store | None:
    try:
        return open_store(folder, verify=verify)
    except MemtrainError:
        return None


def _read_provenance(folder: Path) -> dict[str, Any]:
    """The content of options.json; empty if it is missing or damaged."""
    try:
        plain = read_json(folder / PROVENANCE, 2**20)
    except (OSError, MemtrainError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _write_provenance(folder: Path, made: dict[str, Any]) -> None:
    write_atomic(folder / PROVENANCE, f"{json.dumps(made, indent=2)}\n".encode())


def store_key(store: Store, kind: str, options: dict[str, Any]) -> str:
    """A checksum of a store's content and options, but not of its origin."""
    meta = asdict(store.meta)
    for origin in ("name", "source", "notes"):
        del meta[origin]
    equal = store.meta.document_length is not None
    starts = [] if equal else [_checksum(store.starts(name).tobytes()) for name in store.splits]
    splits = {name: asdict(info) for name, info in store.splits.items()}
    for plain in splits.values():
        del plain["alphabet"]  # follows from the tokens
    return _checksum([kind, options, meta, splits, starts])


def source_signature(path: Path) -> str:
    """A checksum of the names, sizes and times of a file, or of all files of a folder.

    It includes the time of the last change (ctime), which cannot be set back. Empty if a file
    changed just now: it might change again within the resolution of the file system's clock.
    """
    now, files = time.time(), []
    inside = (Path(top) / name for top, _, names in os.walk(path) for name in names)
    for file in inside if path.is_dir() else (path,):
        try:
            found = file.stat()
        except OSError:  # a dangling link, or gone meanwhile
            continue
        if found.st_ctime > now - SETTLED_SECONDS:
            return ""
        times = found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
        files.append([os.fsencode(file.relative_to(path)).hex(), *times])
    return _checksum(sorted(files))


def _checksum(value: Any) -> str:
    """The checksum of bytes, or of a JSON value."""
    raw = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()
