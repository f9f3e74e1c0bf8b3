"""memtrain: train recurrent networks without unrolling them.

Public names are imported on first use, so that `import memtrain` is fast.

Waiting threads of torch's OpenMP library (libgomp) spin for milliseconds before they sleep. When
other programs use the cores, this slows down the thread that they wait for. Unless torch is already
imported, or GOMP_SPINCOUNT or OMP_WAIT_POLICY is set, importing memtrain reduces it to microseconds
(SPINS below; measured by scripts/busy.py).
"""

# ruff: noqa: F401 (the imports are for type checkers)
import os
import sys
import warnings
from collections.abc import Container, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

SPINS = 1000
"""Spins of a waiting thread before it sleeps; libgomp's default is 300,000. With 0, steps on an
idle machine take a third longer."""


def _spin_briefly(environment: MutableMapping[str, str], imported: Container[str]) -> None:
    """Set SPINS for this process and its children; libgomp reads it when torch is imported."""
    chosen = "GOMP_SPINCOUNT" in environment or "OMP_WAIT_POLICY" in environment
    if "torch" not in imported and not chosen:
        environment["GOMP_SPINCOUNT"] = str(SPINS)


_spin_briefly(os.environ, sys.modules)

if TYPE_CHECKING:
    from memtrain import losses
    from memtrain.config import (
        BPTTConfig,
        CellConfig,
        DMTConfig,
        EngineConfig,
        LogConfig,
        PretrainConfig,
        RunConfig,
        Series,
        SMTConfig,
        Stream,
        TeacherConfig,
    )
    from memtrain.config.serialize import from_json, to_json
    from memtrain.data.labels import Labels
    from memtrain.data.series_format import SeriesFormat
    from memtrain.data.task import Task, check_task
    from memtrain.errors import CellContractError, EndStage, MemtrainError
    from memtrain.evaluation.evaluate import Evaluation, evaluate
    from memtrain.generation.forecast import Forecast, forecast
    from memtrain.generation.generate import Samples, generate
    from memtrain.generation.memory import Memory
    from memtrain.generation.pretrained import (
        Pretrained,
        export,
        load_pretrained,
        load_rnn,
        pretrained_names,
    )
    from memtrain.generation.remember import remember
    from memtrain.generation.sampling import sample
    from memtrain.models.cells import Cell, make_cell
    from memtrain.models.check_cell import check_cell
    from memtrain.models.rnn import RNN
    from memtrain.models.teacher import Decoder, Teacher
    from memtrain.models.wrap import wrap
    from memtrain.objectives.bptt import BPTT
    from memtrain.objectives.dmt import DMT
    from memtrain.objectives.smt import SMT
    from memtrain.plotting.comparison import Comparison, compare
    from memtrain.recipes import RECIPES, recipe
    from memtrain.runs.listing import runs_frame as runs
    from memtrain.shapes import IGNORE_INDEX, Batch, Losses, Values
    from memtrain.training.callbacks import Callback, Metrics
    from memtrain.training.console import Reporter, make_reporter
    from memtrain.training.run import Run
    from memtrain.training.trackers import TensorBoard, Trackio, WandB

_PUBLIC = {
    "config": "BPTTConfig CellConfig DMTConfig EngineConfig LogConfig PretrainConfig RunConfig "
    "SMTConfig Series Stream TeacherConfig",
    "config.serialize": "from_json to_json",
    "data.labels": "Labels",
    "data.series_format": "SeriesFormat",
    "data.task": "Task check_task",
    "errors": "CellContractError EndStage MemtrainError",
    "evaluation.evaluate": "Evaluation evaluate",
    "generation.forecast": "Forecast forecast",
    "generation.generate": "Samples generate",
    "generation.memory": "Memory",
    "generation.pretrained": "Pretrained export load_pretrained load_rnn pretrained_names",
    "generation.remember": "remember",
    "generation.sampling": "sample",
    "models.cells": "Cell make_cell",
    "models.check_cell": "check_cell",
    "models.rnn": "RNN",
    "models.teacher": "Decoder Teacher",
    "models.wrap": "wrap",
    "objectives.bptt": "BPTT",
    "objectives.dmt": "DMT",
    "objectives.smt": "SMT",
    "plotting.comparison": "Comparison compare",
    "recipes": "RECIPES recipe",
    "shapes": "Batch IGNORE_INDEX Losses Values",
    "training.callbacks": "Callback Metrics",
    "training.console": "Reporter make_reporter",
    "training.run": "Run",
    "training.trackers": "TensorBoard Trackio WandB",
}
"""Public names by module. Type checkers read the imports above."""
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}
_MODULES = ("losses", "runs")
"""Public modules; runs can also be called."""
__all__ = ["__version__", *_MODULES, *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

_RENAMED = {"Written": "Samples", "read": "RNN.read", "write": "sample"}
"""Old public names, which still work and warn."""


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"memtrain.{name} is now memtrain.{new}", DeprecationWarning, stacklevel=2)
        name = new
    if name in _MODULES:
        return import_module(f"memtrain.{name}")
    name, _, method = name.partition(".")
    if name not in _HOME:
        raise AttributeError(f"module 'memtrain' has no attribute {name!r}")
    value = getattr(import_module(f"memtrain.{_HOME[name]}"), name)
    return getattr(value, method) if method else value


def __dir__() -> list[str]:
    return __all__
