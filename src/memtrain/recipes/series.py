"""The recipe for series of numbers, at a size for a CPU."""

from dataclasses import replace

from memtrain.config import DMTConfig, LogConfig, RunConfig, Series, SMTConfig, model_shapes
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.recipes.datasets import by_bptt
from memtrain.recipes.sizes import RECURRENT_CELLS, cell_like

SERIES_METHODS = ("smt-dmt", "bptt")


def series(method: str = "smt-dmt", cell: str = "transformer") -> RunConfig:
    """Numbers over time, to forecast (--data FILE.csv, .parquet or .npy)."""
    if method not in SERIES_METHODS:
        raise MemtrainError(f"method={method!r}: {did_you_mean(method, SERIES_METHODS)}")
    shapes = model_shapes(
        encoder="causal",
        context_length=64,
        width=64,
        layers=(2, 1, 1),
        heads=4,
        head_dim=16,
        memory_tokens=2,
    )
    gated = cell in RECURRENT_CELLS  # their states cannot reach RMS 1
    teacher = replace(shapes["teacher"], normalize_memory=not gated)
    config = RunConfig(
        name="series",
        data=Series(),
        teacher=teacher,
        cell=cell_like(shapes["cell"], cell),
        smt=SMTConfig(
            steps=1000,
            batch_size=32,
            learning_rate=2e-3,
            schedule="cosine",
            timesteps=16,
            decode_timesteps=8,
            future_length=24,
            next_weight=1.0,
        ),
        dmt=DMTConfig(
            steps=300,
            batch_size=32,
            learning_rate=1e-3,
            label_stride=4,
            segment=8,
            dynamics_weight=1.0,
            decode_weight=1.0,
            future_length=24,
        ),
        log=LogConfig(evaluate_every=250, evaluate_sequences=64),
    )
    return by_bptt(config) if method == "bptt" else config
