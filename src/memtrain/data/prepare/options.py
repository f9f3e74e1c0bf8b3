"""Options of a preparation: each checked against what the `prepare_...` says it takes."""

import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from memtrain.data.store import Store
from memtrain.errors import MemtrainError, did_you_mean

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple: "two whole numbers",
}
NOT_OPTIONS = {"data_dir", "path", "out", "overwrite", "return"}


def checked_options(function: Callable[..., Store], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the function takes them; words stand for true and false.

    Raises:
        MemtrainError: one that it does not take, with the nearest that it does, or one of another
            kind.
    """
    hints = get_type_hints(function)
    known = hints.keys() - NOT_OPTIONS
    what = function.__name__.removeprefix("prepare_")
    for option in options:
        if option not in known:
            raise MemtrainError(
                f"{option}: {what} has no such option; {did_you_mean(option, known)}"
            )
    return {option: _read(option, value, hints[option]) for option, value in options.items()}


def _read(option: str, value: Any, hint: Any) -> Any:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = {get_origin(member) or member for member in members} - {types.NoneType}
    if bool in kinds and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if type(value) in kinds or (value is None and types.NoneType in members):
        return value
    if float in kinds and type(value) is int:
        return float(value)
    rule = " or ".join(words for kind, words in WORDS.items() if kind in kinds)
    raise MemtrainError(f"{option}={value}: must be {rule}")
