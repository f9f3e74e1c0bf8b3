"""Every knob of a run.

A `RunConfig` is data + teacher + cell + up to three stages. All of it is frozen, validated when
made, and goes to JSON and back without loss. Nothing here imports torch, so that `--help` and
recipes are quick.
"""

from memtrain.config.data import (
    Arithmetic,
    Copy,
    Custom,
    DataConfig,
    Digits,
    Recall,
    Retrieval,
    Stack,
    Stream,
)
from memtrain.config.model import CELLS, CellConfig, TeacherConfig, check_used
from memtrain.config.run import EngineConfig, LogConfig, RunConfig
from memtrain.config.stages import BPTTConfig, DMTConfig, SMTConfig, StageConfig
from memtrain.config.validation import CUSTOM_PATH, MOST

__all__ = [
    "Arithmetic",
    "BPTTConfig",
    "CELLS",
    "CUSTOM_PATH",
    "CellConfig",
    "Copy",
    "Custom",
    "DMTConfig",
    "DataConfig",
    "Digits",
    "EngineConfig",
    "LogConfig",
    "MOST",
    "Recall",
    "Retrieval",
    "RunConfig",
    "SMTConfig",
    "Stack",
    "StageConfig",
    "Stream",
    "TeacherConfig",
    "check_used",
]
