"""Prepare data sets as stores: MNIST, TinyStories, enwik8, Sketchy, and the user's own files.

Each `prepare_...` function reads its files, writes a store to the folder `out` and returns it
opened; `overwrite` replaces an existing store. All files are untrusted: sizes are limited, and any
failure is a one-line `MemtrainError` that leaves nothing behind.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from memtrain.data.prepare.datasets import (
    prepare_enwik8,
    prepare_mnist,
    prepare_sketchy,
    prepare_tinystories,
)
from memtrain.data.prepare.file_kind import require_kind
from memtrain.data.prepare.token_files import prepare_tokens
from memtrain.data.prepare.user_files import prepare_images, prepare_text
from memtrain.data.store import Store
from memtrain.errors import MemtrainError, did_you_mean

DATA_SETS: dict[str, Callable[..., Store]] = {
    "mnist": prepare_mnist,
    "tinystories": prepare_tinystories,
    "enwik8": prepare_enwik8,
    "sketchy": prepare_sketchy,
}
USER_FILES: dict[str, Callable[..., Store]] = {
    "text": prepare_text,
    "images": prepare_images,
    "tokens": prepare_tokens,
}
NOT_OPTIONS = {"data_dir", "path", "out", "overwrite", "return"}
_RULES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple: "two whole numbers",
}


def prepare(
    name: str, *, data_dir: Path | None = None, out: Path, overwrite: bool = False, **options: Any
) -> Store:
    """Prepare one of the paper's data sets.

    Args:
        name: mnist, tinystories, enwik8 or sketchy.
        data_dir: the folder with its files (of enwik8 the file), downloaded by default.
        out: the store's folder.
        overwrite: replace an existing store.
        options: of the data set's own function.
    """
    if name not in DATA_SETS:
        raise MemtrainError(f"data set {name!r}: {did_you_mean(name, DATA_SETS)}")
    function = DATA_SETS[name]
    return function(data_dir, out, overwrite=overwrite, **checked_options(function, options))


def prepare_path(
    path: Path | Sequence[Path], out: Path, *, overwrite: bool = False, **options: Any
) -> Store:
    """Prepare the user's files by their content: text, images or tokens.

    A folder of both text and images is read as the more frequent kind, with a note. Several paths
    are texts, or are refused.
    """
    function = USER_FILES[kind_of_paths([path] if isinstance(path, Path) else path)]
    return function(path, out, overwrite=overwrite, **checked_options(function, options))


def kind_of_paths(paths: Sequence[Path], recipe: str = "") -> str:
    """The recipe of a path (text, images or tokens); several paths must be texts.

    Args:
        paths: the user's files and folders.
        recipe: how they are to be read, if that is decided.
    """
    kind = recipe or require_kind(paths[0], "").recipes[0]
    if len(paths) > 1 and kind != "text":
        raise MemtrainError(
            f"data={paths[1]}: several paths are joined only if they are texts, and "
            f"{paths[0]} is read as {kind}; name one, or copy the files into one folder"
        )
    return kind


def checked_options(function: Callable[..., Store], options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options against the signature of a `prepare_...` function."""
    hints = get_type_hints(function)
    known = hints.keys() - NOT_OPTIONS
    for option in options:
        if option not in known:
            kind = function.__name__.removeprefix("prepare_")
            raise MemtrainError(
                f"{option}: {kind} has no such option; {did_you_mean(option, known)}"
            )
    return {option: _convert(option, value, hints[option]) for option, value in options.items()}


def _convert(option: str, value: Any, hint: Any) -> Any:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = {get_origin(member) or member for member in members} - {types.NoneType}
    if bool in kinds and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if type(value) in kinds or (value is None and types.NoneType in members):
        return value
    if float in kinds and type(value) is int:
        return float(value)
    if str in kinds and type(value) in (int, float):  # the command line's --option column 1
        return str(value)
    rule = " or ".join(words for kind, words in _RULES.items() if kind in kinds)
    raise MemtrainError(f"{option}={value}: must be {rule}")
