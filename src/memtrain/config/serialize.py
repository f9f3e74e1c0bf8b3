"""Dataclasses from JSON, strictly, and the JSON of a RunConfig."""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from memtrain.config import DataConfig, PretrainConfig, RunConfig
from memtrain.config.stages import DECAY, SWEEPS
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import parse_json, read_text

T = TypeVar("T")

CONFIG_VERSION = 1
"""Raised when a saved config can no longer be read as it was meant."""
MAX_CONFIG_BYTES = 2**20
ADDED_FIELDS: dict[str, Any] = {
    "data.needle_within": 1.0,
    "data.resident": "auto",
    "smt.dynamics_steps": 1,
    "smt.dynamics_labels": "all",
    "smt.own_starts": 0.0,
    "smt.own_sweeps": 1,
    "smt.normalize_dynamics": False,
    "smt.memory_noise": 0.0,
    "smt.cell_decode_weight": 0.0,
    "smt.train_teacher": True,
    "dmt.rollout": "unrolled",
    "dmt.sweeps": SWEEPS,
    "dmt.train_teacher": False,
    "dmt.teacher_decode_weight": 1.0,
    "dmt.uniformity_weight": 0.01,
    "dmt.uniformity_samples": 512,
    "bptt.sweeps": 0,
    "teacher.rotary_fraction": 1.0,
    "teacher.head_bias": False,
    "cell.rotary_fraction": 1.0,
    "initial": "",
    "pretrain": asdict(PretrainConfig()),
    **{
        f"{stage}.{name}": before
        for stage in ("pretrain", "smt", "dmt", "bptt")
        for name, before in {
            "floor": 0.0,
            "decay": DECAY,
            "optimizer": "adamw",
            "optimizer_options": {},
            "patience": 0,
            "curriculum": (),
        }.items()
    },
}
"""Fields that configs written by older versions lack ("section.field" or "section"), each with the
value that runs had before there was a field; today's default may be another."""


def to_json(config: RunConfig) -> str:
    """The config as indented JSON, every field written out."""
    if not isinstance(config, RunConfig):
        raise MemtrainError(f"config={config!r}: must be a RunConfig, such as memtrain.recipe(...)")
    return json.dumps({"version": CONFIG_VERSION, **asdict(config)}, indent=2) + "\n"


def read_config(path: Path) -> RunConfig:
    """Read a config.json; one too large to be a config is refused before it is read."""
    text = read_text(path, MAX_CONFIG_BYTES)
    try:
        return from_json(text)
    except MemtrainError as error:
        raise MemtrainError(f"{path}: {error}") from None


def from_json(text: str) -> RunConfig:
    """Read what `to_json` wrote. Unknown fields, wrong types and bad values are refused.

    A field that is missing has its default; in a config with a version, which `to_json` wrote, the
    value that it had before there was such a field (`ADDED_FIELDS`).
    """
    if "{" not in str(text) and str(text).strip().endswith(".json"):
        raise MemtrainError(
            f"{text}: is a path; from_json(Path(path).read_text()) reads a file, "
            "memtrain.Run.open(folder) a run"
        )
    plain = parse_json(text, "not a config", strict=True)
    if not isinstance(plain, dict):
        raise MemtrainError("not a config: a JSON object is needed")
    written_by_us = "version" in plain
    version = plain.pop("version", CONFIG_VERSION)
    if version != CONFIG_VERSION:
        raise MemtrainError(
            f"version={version!r}: this memtrain reads config version {CONFIG_VERSION}; "
            "use the memtrain that wrote it"
        )
    _check_data_kind(plain.get("data"))
    if written_by_us:  # with every field that there was
        _add_missing_fields(plain)
    return structure(plain, RunConfig)


def _add_missing_fields(plain: dict[str, Any]) -> None:
    """Set the fields that a written config is too old to have."""
    kinds = {config().kind: config for config in get_args(DataConfig)}
    for name, before in ADDED_FIELDS.items():
        *section, field_name = name.split(".")
        at = plain.get(section[0]) if section else plain
        if not isinstance(at, dict):
            continue  # refused when it is read
        if section != ["data"] or field_name in {one.name for one in fields(kinds[at["kind"]])}:
            at.setdefault(field_name, json.loads(json.dumps(before)))


def _check_data_kind(data: Any) -> None:
    """Refuse an unknown kind of data, by which cattrs chooses the class."""
    kinds = [config().kind for config in get_args(DataConfig)]
    if isinstance(data, dict) and data.get("kind") not in kinds:
        raise MemtrainError(
            f"data.kind={data.get('kind')!r}: {did_you_mean(str(data.get('kind')), kinds)}"
        )


def structure(plain: Any, cls: type[T], where: str = "") -> T:
    """Make a dataclass from parsed JSON, without converting any value.

    Args:
        plain: the parsed JSON.
        cls: the dataclass.
        where: begins the error.

    Raises:
        MemtrainError: an unknown or missing field, a wrong type, or a value that the dataclass
            refuses.
    """
    try:
        return _converter().structure(plain, cls)
    except Exception as error:
        raise MemtrainError(f"{where}: " * bool(where) + _reason(error)) from None


@cache
def _converter() -> Any:
    import cattrs  # not needed to print help
    from cattrs.cols import list_structure_factory
    from cattrs.gen import make_dict_structure_fn, make_mapping_structure_fn

    converter = cattrs.Converter()

    def strict(make: Any, accepted: type, rule: str) -> Any:
        """A hook factory whose hooks require a type; cattrs accepts any iterable as a list."""

        def factory(cls: Any) -> Any:
            fill = make(cls, converter)
            return lambda value, kind: fill(_require(value, accepted, rule), kind)

        return factory

    def choose(value: Any, kind: Any) -> Any:
        choices = get_args(kind)
        if value not in choices:
            raise TypeError(f"={value!r}: must be one of {', '.join(map(repr, choices))}")
        return value

    def make_tuple(value: Any, kind: Any) -> tuple:
        _require(value, list | tuple, "a list")
        kinds = get_args(kind)
        kinds = kinds[:1] * len(value) if ... in kinds else kinds
        if len(value) != len(kinds):
            raise TypeError(f"={value!r}: must be {len(kinds)} values")
        return tuple(map(converter.structure, value, kinds))

    def make_scalar(kind: type, accepted: Any, rule: str) -> Any:
        return lambda value, _: kind(_require(value, accepted, rule, boolean=kind is bool))

    make_object = partial(make_dict_structure_fn, _cattrs_forbid_extra_keys=True)
    for predicate, make, accepted, rule in (
        (is_dataclass, make_object, dict, "a JSON object"),
        (lambda cls: get_origin(cls) is dict, make_mapping_structure_fn, dict, "a JSON object"),
        (lambda cls: get_origin(cls) is list, list_structure_factory, list, "a list"),
    ):
        converter.register_structure_hook_factory(predicate, strict(make, accepted, rule))
    converter.register_structure_hook_func(lambda kind: get_origin(kind) is tuple, make_tuple)
    converter.register_structure_hook_func(lambda kind: get_origin(kind) is Literal, choose)
    for kind, accepted, rule in (
        (int, int, "a whole number"),
        (float, int | float, "a number"),
        (str, str, "a string"),
        (bool, bool, "true or false"),
    ):
        converter.register_structure_hook(kind, make_scalar(kind, accepted, rule))
    number, scalar = int | float, int | float | bool | str
    rule = "a string, a number, true or false"
    converter.register_structure_hook(number, lambda value, _: _require(value, number, "a number"))
    converter.register_structure_hook(scalar, lambda value, _: _require(value, scalar, rule, None))
    return converter


def _require(value: Any, accepted: Any, rule: str, boolean: bool | None = False) -> Any:
    """Return a value of an accepted type; by default not True or False."""
    if not isinstance(value, accepted) or boolean not in (None, isinstance(value, bool)):
        raise TypeError(f"={value!r}: must be {rule}")
    return value


def _reason(error: Exception) -> str:
    """The first thing that is wrong, with the path of its field."""
    import cattrs

    for cause in _causes(error):
        if isinstance(cause, MemtrainError):
            return str(cause)
        if isinstance(cause, cattrs.errors.ForbiddenExtraKeysError):
            name, known = min(cause.extra_fields), [field.name for field in fields(cause.cl)]
            guess = get_close_matches(name, known, n=1)
            hint = f"; did you mean {guess[0]}?" if guess else f" ({', '.join(known)})"
            return f"{name}: {cause.cl.__name__} has no such field{hint}"
    errors = cattrs.transform_error(
        error,
        format_exception=lambda cause, _: "missing" if isinstance(cause, KeyError) else str(cause),
    )
    reason, path = errors[0].rsplit(" @ $", 1)
    return (path[1:] + ("" if reason.startswith("=") else ": ") + reason).lstrip("=: ")


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _causes(inner)
