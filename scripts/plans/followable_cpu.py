"""Memories that a cell can follow: options of SMT before a short DMT, at sizes for a CPU.

8x8 digits at the recipe's size, strings to copy backwards, and TinyStories at size tiny, on
`TINYSTORIES`. DMT is as short as the paper's is beside its SMT, so that what SMT leaves to do
counts. followable.py has a larger size for a GPU, with a long DMT.
"""

import os
from dataclasses import replace

from memtrain.config import Copy, RunConfig, Stream
from memtrain.recipes import recipe

SEEDS = (0, 1)
OPTIONS: dict[str, dict] = {
    "plain": {},
    "noise-0.1": {"memory_noise": 0.1},
    "noise-0.3": {"memory_noise": 0.3},
    "noise-1": {"memory_noise": 1.0},
    "steps-4": {"dynamics_steps": 4},
    "steps-4-noise-0.3": {"dynamics_steps": 4, "memory_noise": 0.3},
    "cell-decode": {"cell_decode_weight": 1.0},
    "cell-decode-steps-4": {"cell_decode_weight": 1.0, "dynamics_steps": 4},
    "cell-decode-noise-0.3": {"cell_decode_weight": 1.0, "memory_noise": 0.3},
    "normalized": {"normalize_dynamics": True},
}


def digits() -> RunConfig:
    config = recipe("digits")
    return replace(
        config,
        smt=replace(config.smt, steps=1_500),
        dmt=replace(config.dmt, steps=150),
        log=replace(config.log, evaluate_every=0, evaluate_sequences=270),
    )


def copy() -> RunConfig:
    """Strings of eight symbols, read and then written backwards."""
    config = digits()
    smt = replace(config.smt, steps=2_000, timesteps=8, decode_timesteps=4, future_length=8)
    return replace(
        config,
        name="copy",
        data=Copy(sequence_length=16),
        teacher=replace(config.teacher, context_length=16),
        smt=smt,
        dmt=replace(config.dmt, label_stride=1, segment=1, steps=150),
    )


def stories() -> RunConfig:
    config = recipe("tinystories", "tiny")
    path = os.environ.get("TINYSTORIES", "data/tinystories")
    return replace(
        config,
        data=Stream(path=path, evaluate_length=256),
        smt=replace(config.smt, steps=2_000, learning_rate=2e-3),
        dmt=replace(config.dmt, steps=100, learning_rate=1e-3, future_length=32),
        log=replace(config.log, evaluate_every=0, evaluate_sequences=64),
    )


DATA = {"stories": stories, "digits": digits, "copy": copy}
RUNS = {
    f"{data}-{name}-seed{seed}": replace(
        config := make(), seed=seed, smt=replace(config.smt, **options)
    )
    for seed in SEEDS
    for data, make in DATA.items()
    for name, options in OPTIONS.items()
}
