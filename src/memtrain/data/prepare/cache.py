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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from memtrain.config import Stream
from memtrain.data.prepare import (
    DATA_SETS,
    NOT_OPTIONS,
    USER_FILES,
    checked_options,
    kind_of_paths,
)
from memtrain.data.prepare.hugging_face import HUB, hub_name
from memtrain.data.prepare.image_classes import label_file
from memtrain.data.prepare.store_writer import PROVENANCE, publish, store_lock
from memtrain.data.prepare.tokenize import BPE, tokenizer_file
from memtrain.data.store import TOKENIZER_FILE, Store
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError
from memtrain.files import read_json, unique_name, write_atomic

SETTLED_SECONDS = 2.0
"""A file that changed more recently than this may change again without its times showing it."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?=\S)")


def prepared_stream(
    recipe: str,
    path: Path | Sequence[Path],
    default: Stream,
    options: dict[str, Any],
    root: Path = Path("data"),
    report: Callable[[str], None] = lambda line: None,
) -> Stream:
    """The stream of a recipe on the user's data; images are evaluated as a whole."""
    store = prepared_store(recipe, path, options, root, report)
    image = store.meta.picture
    length = max(2, image.length) if image else default.evaluate_length
    return replace(default, path=str(store.folder), evaluate_length=length)


def prepared_store(
    recipe: str,
    path: Path | Sequence[Path],
    options: dict[str, Any],
    root: Path,
    report: Callable[[str], None] = lambda line: None,
) -> Store:
    """Open the store at a path, or the one prepared from it; prepare it if there is none.

    Args:
        recipe: how the path is read: mnist, tinystories, enwik8, sketchy, text, images or tokens.
        path: a store; or a file or folder to prepare into `root`/NAME-KEY, or several texts.
        options: of the preparation; the others have their defaults.
        root: the folder of prepared data.
        report: receives a line per note if something was prepared.
    """
    paths = [source_path(one) for one in _several(path)]
    for one in paths:
        if (one / "meta.json").is_file():
            if options:
                raise MemtrainError(f"{one}: is prepared already; --option is for what is not")
            if len(paths) > 1:
                raise MemtrainError(
                    f"{one}: is prepared already, and prepared data is not joined with other data; "
                    "name the files that it was prepared from"
                )
            return _require_recipe(recipe, open_store(one))
    store, new = prepare_source(paths, options, root, recipe)
    if new:
        counts = " and ".join(f"{info.tokens:,} {name}" for name, info in store.splits.items())
        for line in (f"prepared {store.folder}: {counts} tokens", *store.meta.notes):
            report(line)
    return store


def prepared_like(store: Store, path: Path, root: Path) -> Store:
    """Open the store at a path, or prepare the path with the vocabulary of another store."""
    options: dict[str, Any] = {}
    if not (path / "meta.json").is_file():
        if store.meta.tokenizer is not None:
            options["tokenizer"] = str(store.folder / TOKENIZER_FILE)
        elif _kind(store) == "tokens":
            options["vocab_size"] = store.meta.vocab_size
    return prepared_store(_kind(store), path, options, root)


def source_path(path: Path) -> Path:
    """Expand ~ in the path of the user's data; hf:NAME stays as it is."""
    if hub_name(path):
        return path
    if (address := _URL.match(str(path))) and not path.exists():
        url = f"{address[1]}://{str(path)[address.end() :]}"  # a Path has lost a slash
        raise MemtrainError(f"data={url}: URLs are not read; download it and name the file")
    with suppress(RuntimeError):  # no such user
        path = path.expanduser()
    if not path.exists():
        raise MemtrainError(f"data={path}: no such file or folder")
    return path


def prepare_source(
    path: Path | Sequence[Path], options: dict[str, Any], root: Path, recipe: str = ""
) -> tuple[Store, bool]:
    """Prepare a file or folder, into a folder of `root` named by its content and the options.

    Args:
        path: the file or folder, or several texts.
        options: of the preparation.
        root: the folder of prepared data.
        recipe: how it is read, in which case a store prepared from the unchanged source is
            reused. By default its content decides, and it is always read.

    Returns:
        The store, and whether it is new.
    """
    paths = _several(path)
    kind_of_paths(paths, recipe)
    function = DATA_SETS.get(recipe) or USER_FILES.get(recipe)
    chosen = _all_options(function, options) if function else options
    name = recipe if recipe in DATA_SETS else paths[0].resolve().name.split(".")[0]
    name = name.removeprefix(HUB)[:64] or recipe or "data"
    source = _Source.of(paths, options)
    if recipe and (store := _find_prepared(root, name, recipe, chosen, source)):
        return store, False
    try:
        root.mkdir(parents=True, exist_ok=True)
        target = root / f"{name}-{_checksum([recipe, chosen, source.name])[:8]}-source"
        with store_lock(target, ", ".join(map(str, paths))):
            # Another process may have prepared it meanwhile.
            if recipe and (store := _find_prepared(root, name, recipe, chosen, source)):
                return store, False
            return _prepare(source, options, root, name, recipe)
    except OSError as error:
        raise MemtrainError(f"{root}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class _Source:
    """What a store is prepared from: files and folders, also those that options name."""

    paths: tuple[Path, ...]
    files: tuple[Path, ...]
    """The paths, and the other files that the options name."""

    @classmethod
    def of(cls, paths: Sequence[Path], options: Mapping[str, Any]) -> "_Source":
        named = options.get("tokenizer", BPE)
        others = [tokenizer_file(named)] if isinstance(named, str) and named != BPE else []
        labels = {"labels": options.get("labels", False)}
        file = label_file(paths[0], **checked_options(USER_FILES["images"], labels))
        others += [] if file is None else [file]
        return cls(tuple(paths), (*paths, *others))

    @property
    def name(self) -> str:
        """The name under which options.json has its signature."""
        return "\n".join(str(path if hub_name(path) else path.resolve()) for path in self.paths)

    def signature(self) -> str:
        """The checksum of names, sizes and times; empty if a file changed just now."""
        found = [source_signature(path) for path in self.files]
        if len(found) == 1 or not all(found):
            return found[0] if len(found) == 1 else ""
        return _checksum(found)


def _several(path: Path | Sequence[Path]) -> list[Path]:
    return [path] if isinstance(path, Path) else list(path)


def _prepare(
    source: _Source, options: dict[str, Any], root: Path, name: str, recipe: str
) -> tuple[Store, bool]:
    """Prepare a draft next to the final folder, whose name depends on the content, and move it."""
    draft = root / unique_name(f".draft-{name}-")
    seen = source.signature()  # before reading, so that later changes show
    sources = {source.name: seen} if seen else {}
    path = source.paths[0] if len(source.paths) == 1 else source.paths
    try:
        kind = recipe or kind_of_paths(source.paths)
        function = DATA_SETS.get(kind) or USER_FILES[kind]
        store = function(path, draft, **checked_options(function, options))
        chosen = _all_options(function, options)
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
    return _defaults(function) | checked_options(function, options)


def _defaults(function: Callable[..., Store]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.items()
    return {name: one.default for name, one in parameters if name not in NOT_OPTIONS}


def _kind(store: Store) -> str:
    return "text" if store.meta.text else "images" if store.meta.picture else "tokens"


def _require_recipe(recipe: str, store: Store) -> Store:
    """Refuse a store of another kind than the recipe's; tokens with a tokenizer are text too."""
    kind = _kind(store)
    if recipe == "tokens" and store.meta.tokenizer is not None:
        return store
    kinds = {"mnist": "images", "sketchy": "images", "tinystories": "text", "enwik8": "text"}
    if kind != kinds.get(recipe, recipe):
        raise MemtrainError(
            f"{store.folder}: holds {kind}; memtrain train {kind} --data {store.folder}"
        )
    return store


# ----------------------------------------------------------------------------------- provenance


def _find_prepared(
    root: Path, name: str, kind: str, options: dict[str, Any], source: _Source
) -> Store | None:
    """The store prepared with these options from the unchanged source, if there is one.

    A store of an older version lacks the options that were added since, whose defaults change
    nothing.
    """
    seen, wanted = "", json.loads(json.dumps(options))
    defaults = _defaults(DATA_SETS.get(kind) or USER_FILES[kind])
    for folder in sorted(root.glob(f"{escape(name)}-????????")):
        made = _read_provenance(folder)
        sources, used = made.get("sources"), made.get("options")
        if made.get("kind") != kind or not isinstance(used, dict) or defaults | used != wanted:
            continue
        if not isinstance(sources, dict) or source.name not in sources:
            continue
        seen = seen or source.signature()
        if seen and sources[source.name] == seen and (store := _open_if_valid(folder)):
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
    meta = store.meta.to_json()
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
