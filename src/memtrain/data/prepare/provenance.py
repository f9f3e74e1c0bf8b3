"""How a store was prepared, and from what: so that it is found again.

`options.json` in a store holds its key (a checksum of all that it is, and of the options), the
options, and of each source a checksum of its files' names, sizes and times. As long as these are
the same, the source is not read again.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any

from memtrain.data.store import Store, open_store
from memtrain.errors import MemtrainError
from memtrain.files import parse_json, read_text, write_whole

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
    write_whole(folder / OPTIONS, f"{json.dumps(made, indent=2)}\n".encode())


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
