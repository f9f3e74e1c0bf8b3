"""GRU and LSTM by SMT -> DMT beside BPTT, on 8x8 digits and on the toy stories of the figures.

Both sides of a data set have the same cell and readout. What a gated cell needs of DMT is many
steps at a high rate with gradients through 16 or 32 steps, and on text a short future; "carried"
keeps memories between training steps, "unrolled" rolls out. `STORIES` names the stories, which
`memtrain reproduce sequential-compute --scale cpu` makes.
"""

import os
from dataclasses import replace

from memtrain.config import BPTTConfig, DMTConfig, RunConfig, SMTConfig, Stream
from memtrain.recipes import recipe

STORIES = Stream(
    path=os.environ.get("STORIES", "runs/reproduce-cpu/data/tinystories"), evaluate_length=192
)
CELLS = ("gru", "lstm")


def digits(cell: str, seed: int) -> RunConfig:
    """SMT, then carried DMT; a cell of two layers of 128 (an LSTM: one)."""
    config = recipe("digits")
    return replace(
        config,
        seed=seed,
        teacher=replace(config.teacher, normalize_memory=False),
        cell=replace(config.cell, kind=cell, layers=2, memory_tokens=2, memory_dim=128),
        dmt=replace(
            config.dmt,
            rollout="carried",
            segment=16,
            label_stride=4,
            steps=3_000,
            learning_rate=1e-3,
            dynamics_weight=0.1,
        ),
        log=replace(config.log, evaluate_sequences=270),
    )


def stories(cell: str, seed: int, rollout: str) -> RunConfig:
    config = recipe("tinystories", "tiny", "smt-dmt", cell)
    carried = {"rollout": "carried", "segment": 32, "steps": 5_000}
    unrolled = {"steps": 2_400}
    return replace(
        config,
        seed=seed,
        data=STORIES,
        smt=replace(config.smt, steps=1_000, learning_rate=2e-3),
        dmt=replace(
            config.dmt,
            learning_rate=3e-3,
            future_length=8,
            **(carried if rollout == "carried" else unrolled),
        ),
        log=replace(config.log, evaluate_every=500, evaluate_sequences=60),
    )


def bptt(config: RunConfig, rate: float, steps: int) -> RunConfig:
    """The same cell by BPTT, whole digits or 160 characters at a time."""
    stage = BPTTConfig(
        steps=steps,
        batch_size=config.dmt.batch_size,
        learning_rate=rate,
        warmup=0.05,
        schedule="cosine",
        sequence_length=160,
    )
    log = replace(config.log, evaluate_every=100)
    return replace(config, smt=SMTConfig(), dmt=DMTConfig(), bptt=stage, log=log)


RUNS = {
    f"stories-{cell}-{rollout}-seed{seed}": stories(cell, seed, rollout)
    for seed in (0, 1)
    for cell in CELLS
    for rollout in ("carried", "unrolled")
}
RUNS |= {
    f"stories-{cell}-bptt-{rate:g}-seed{seed}": bptt(stories(cell, seed, "carried"), rate, 3_000)
    for cell in CELLS
    for rate, seed in ((3e-3, 0), (3e-3, 1), (1e-3, 0))
}
RUNS |= {f"digits-{cell}-carried-seed0": digits(cell, 0) for cell in CELLS}
RUNS |= {
    f"digits-{cell}-bptt-{rate:g}-seed0": bptt(digits(cell, 0), rate, 1_000)
    for cell in CELLS
    for rate in (1e-3, 3e-3)
}
