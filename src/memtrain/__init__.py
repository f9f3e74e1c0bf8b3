"""memtrain: train recurrent networks without unrolling them.

The public names. They are imported when first used, so that `import memtrain` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from memtrain.version import VERSION as __version__

if TYPE_CHECKING:
    from memtrain.config import (
        BPTTConfig,
        CellConfig,
        DMTConfig,
        RunConfig,
        SMTConfig,
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
    from memtrain.pretrained import load_pretrained
    from memtrain.recipes import RECIPES, recipe
    from memtrain.run import Run
    from memtrain.shapes import IGNORE_INDEX, Batch, Losses
    from memtrain.writer import generate

_HOME = {
    "BPTTConfig": "config",
    "CellConfig": "config",
    "DMTConfig": "config",
    "RunConfig": "config",
    "SMTConfig": "config",
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
    "generate": "writer",
    "Cell": "nn.cells",
    "check_cell": "nn.contract",
    "RNN": "nn.rnn",
    "Teacher": "nn.teacher",
    "load_pretrained": "pretrained",
    "RECIPES": "recipes",
    "recipe": "recipes",
    "Run": "run",
    "IGNORE_INDEX": "shapes",
    "Batch": "shapes",
    "Losses": "shapes",
}

__all__ = [
    "BPTTConfig",
    "Batch",
    "Cell",
    "CellConfig",
    "CellContractError",
    "DMTConfig",
    "Evaluation",
    "IGNORE_INDEX",
    "Losses",
    "MemtrainError",
    "RECIPES",
    "RNN",
    "Run",
    "RunConfig",
    "SMTConfig",
    "Task",
    "Teacher",
    "TeacherConfig",
    "__version__",
    "check_cell",
    "check_task",
    "evaluate",
    "from_json",
    "generate",
    "load_pretrained",
    "read",
    "recipe",
    "to_json",
    "write",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'memtrain' has no attribute {name!r}")
    return getattr(import_module(f"memtrain.{_HOME[name]}"), name)
