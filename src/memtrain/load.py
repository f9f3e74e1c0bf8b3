"""Classes of the user's, by name."""

import importlib
import inspect
import sys
from pathlib import Path

from memtrain.errors import MemtrainError


def load_class(path: str, field: str) -> type:
    """The class that package.module:Class names; the current folder is searched too."""
    module_name, class_name = path.split(":")
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
