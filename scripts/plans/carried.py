"""DMT without rollouts at the paper's size: TinyStories and enwik8, the causal encoder.

SMT is trained once for each data set; each DMT starts from its weights (`initial`), so train the
runs named "-smt" first. Steps are those that fit in `SMT_SECONDS` and `DMT_SECONDS` at what a step
takes alone on an H200, so that a run may share the card with others; "-half" has half of the
seconds. `TINYSTORIES` and `ENWIK8` name the prepared data.
"""

import os
from dataclasses import replace
from pathlib import Path

from memtrain.config import DMTConfig, LogConfig, RunConfig, SMTConfig, Stream
from memtrain.recipes import recipe

SMT_SECONDS, DMT_SECONDS = 135.0, 160.0
MILLISECONDS = {"smt": 17.3, "unrolled": 116.9, "carried": 38.7}
DATA = {
    "tinystories": os.environ.get("TINYSTORIES", "data/tinystories"),
    "enwik8": os.environ.get("ENWIK8", "data/enwik8"),
}
FOLDER = Path(os.environ.get("FOLDER", "runs/carried"))


def steps(kind: str, seconds: float) -> int:
    return round(1000 * seconds / MILLISECONDS[kind])


def smt(data: str) -> RunConfig:
    """The causal encoder of docs/LOG.md (2026-11-16), which learns at every token."""
    config = recipe(data)
    return replace(
        config,
        name=f"{data}-causal",
        data=Stream(path=DATA[data], evaluate_length=1024),
        teacher=replace(config.teacher, encoder="causal", padding="mask"),
        smt=replace(
            config.smt,
            steps=steps("smt", SMT_SECONDS),
            batch_size=64,
            learning_rate=1e-3,
            timesteps=8,
            decode_timesteps=4,
            next_weight=0.05,
            token_weight=1.0,
        ),
        dmt=DMTConfig(),
        engine=replace(config.engine, compile=False),
        log=LogConfig(every=50, evaluate_every=2500, evaluate_sequences=32, checkpoint_every=1000),
    )


def dmt(data: str, stage: DMTConfig) -> RunConfig:
    return replace(smt(data), initial=str(FOLDER / f"{data}-smt"), smt=SMTConfig(), dmt=stage)


UNROLLED = replace(recipe("tinystories").dmt, steps=steps("unrolled", DMT_SECONDS))


def carried(rate: float, **changes) -> DMTConfig:
    """16 steps of 128 rows per training step, two labels each."""
    settings = {
        "steps": steps("carried", DMT_SECONDS),
        "batch_size": 128,
        "learning_rate": rate,
        "rollout": "carried",
        "rollout_length": 512,
        "segment": 16,
        "label_stride": 8,
        "readout_stride": 1,
        "dynamics_weight": 0.1,
        "decode_weight": 1.0,
        "future_length": 16,
    }
    return DMTConfig(**(settings | changes))


HALF = steps("carried", DMT_SECONDS / 2)
KINDS = {
    "carried-3e-4": carried(3e-4),
    "carried-3e-4-half": carried(3e-4, steps=HALF),
    "carried-1e-3-half": carried(1e-3, steps=HALF),
    "unrolled": UNROLLED,
}
RUNS = {f"{data}-smt": smt(data) for data in DATA}
RUNS |= {f"{data}-{name}": dmt(data, stage) for data in DATA for name, stage in KINDS.items()}
