"""Every option of a run.

A `RunConfig` is data + teacher + cell + up to four stages. All of it is frozen, validated on
construction, and converts to JSON and back without loss. Nothing here imports torch, so that
`--help` and recipes are fast.
"""

import warnings
from dataclasses import fields
from math import inf
from typing import Annotated, get_args, get_origin

from memtrain.config.data import (
    S5,
    Arithmetic,
    Copy,
    Custom,
    DataConfig,
    Digits,
    LabelFile,
    ModularArithmetic,
    Parity,
    Recall,
    Retrieval,
    Series,
    Stack,
    Stream,
    columns_of,
)
from memtrain.config.model import (
    CELLS,
    TORCH_CELLS,
    CellConfig,
    TeacherConfig,
    check_used,
    model_shapes,
)
from memtrain.config.run import EngineConfig, LogConfig, RunConfig
from memtrain.config.stages import BPTTConfig, DMTConfig, PretrainConfig, SMTConfig, StageConfig
from memtrain.config.validation import CUSTOM_PATH

__all__ = [
    "BPTTConfig", "CELLS", "CUSTOM_PATH", "CellConfig", "DMTConfig", "DataConfig", "EngineConfig",
    "LogConfig", "PretrainConfig", "RunConfig", "SMTConfig", "StageConfig", "TORCH_CELLS",
    "TeacherConfig", "check_used", "columns_of", "model_shapes", "Arithmetic", "Copy", "Custom",
    "Digits", "LabelFile", "ModularArithmetic", "Parity", "Recall", "Retrieval", "S5", "Series",
    "Stack", "Stream",
]  # fmt: skip


def __getattr__(name: str) -> dict[str, int | float]:
    if name != "MOST":
        raise AttributeError(f"module 'memtrain.config' has no attribute {name!r}")
    warnings.warn("memtrain.config.MOST: bounds are now declared per field", DeprecationWarning, 2)
    kinds = (*get_args(DataConfig), TeacherConfig, CellConfig, EngineConfig, LogConfig)
    every = [f for kind in (*kinds, SMTConfig, DMTConfig, BPTTConfig) for f in fields(kind)]
    bounds = {f.name: get_args(f.type)[1] for f in every if get_origin(f.type) is Annotated}
    return {name: bound.maximum for name, bound in bounds.items() if 1 < bound.maximum < inf}
