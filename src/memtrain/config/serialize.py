"""A RunConfig as JSON and back, strictly: what the reader does not know, it refuses."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import cattrs

from memtrain.config import DataConfig, RunConfig
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import parse_json, read_text

CONFIG_VERSION = 1
"""Raised when a saved config can no longer be read as it was meant."""
MAX_CONFIG_BYTES = 2**20


def to_json(config: RunConfig) -> str:
    """The config as indented JSON, every field written out."""
    if not isinstance(config, RunConfig):
        raise MemtrainError(f"config={config!r}: must be a RunConfig, such as memtrain.recipe(...)")
    plain = cattrs.Converter().unstructure(config)
    return json.dumps({"version": CONFIG_VERSION, **plain}, indent=2) + "\n"


def read_config(path: Path) -> RunConfig:
    """Read a config.json; one too large to be a config is refused before it is read."""
    text = read_text(path, MAX_CONFIG_BYTES)
    try:
        return from_json(text)
    except MemtrainError as error:
        raise MemtrainError(f"{path}: {error}") from None


def from_json(text: str) -> RunConfig:
    """Read what `to_json` wrote. Unknown fields, wrong types and bad values are refused."""
    if "{" not in str(text) and str(text).strip().endswith(".json"):
        raise MemtrainError(
            f"{text}: is a path; from_json(Path(path).read_text()) reads a file, "
            "memtrain.Run.open(folder) a run"
        )
    plain = parse_json(text, "not a config")
    if not isinstance(plain, dict):
        raise MemtrainError("not a config: a JSON object is needed")
    version = plain.pop("version", CONFIG_VERSION)
    if version != CONFIG_VERSION:
        raise MemtrainError(
            f"version={version!r}: this memtrain reads config version {CONFIG_VERSION}; "
            "use the memtrain that wrote it"
        )
    _check_data_kind(plain.get("data"))
    return _structure(plain)


def _check_data_kind(data: Any) -> None:
    """cattrs picks the data's class by its kind; say so in words when there is none."""
    kinds = [config().kind for config in get_args(DataConfig)]
    if isinstance(data, dict) and data.get("kind") not in kinds:
        raise MemtrainError(
            f"data.kind={data.get('kind')!r}: {did_you_mean(str(data.get('kind')), kinds)}"
        )


def _structure(plain: Mapping[str, Any]) -> RunConfig:
    converter = cattrs.Converter(forbid_extra_keys=True)
    # cattrs turns "12" into 12 and 2.7 into 2; a config says what it means.
    for kind, accepted in ((int, int), (float, (int, float)), (str, str), (bool, bool)):
        converter.register_structure_hook(kind, _strict(kind, accepted))
    converter.register_structure_hook(int | float | bool | str, _scalar)
    try:
        return converter.structure(plain, RunConfig)
    except MemtrainError:
        raise
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, MemtrainError):
                raise cause from None
            if isinstance(cause, cattrs.errors.ForbiddenExtraKeysError):
                name = sorted(cause.extra_fields)[0]
                known = [f.name for f in fields(cause.cl)]
                guess = get_close_matches(name, known, n=1)
                raise MemtrainError(
                    f"{name}: {cause.cl.__name__} has no such field"
                    + (f"; did you mean {guess[0]}?" if guess else f" ({', '.join(known)})")
                ) from None
        raise MemtrainError("not a config: " + "; ".join(_reasons(error))) from None


def _reasons(error: Exception) -> list[str]:
    return cattrs.transform_error(error, format_exception=lambda cause, _: str(cause))


KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _strict(kind: type, accepted: Any):
    def structure(value: Any, _: type) -> Any:
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, accepted):
            raise TypeError(f"{value!r}: must be {KINDS[kind]}")
        return kind(value)

    return structure


def _scalar(value: Any, _: Any) -> Any:
    if not isinstance(value, (str, int, float, bool)):
        raise TypeError(f"{value!r}: must be a text, a number or a truth value")
    return value


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
