"""memtrain: train recurrent networks without unrolling them.

The public names. They are imported when first used, so that `import memtrain` costs nothing.

Threads of torch's OpenMP library (libgomp) that wait for one another spin for milliseconds before
they sleep. Where other programs use the cores too, they take the time of the very thread that they
wait for. Unless torch is imported already or GOMP_SPINCOUNT or OMP_WAIT_POLICY is set, importing
memtrain makes that microseconds: SPINS below. scripts/busy.py measures it.
"""

import os
import sys
import warnings
from collections.abc import Container, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

SPINS = 1000
"""Times that a waiting thread looks again before it sleeps; libgomp's own default is 300,000.
Not 0: on an idle machine that takes a third longer."""


def _spin_briefly(environment: MutableMapping[str, str], imported: Container[str]) -> None:
    """Set SPINS for this process and those it starts; libgomp reads it when torch is imported."""
    chosen = "GOMP_SPINCOUNT" in environment or "OMP_WAIT_POLICY" in environment
    if "torch" not in imported and not chosen:
        environment["GOMP_SPINCOUNT"] = str(SPINS)


_spin_briefly(os.environ, sys.modules)

if TYPE_CHECKING:
    from memtrain.config import (
        BPTTConfig,
        CellConfig,
        DMTConfig,
        EngineConfig,
        LogConfig,
        RunConfig,
        SMTConfig,
        Stream,
        TeacherConfig,
    )
    from memtrain.config.serialize import from_json, to_json
    from memtrain.data.task import Task, check_task
    from memtrain.errors import CellContractError, MemtrainError
    from memtrain.evaluation.evaluate import Evaluation, evaluate
    from memtrain.generation.generate import Samples, generate
    from memtrain.generation.pretrained import (
        Pretrained,
        export,
        load_pretrained,
        load_rnn,
        pretrained_names,
    )
    from memtrain.generation.sampling import sample
    from memtrain.models.cells import Cell
    from memtrain.models.check_cell import check_cell
    from memtrain.models.rnn import RNN
    from memtrain.models.teacher import Teacher
    from memtrain.recipes import RECIPES, recipe
    from memtrain.shapes import IGNORE_INDEX, Batch, Losses
    from memtrain.training.console import Reporter, make_reporter
    from memtrain.training.run import Run

_HOME = {
    "BPTTConfig": "config",
    "CellConfig": "config",
    "DMTConfig": "config",
    "EngineConfig": "config",
    "LogConfig": "config",
    "RunConfig": "config",
    "SMTConfig": "config",
    "Stream": "config",
    "TeacherConfig": "config",
    "from_json": "config.serialize",
    "to_json": "config.serialize",
    "Task": "data.task",
    "check_task": "data.task",
    "CellContractError": "errors",
    "MemtrainError": "errors",
    "Evaluation": "evaluation.evaluate",
    "evaluate": "evaluation.evaluate",
    "sample": "generation.sampling",
    "Samples": "generation.generate",
    "generate": "generation.generate",
    "Cell": "models.cells",
    "check_cell": "models.check_cell",
    "RNN": "models.rnn",
    "Teacher": "models.teacher",
    "Pretrained": "generation.pretrained",
    "export": "generation.pretrained",
    "load_pretrained": "generation.pretrained",
    "load_rnn": "generation.pretrained",
    "pretrained_names": "generation.pretrained",
    "RECIPES": "recipes",
    "recipe": "recipes",
    "Run": "training.run",
    "IGNORE_INDEX": "shapes",
    "Batch": "shapes",
    "Losses": "shapes",
    "Reporter": "training.console",
    "make_reporter": "training.console",
}

__all__ = [
    "BPTTConfig",
    "Batch",
    "Cell",
    "CellConfig",
    "CellContractError",
    "DMTConfig",
    "EngineConfig",
    "Evaluation",
    "IGNORE_INDEX",
    "LogConfig",
    "Losses",
    "MemtrainError",
    "Pretrained",
    "RECIPES",
    "RNN",
    "Reporter",
    "Run",
    "RunConfig",
    "SMTConfig",
    "Stream",
    "Task",
    "Teacher",
    "TeacherConfig",
    "Samples",
    "__version__",
    "check_cell",
    "check_task",
    "evaluate",
    "export",
    "from_json",
    "generate",
    "load_pretrained",
    "load_rnn",
    "make_reporter",
    "pretrained_names",
    "recipe",
    "sample",
    "to_json",
]


_RENAMED = {"Written": "Samples", "read": "RNN.read", "write": "sample"}
"""Old public names, which still work and warn."""


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"memtrain.{name} is now memtrain.{new}", DeprecationWarning, stacklevel=2)
        name = new
    name, _, method = name.partition(".")
    if name not in _HOME:
        raise AttributeError(f"module 'memtrain' has no attribute {name!r}")
    value = getattr(import_module(f"memtrain.{_HOME[name]}"), name)
    return getattr(value, method) if method else value


def __dir__() -> list[str]:
    return __all__
