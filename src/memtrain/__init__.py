"""memtrain: train recurrent networks without unrolling them.

The public names. They are imported when first used, so that `import memtrain` costs nothing.

Threads of torch's OpenMP library (libgomp) that wait for one another spin for milliseconds before
they sleep. Where other programs use the cores too, they take the time of the very thread that they
wait for. Unless torch is imported already or GOMP_SPINCOUNT or OMP_WAIT_POLICY is set, importing
memtrain makes that microseconds: SPINS below. scripts/busy.py measures it.
"""

import os
import sys
from collections.abc import Container, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

from memtrain.version import VERSION as __version__

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
    from memtrain.config_json import from_json, to_json
    from memtrain.data.task import Task, check_task
    from memtrain.errors import CellContractError, MemtrainError
    from memtrain.eval.evaluate import Evaluation, evaluate
    from memtrain.eval.rollout import read, write
    from memtrain.nn.cells import Cell
    from memtrain.nn.contract import check_cell
    from memtrain.nn.rnn import RNN
    from memtrain.nn.teacher import Teacher
    from memtrain.pretrained import Pretrained, export, load_pretrained, load_rnn, pretrained_names
    from memtrain.recipes import RECIPES, recipe
    from memtrain.run import Run
    from memtrain.shapes import IGNORE_INDEX, Batch, Losses
    from memtrain.train.console import make_reporter
    from memtrain.train.reporter import Reporter
    from memtrain.writer import Written, generate

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
    "from_json": "config_json",
    "to_json": "config_json",
    "Task": "data.task",
    "check_task": "data.task",
    "CellContractError": "errors",
    "MemtrainError": "errors",
    "Evaluation": "eval.evaluate",
    "evaluate": "eval.evaluate",
    "read": "eval.rollout",
    "write": "eval.rollout",
    "Written": "writer",
    "generate": "writer",
    "Cell": "nn.cells",
    "check_cell": "nn.contract",
    "RNN": "nn.rnn",
    "Teacher": "nn.teacher",
    "Pretrained": "pretrained",
    "export": "pretrained",
    "load_pretrained": "pretrained",
    "load_rnn": "pretrained",
    "pretrained_names": "pretrained",
    "RECIPES": "recipes",
    "recipe": "recipes",
    "Run": "run",
    "IGNORE_INDEX": "shapes",
    "Batch": "shapes",
    "Losses": "shapes",
    "Reporter": "train.reporter",
    "make_reporter": "train.console",
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
    "Written",
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
    "read",
    "recipe",
    "to_json",
    "write",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'memtrain' has no attribute {name!r}")
    return getattr(import_module(f"memtrain.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
