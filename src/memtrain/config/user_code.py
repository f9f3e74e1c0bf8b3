"""Classes of the user's: found by name, and tried without a trace in the RNG states."""

import importlib
import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memtrain.errors import MemtrainError

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
def rng_kept() -> Iterator[None]:
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


def said_by(error: Exception) -> str:
    """What the user's code raised, in one line."""
    first = str(error).strip().partition("\n")[0]
    return type(error).__name__ + (f": {first}" if first else "")
