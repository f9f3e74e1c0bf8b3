"""`--data PATH` of the recipes: prepared once, then found again."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from memtrain.config import Stream
from memtrain.data.sources import (
    DATA_SETS,
    checked_options,
    prepare_images,
    prepare_text,
    prepare_tokens,
)
from memtrain.data.store import Store, open_store
from memtrain.errors import MemtrainError
from memtrain.files import parse_json, read_text

OPTIONS = "options.json"
"""Beside a store's own files: how it was prepared. A store is whole without it."""
OWN = {"text": prepare_text, "images": prepare_images, "tokens": prepare_tokens}


def ready_stream(
    recipe: str, path: Path, default: Stream, options: dict[str, Any], root: Path = Path("data")
) -> Stream:
    """The stream of a recipe on the user's data; pictures are evaluated whole."""
    store = ready_store(recipe, path, options, root)
    length = store.meta.document_length if store.meta.picture else None
    return replace(
        default,
        path=str(store.folder),
        evaluate_length=max(2, length or default.evaluate_length),
    )


def ready_store(recipe: str, path: Path, options: dict[str, Any], root: Path) -> Store:
    """The store at a path, or the store prepared from what is there, unless it is there already.

    Args:
        recipe: mnist, tinystories, sketchy, text, images or tokens: how a path is read.
        path: a store; or a file or folder to prepare, into `root`/NAME.
        options: of the preparation; with others than last time it is prepared anew, without any
            it is taken as it is.
        root: where prepared data goes.
    """
    if (path / "meta.json").is_file():
        if options:
            raise MemtrainError(f"{path}: is prepared already; --option is for what is not")
        return _of_kind(recipe, open_store(path))
    if not path.exists():
        raise MemtrainError(f"data={path}: no such file or folder")
    out = root / (recipe if recipe in DATA_SETS else path.resolve().name.split(".")[0] or recipe)
    if out.exists() and not (out / "meta.json").is_file():
        out = out.with_name(f"{out.name}-prepared")  # the user's own folder may be under data/
    prepared = (out / "meta.json").is_file()
    if prepared:
        store = open_store(out)
        if not _made_from(path, recipe, store.meta.source):
            raise MemtrainError(
                f"{out}: was prepared from {store.meta.source}; take it away, or prepare {path} "
                f"elsewhere: memtrain data {path} --out FOLDER, then --data FOLDER"
            )
        as_asked = not options or options == _options_of(out)
        if as_asked and _changed(path) <= (out / "meta.json").stat().st_mtime:
            return _of_kind(recipe, store)
        options = options or _options_of(out)  # the source has changed, not the wish
    function = DATA_SETS.get(recipe) or OWN[recipe]
    store = function(path, out, overwrite=prepared, **checked_options(function, options))
    (out / OPTIONS).write_text(json.dumps(options) + "\n")
    counts = " and ".join(f"{info.tokens:,} {name}" for name, info in store.splits.items())
    for line in (f"prepared {out}: {counts} tokens", *store.meta.notes):
        print(line, file=sys.stderr)
    return replace(store, folder=out)  # as the user named it, not as an absolute path


def _options_of(folder: Path) -> dict[str, Any]:
    """The options that `ready_store` prepared a store with; none if that is not known."""
    try:
        plain = parse_json(read_text(folder / OPTIONS, 2**16), OPTIONS)
    except (OSError, MemtrainError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _made_from(path: Path, recipe: str, source: str) -> bool:
    """Whether a store's source is this file or folder; of a data set, or something in it."""
    if recipe in DATA_SETS:
        made = Path(source.rpartition(", from ")[2]).resolve()
        return path.resolve() in (made, *made.parents)
    return path.resolve() == Path(source).resolve()


def _of_kind(recipe: str, store: Store) -> Store:
    """Refuse pictures for text and the like."""
    held = "text" if store.meta.text else "images" if store.meta.picture else "tokens"
    if held != {"mnist": "images", "sketchy": "images", "tinystories": "text"}.get(recipe, recipe):
        raise MemtrainError(
            f"{store.folder}: holds {held}; memtrain train {held} --data {store.folder}"
        )
    return store


def _changed(path: Path) -> float:
    """When a file, or anything in a folder, was last written."""
    inside = path.rglob("*") if path.is_dir() else ()
    return max(file.stat().st_mtime for file in (path, *inside))
