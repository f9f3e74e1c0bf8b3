"""SMT whose cell takes segments of steps, decoded as the teacher's memories are: sizes for a CPU.

TinyStories at size tiny, on `TINYSTORIES`, and the 8x8 digits, with the recipes' steps and rates.
"plain" is one step of the cell per memory. "segments" takes eight, decodes after each, and has
noise on the memories that they start from; the others leave one of these out, or change one.
followable_cpu.py has the options one at a time, before a shorter DMT.
"""

import os
from dataclasses import replace

from memtrain.config import RunConfig, Stream
from memtrain.recipes import recipe

SEEDS = (0, 1, 2)
SEGMENTS: dict = {"dynamics_steps": 8, "cell_decode_weight": 1.0, "memory_noise": 0.3}
OPTIONS: dict[str, dict] = {
    "plain": {},
    "noise": {"memory_noise": 0.3},
    "segments": SEGMENTS,
    "segments-no-noise": SEGMENTS | {"memory_noise": 0.0},
    "segments-noise-1": SEGMENTS | {"memory_noise": 1.0},
    "segments-no-decode": SEGMENTS | {"cell_decode_weight": 0.0},
    "segments-decode-3": SEGMENTS | {"cell_decode_weight": 3.0},
    "segments-4": SEGMENTS | {"dynamics_steps": 4},
    "segments-16": SEGMENTS | {"dynamics_steps": 16},
    "decode-1-step": SEGMENTS | {"dynamics_steps": 1},
    "segments-dynamics-1": SEGMENTS | {"dynamics_weight": 1.0},
    "segments-32": SEGMENTS | {"dynamics_steps": 32, "timesteps": 32},
}


def stories(cell: str) -> RunConfig:
    config = recipe("tinystories", "tiny", "smt-dmt", cell)
    path = os.environ.get("TINYSTORIES", "data/tinystories")
    return replace(
        config,
        data=Stream(path=path, evaluate_length=256),
        dmt=replace(config.dmt, future_length=8),
        log=replace(config.log, evaluate_every=0, evaluate_sequences=64, checkpoint_every=10**6),
    )


def digits(cell: str) -> RunConfig:
    config = recipe("digits")
    gated = {"gru": {"kind": "gru", "memory_tokens": 2, "memory_dim": 128}}
    return replace(
        config,
        cell=replace(config.cell, **gated.get(cell, {})),
        log=replace(config.log, evaluate_every=0, evaluate_sequences=270),
    )


DATA = {"stories": stories, "digits": digits}
RUNS = {
    f"{data}-{cell}-{name}-seed{seed}": replace(
        config := make(cell), seed=seed, smt=replace(config.smt, **options)
    )
    for seed in SEEDS
    for data, make in DATA.items()
    for cell in ("transformer", "gru")
    for name, options in OPTIONS.items()
}
