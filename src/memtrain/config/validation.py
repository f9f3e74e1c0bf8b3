"""The rules that fields of a config obey, and how a breach is said: field, value, rule, remedy."""

import importlib
import inspect
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from memtrain.errors import MemtrainError

CUSTOM_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A class of the user's, as package.module:Class."""


def at_least(config: object, minimum: int | float, *names: str, hint: str = "") -> None:
    """These fields are no smaller; `hint` says why, or what is usual."""
    for name in names:
        value = getattr(config, name)
        if not value >= minimum:  # nan is not either
            raise MemtrainError(f"{name}={value}: must be at least {minimum}{hint and '; ' + hint}")


def check_fraction(config: object, *names: str) -> None:
    """These fields are shares of a whole."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise MemtrainError(f"{name}={value}: must be between 0 and 1")


def at_most(config: object, name: str, limit: int, why: str) -> None:
    """This field is no larger than others allow."""
    if getattr(config, name) > limit:
        raise MemtrainError(f"{name}={getattr(config, name)}: must be at most {limit}, {why}")


def check_device(name: str) -> None:
    """A device by a name that torch knows, or auto."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise MemtrainError(f"device={name!r}: must be auto, cpu, mps, cuda or cuda:N")


MOST = {
    "sequence_length": 2**24,
    "vocab_size": 2**20,
    "depth": 2**20,
    "pairs": 2**20,
    "key_length": 4096,
    "value_length": 2**20,
    "key_symbols": 2**16,
    "value_symbols": 2**16,
    "examples": 2**20,
    "evaluate_length": 2**24,
    "context_length": 2**20,
    "future_length": 2**20,
    "encoder_layers": 256,
    "decoder_layers": 256,
    "layers": 256,
    "width": 2**16,
    "memory_tokens": 2**16,
    "memory_dim": 2**16,
    "heads": 1024,
    "head_dim": 2**14,
    "batch_size": 2**20,
    "steps": 10**12,
    "seconds": 10**9,
    "threads": 4096,
    "keep": 10**6,
    "evaluate_sequences": 2**24,
}
"""Far beyond any use: a config that says more is damaged or hostile."""


def check_bounds(config: object) -> None:
    """Every field has its type, and every size is below its limit."""
    for one in fields(config):  # type: ignore[arg-type]
        value, limit = getattr(config, one.name), MOST.get(one.name)
        if rule := _broken_rule(one.type, value):
            raise MemtrainError(f"{one.name}={value!r}: must be {rule}")
        if limit is not None and value > limit:
            shown = value if value < 10**15 else "a number of that length"
            raise MemtrainError(f"{one.name}={shown}: must be at most {limit:,}")


def _broken_rule(kind: Any, value: Any) -> str:
    """What a value of this type must be, if it is not; Python itself does not look."""
    if kind is int:
        return "" if type(value) is int else "a whole number"
    if kind is float:
        return "" if _is_number(value) else "a number"
    if kind is bool:
        return "" if isinstance(value, bool) else "True or False"
    if kind is str:
        return "" if isinstance(value, str) else "a text"
    if get_origin(kind) is Literal:
        names = get_args(kind)
        return "" if value in names else f"one of {', '.join(map(repr, names))}"
    if get_origin(kind) is tuple:
        right = isinstance(value, (tuple, list)) and len(value) == len(get_args(kind))
        return "" if right and all(map(_is_number, value)) else f"{len(get_args(kind))} numbers"
    if get_origin(kind) is dict:
        right = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        right = right and all(isinstance(inner, (str, int, float)) for inner in value.values())
        return "" if right else "a dict from names to numbers, texts or truth values"
    kinds = get_args(kind) or (kind,)  # a config in a config, or one of several
    return "" if isinstance(value, kinds) else f"a {' or '.join(k.__name__ for k in kinds)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


MOVED = {"memtrain.experiments.memory_maps": "memtrain.paper.figures.memory_maps"}
"""Modules of ours that configs of earlier versions name, and where they are now."""


def load_class(path: str, field: str) -> type:
    """The class that package.module:Class names; the current folder is searched too."""
    module_name, class_name = path.split(":")
    module_name = MOVED.get(module_name, module_name)
    if module_name == "__main__":
        raise MemtrainError(
            f"{field}={path}: the class is one of a script; put it into a module of its own, or "
            "open the run in that script, Run.open(folder, cell=..., task=...)"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MemtrainError(f"{field}={path}: {error}; looked in {here} too") from None
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise MemtrainError(f"{field}={path}: no class {class_name} there, but {classes}")
    return found


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Give the global RNGs of Python, numpy and torch back in the state that they had."""
    import numpy as np
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
