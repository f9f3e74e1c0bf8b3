"""Checks of config fields, and the import of classes that a config names.

Errors have one form: field, value, rule, remedy.
"""

import importlib
import inspect
import math
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from memtrain.errors import MemtrainError, did_you_mean

CUSTOM_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A user's class, as package.module:Class."""
MOST_NAMES = 12
"""Classes of a module that an error lists."""
MOVED = {"memtrain.experiments.memory_maps": "memtrain.paper.figures.memory_maps"}
"""Modules of memtrain that configs of earlier versions name, and where they are now."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a field, declared with its type: `width: Annotated[int, Bounds(1, 2**16)]`.

    Upper bounds lie far beyond any use: a config that exceeds them is damaged or hostile.
    """

    minimum: int | float = -math.inf
    maximum: int | float = math.inf
    hint: str = ""
    """Why there is a minimum, or what is usual."""
    even: str = ""
    """Why the value must be even, if it must."""

    def check(self, name: str, value: Any) -> None:
        """Refuse a value outside the range; nan is outside."""
        if (self.minimum, self.maximum) == (0, 1) and not 0 <= value <= 1:
            raise MemtrainError(f"{name}={value}: must be between 0 and 1")
        if not value >= self.minimum:
            hint = self.hint and f"; {self.hint}"
            raise MemtrainError(f"{name}={value}: must be at least {self.minimum}{hint}")
        if value > self.maximum:
            shown = value if value < 10**15 else "a number of that length"
            raise MemtrainError(f"{name}={shown}: must be at most {self.maximum:,}")
        if self.even and value % 2:
            raise MemtrainError(f"{name}={value}: must be even ({self.even})")


Fraction = Annotated[float, Bounds(0, 1)]
Weight = Annotated[float, Bounds(0)]
Width = Annotated[int, Bounds(1, 2**16)]
Length = Annotated[int, Bounds(1, 2**24)]
Options = dict[str, int | float | bool | str]
"""Keyword arguments of a user's class."""


class Checked:
    """Base of configs: every field is checked on construction, then the rules between fields."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_bounds(self)
        self.check()

    def check(self) -> None:
        """Rules that one field alone cannot break."""


def check_bounds(config: object) -> None:
    """Check that every field of a config has its type and lies within its bounds."""
    for one in fields(config):  # type: ignore[arg-type]
        kind, value = one.type, getattr(config, one.name)
        bounds = None
        if get_origin(kind) is Annotated:
            kind, bounds = get_args(kind)
        if rule := _broken_rule(kind, value):
            raise MemtrainError(f"{one.name}={value!r}: must be {rule}")
        if bounds is not None:
            bounds.check(one.name, value)


Config = TypeVar("Config", bound=Checked)


def config_from(kind: type[Config], config: Config | None, settings: dict[str, Any]) -> Config:
    """A config from keyword arguments, or one with some fields replaced.

    Raises:
        MemtrainError: `config` is something else, or there is no such field.
    """
    if config is not None and not isinstance(config, kind):
        raise MemtrainError(
            f"config={type(config).__name__}: must be a {kind.__name__}; or leave it out and give "
            "its fields by name"
        )
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    for name, value in settings.items():
        if name not in names:
            guess = did_you_mean(name, names).partition(" (")[0]  # without the list of all
            raise MemtrainError(f"{name}={value!r}: {kind.__name__} has no such field; {guess}")
    return replace(config or kind(), **settings)  # type: ignore[type-var]


def _broken_rule(kind: Any, value: Any) -> str:
    """What a value of this type must be, if it is not; dataclasses do not check types."""
    if kind is int:
        return "" if type(value) is int else "a whole number"
    if kind is float:
        return "" if _is_number(value) else "a number"
    if kind is bool:
        return "" if isinstance(value, bool) else "True or False"
    if kind is str:
        return "" if isinstance(value, str) else "a string"
    if get_origin(kind) is Literal:
        names = get_args(kind)
        return "" if value in names else f"one of {', '.join(map(repr, names))}"
    if get_origin(kind) is tuple and ... in get_args(kind):  # of pairs
        pairs = isinstance(value, tuple) and all(
            isinstance(pair, tuple) and [type(one) for one in pair] == [int, int] for pair in value
        )
        return "" if pairs else "a tuple of pairs of whole numbers, as ((32, 1000), (64, 500))"
    if get_origin(kind) is tuple:
        right = isinstance(value, (tuple, list)) and len(value) == len(get_args(kind))
        return "" if right and all(map(_is_number, value)) else f"{len(get_args(kind))} numbers"
    if get_origin(kind) is dict:
        right = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        right = right and all(isinstance(inner, (str, int, float)) for inner in value.values())
        return "" if right else "a dict from names to numbers, strings or booleans"
    kinds = get_args(kind) or (kind,)  # a nested config, or one of several
    return "" if isinstance(value, kinds) else f"a {' or '.join(k.__name__ for k in kinds)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_device(name: str) -> None:
    """Refuse a device that torch cannot know."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise MemtrainError(f"device={name!r}: must be auto, cpu, mps, cuda or cuda:N")


def load_class(path: str, field: str) -> type:
    """Import package.module:Class, also from the current folder.

    Args:
        path: the class.
        field: the config field that names it, for errors.
    """
    module_name, class_name = path.split(":")
    module_name = MOVED.get(module_name, module_name)
    if module_name == "__main__":
        raise MemtrainError(
            f"{field}={path}: the class is defined in a script; move it into a module, or open the "
            "run in that script, Run.open(folder, cell=..., task=...)"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MemtrainError(f"{field}={path}: {error}; {here} was searched too") from None
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        if len(classes) > MOST_NAMES:
            classes = get_close_matches(class_name, classes, MOST_NAMES) or classes[:MOST_NAMES]
        raise MemtrainError(f"{field}={path}: it has no class {class_name}, but {classes}")
    return found


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global RNG states of Python, numpy and torch at the end, for user code."""
    import numpy as np
    import torch

    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
