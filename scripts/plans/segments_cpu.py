"""SMT in segments, the RNN after SMT alone, beside BPTT; sizes for a CPU.

TinyStories at size tiny, on `TINYSTORIES`; the 8x8 digits; and MNIST in 2x2 patches of four greys,
on `MNIST` (see the recipe mnist_small). The cell takes 16 steps from where it ended the segment
before and is decoded after each; the teacher encodes the ends of segments only. BPTT has the same
cell and readout, as many steps of as many sequences of the same length, and several rates; it is
also cut into pieces, trained one after another or at once. "plain" is SMT as the recipe has it;
other names change one option. segments.py is for a GPU.

    python scripts/many_runs.py scripts/plans/segments_cpu.py --folder runs/segments --only RUN ...
"""

import os
from dataclasses import replace

from memtrain.config import BPTTConfig, DMTConfig, LogConfig, RunConfig, SMTConfig, Stream
from memtrain.recipes import recipe
from memtrain.recipes.datasets import PATCHES

CELLS = ("transformer", "gru", "lstm")
LOG = LogConfig(every=50, evaluate_every=0, evaluate_sequences=64, checkpoint_every=10**6)
SEGMENTS: dict = {
    "timesteps": 0,
    "decode_timesteps": 0,
    "future_length": 1,
    "next_weight": 0.0,
    "dynamics_steps": 16,
    "dynamics_labels": "last",
    "own_starts": 1.0,
    "cell_decode_weight": 10.0,
    "memory_noise": 0.3,
    "learning_rate": 1e-2,
}
OPTIONS: dict[str, dict] = {
    "segments": {},
    "rate-3e-3": {"learning_rate": 3e-3},
    "rate-6e-3": {"learning_rate": 6e-3},
    "rate-2e-2": {"learning_rate": 2e-2},
    "muon": {"optimizer": "muon"},
    "8-steps": {"dynamics_steps": 8},
    "32-steps": {"dynamics_steps": 32},
    "teacher-starts": {"own_starts": 0.0},
    "half-own-starts": {"own_starts": 0.5},
    "decode-1": {"cell_decode_weight": 1.0},
    "decode-3": {"cell_decode_weight": 3.0},
    "all-labels": {"dynamics_labels": "all"},
    "no-noise": {"memory_noise": 0.0},
    "noise-1": {"memory_noise": 1.0},
    "no-dynamics": {"dynamics_weight": 0.0},
    "no-token-loss": {"token_weight": 0.0},
    "detached": {"joint": False},
    "future-4": {"future_length": 4},
}
PIECES: dict[str, dict] = {
    "truncate-16": {"truncate": 16},
    "pieces-8": {"truncate": 8, "sweeps": 1},
    "pieces-16": {"truncate": 16, "sweeps": 1},
    "pieces-16-sweeps-3": {"truncate": 16, "sweeps": 3},
    "pieces-32": {"truncate": 32, "sweeps": 1},
    "pieces-32-sweeps-2": {"truncate": 32, "sweeps": 2},
    "pieces-64": {"truncate": 64, "sweeps": 1},
}
"""BPTT that is cut into pieces."""
GATED = {
    "gru": {"kind": "gru", "layers": 2, "memory_tokens": 2},
    "lstm": {"kind": "lstm", "layers": 1, "memory_tokens": 2},
}


def stories(cell: str) -> RunConfig:
    config = recipe("tinystories", "tiny", "smt-dmt", cell)
    path = os.environ.get("TINYSTORIES", "data/tinystories")
    data = Stream(path=path, evaluate_length=256)
    return replace(config, data=data, teacher=replace(config.teacher, context_length=159), log=LOG)


def digits(cell: str) -> RunConfig:
    config = recipe("digits")
    if cell in GATED:
        config = replace(
            config,
            teacher=replace(config.teacher, normalize_memory=False),
            cell=replace(config.cell, memory_dim=128, **GATED[cell]),
        )
    return replace(config, log=replace(LOG, evaluate_sequences=270))


def mnist(cell: str) -> RunConfig:
    """The digits' models; whole images."""
    config, path = digits(cell), os.environ.get("MNIST", "data/mnist-small")
    return replace(
        config,
        name="mnist",
        data=Stream(path=path, evaluate_length=PATCHES, document_starts=1.0),
        teacher=replace(config.teacher, context_length=PATCHES - 1),
        smt=replace(config.smt, steps=2_000, batch_size=16, short_contexts=1.0),
        log=replace(LOG, evaluate_sequences=256),
    )


def smt(config: RunConfig, **options) -> RunConfig:
    return replace(config, smt=replace(config.smt, **(SEGMENTS | options)), dmt=DMTConfig())


def bptt(config: RunConfig, rate: float, **options) -> RunConfig:
    stage = BPTTConfig(
        steps=config.smt.steps,
        batch_size=config.smt.batch_size,
        learning_rate=rate,
        warmup=0.05,
        schedule="cosine",
        sequence_length=config.teacher.context_length + 1,
        **options,
    )
    return replace(config, smt=SMTConfig(), dmt=DMTConfig(), bptt=stage)


RUNS: dict[str, RunConfig] = {}
for name, make in {"stories": stories, "digits": digits, "mnist": mnist}.items():
    for seed in (0, 1, 2):
        for cell in CELLS:
            config = replace(make(cell), seed=seed)
            some = f"{name}-{cell}"
            RUNS[f"{some}-plain-seed{seed}"] = replace(config, dmt=DMTConfig())
            for option, changes in OPTIONS.items():
                RUNS[f"{some}-{option}-seed{seed}"] = smt(config, **changes)
            for rate in (1e-3, 3e-3, 6e-3, 1e-2, 2e-2, 3e-2):
                RUNS[f"{some}-bptt-{rate:g}-seed{seed}"] = bptt(config, rate)
                for option, changes in PIECES.items():
                    run = f"{some}-bptt-{rate:g}-{option}-seed{seed}"
                    RUNS[run] = bptt(config, rate, **changes)
