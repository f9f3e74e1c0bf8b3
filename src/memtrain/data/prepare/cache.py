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
import sys
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
    checked_options,
    prepare_images,
    prepare_path,
    prepare_text,
    prepare_tokens,
)
from memtrain.data.store import Store, open_store
from memtrain.data.store_writer import alone, publish
from memtrain.errors import MemtrainError, printable
from memtrain.files import parse_json, read_text, unique_name, write_atomic

OWN = {"text": prepare_text, "images": prepare_images, "tokens": prepare_tokens}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?=\S)")


def prepared_stream(
    recipe: str, path: Path, default: Stream, options: dict[str, Any], root: Path = Path("data")
) -> Stream:
    """The stream of a recipe on the user's data; pictures are evaluated whole."""
    store = prepared_store(recipe, path, options, root)
    length = store.meta.document_length if store.meta.picture else None
    return replace(
        default,
        path=str(store.folder),
        evaluate_length=max(2, length or default.evaluate_length),
    )


def prepared_store(recipe: str, path: Path, options: dict[str, Any], root: Path) -> Store:
    """The store at a path, or the store prepared from what is there, unless it is there already.

    Args:
        recipe: mnist, tinystories, sketchy, text, images or tokens: how a path is read.
        path: a store; or a file or folder to prepare, into `root`/NAME-KEY.
        options: of the preparation; those that are not given have their defaults.
        root: where prepared data goes.
    """
    path = source_path(path)
    if (path / "meta.json").is_file():
        if options:
            raise MemtrainError(f"{path}: is prepared already; --option is for what is not")
        return _of_kind(recipe, open_store(path))
    store, new = prepare_source(path, options, root, recipe)
    if new:
        counts = " and ".join(f"{info.tokens:,} {name}" for name, info in store.splits.items())
        for line in (f"prepared {store.folder}: {counts} tokens", *store.meta.notes):
            print(printable(line), file=sys.stderr)
    return store


def source_path(path: Path) -> Path:
    """The path of data that the user named; ~ is the user's folder.

    Raises:
        MemtrainError: nothing is there, or it is a URL.
    """
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
    """Prepare a file or folder, into a folder of `root` that its content and the options name.

    Args:
        path: the file or folder.
        options: of the preparation.
        root: where prepared data goes.
        recipe: how it is read; by what it is, if not given. Then it is always read, else only if
            no store was prepared from it as it is now.

    Returns:
        the store, and whether it is new.
    """
    function = DATA_SETS.get(recipe) or OWN.get(recipe) or prepare_path
    chosen = _all_options(function, options) if recipe else options
    name = recipe if recipe in DATA_SETS else path.resolve().name.split(".")[0]
    name = name[:64] or recipe or "data"
    if recipe and (store := find_prepared(root, name, recipe, chosen, path)):
        return store, False
    try:
        root.mkdir(parents=True, exist_ok=True)
        wish = root / f"{name}-{digest([recipe, chosen, str(path.resolve())])[:8]}-source"
        with alone(wish, str(path)):
            # Another process may have prepared it meanwhile.
            if recipe and (store := find_prepared(root, name, recipe, chosen, path)):
                return store, False
            return _prepare(path, options, root, name, recipe)
    except OSError as error:
        raise MemtrainError(f"{root}: {error.strerror or error}") from None


def _prepare(
    path: Path, options: dict[str, Any], root: Path, name: str, recipe: str
) -> tuple[Store, bool]:
    """Prepare beside the place, which the content names, and move it there."""
    draft = root / unique_name(f".draft-{name}-")
    seen = signature(path)  # before it is read: what changes later shows
    sources = {str(path.resolve()): seen} if seen else {}
    try:
        if function := DATA_SETS.get(recipe) or OWN.get(recipe):
            store = function(path, draft, **checked_options(function, options))
        else:
            store = prepare_path(path, draft, **options)
        kind = recipe or _kind(store)
        chosen = _all_options(function or OWN[kind], options)
        key = key_of(store, kind, chosen)
        folder = root / f"{name}-{key[:8]}"
        made = {"key": key, "kind": kind, "options": chosen, "sources": sources}
        note_made(draft, made)
        with alone(folder):
            same = how_made(folder).get("key") == key
            if same and opened(folder, verify=True):
                note_sources(folder, sources)
                return open_store(folder), False
            if folder.exists() and not same:
                raise MemtrainError(f"{folder}: holds other data; rename it, or remove it")
            publish(draft, folder, overwrite=same)  # what is damaged
        return open_store(folder), True
    except MemtrainError as error:
        said = str(error)
        for place in (draft.resolve(), draft):  # which the user has not named
            said = said.replace(str(place), str(root / name))
        raise MemtrainError(said) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _all_options(function: Callable[..., Store], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a preparation: those given, and the defaults of the others."""
    parameters = inspect.signature(function).parameters.items()
    defaults = {name: one.default for name, one in parameters if name not in NOT_OPTIONS}
    return defaults | checked_options(function, options)


def _kind(store: Store) -> str:
    """Which recipe learns a store."""
    return "text" if store.meta.text else "images" if store.meta.picture else "tokens"


def _of_kind(recipe: str, store: Store) -> Store:
    """Refuse pictures for text and the like."""
    held = _kind(store)
    if held != {"mnist": "images", "sketchy": "images", "tinystories": "text"}.get(recipe, recipe):
        raise MemtrainError(
            f"{store.folder}: holds {held}; memtrain train {held} --data {store.folder}"
        )
    return store


OPTIONS = "options.json"
"""Beside a store's own files. A store is whole without it."""
SETTLED_SECONDS = 2.0
"""A file that changed later than this may change once more without its times showing it."""


def find_prepared(
    root: Path, name: str, kind: str, options: dict[str, Any], path: Path
) -> Store | None:
    """The store that was prepared in this way from what is at a path, if nothing has changed.

    Args:
        root: where prepared data goes.
        name: how the store's folder begins.
        kind: how the path was read.
        options: all options of the preparation.
        path: the source.
    """
    source, seen = str(path.resolve()), ""
    for folder in sorted(root.glob(f"{escape(name)}-????????")):
        made = how_made(folder)
        sources = made.get("sources")
        if made.get("kind") != kind or made.get("options") != json.loads(json.dumps(options)):
            continue
        if not isinstance(sources, dict) or source not in sources:
            continue
        seen = seen or signature(path)
        if seen and sources[source] == seen and (store := opened(folder)):
            return store
    return None


def how_made(folder: Path) -> dict[str, Any]:
    """How a store was prepared; empty if that is not known."""
    try:
        plain = parse_json(read_text(folder / OPTIONS, 2**20), OPTIONS)
    except (OSError, MemtrainError):
        return {}
    return plain if isinstance(plain, dict) else {}


def note_made(folder: Path, made: dict[str, Any]) -> None:
    """Write down how a store was prepared."""
    write_atomic(folder / OPTIONS, f"{json.dumps(made, indent=2)}\n".encode())


def note_sources(folder: Path, sources: dict[str, str]) -> None:
    """Note in a store that it is also what these sources give now."""
    made = how_made(folder)
    known = made.get("sources")
    known = known if isinstance(known, dict) else {}
    if known | sources != known:
        with suppress(OSError):  # of another user, or read-only: it is prepared again next time
            note_made(folder, made | {"sources": known | sources})


def opened(folder: Path, *, verify: bool = False) -> Store | None:
    """A store, if it is whole."""
    try:
        return open_store(folder, verify=verify)
    except MemtrainError:
        return None


# ------------------------------------------------------------------------------------- checksums


def key_of(store: Store, kind: str, options: dict[str, Any]) -> str:
    """A checksum of all that a store is, but for where it came from."""
    meta = asdict(store.meta)
    for told in ("name", "source", "notes"):
        del meta[told]
    equal = store.meta.document_length is not None
    starts = [] if equal else [digest(store.starts(name).tobytes()) for name in store.splits]
    splits = {name: asdict(info) for name, info in store.splits.items()}
    return digest([kind, options, meta, splits, starts])


def signature(path: Path) -> str:
    """A checksum of the names, sizes and times of a file, or of all files of a folder.

    Of the times, nobody can set back that of the last change (ctime). Empty if a file changed just
    now: it might change again within the resolution of the file system's clock.
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
    return digest(sorted(files))


def digest(value: Any) -> str:
    """The checksum of bytes, or of what JSON can hold."""
    raw = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()
