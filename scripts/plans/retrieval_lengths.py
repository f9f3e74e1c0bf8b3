"""Retrieval at T = 32 to 256, the needle in the first half: SMT -> the paper's DMT, beside BPTT.

Every run has the same cell (two layers of width 128, two memory tokens), noise on SMT's memories
and one-step DMT with memory labels only. T = 256 has a curriculum over the length, on both sides.
"""

import runpy
from dataclasses import replace
from pathlib import Path

from memtrain.config import DMTConfig, RunConfig

plan = runpy.run_path(str(Path(__file__).with_name("retrieval.py")))
SMT_STEPS = {32: 3_000, 64: 4_000, 128: 8_000, 256: 2_000}
DMT_STEPS = {32: 1_000, 64: 1_500, 128: 4_000, 256: 6_000}
CURRICULUM = {32: 1_000, 64: 1_000, 128: 1_500}
BPTT_CURRICULUM = {8: 1_000, 16: 1_000, 32: 1_000, 64: 1_000, 128: 750}
"""Steps at each length before T = 256. BPTT begins at 8: at T = 32 it does not learn the task."""


def smt_dmt(length: int, seed: int) -> RunConfig:
    config = plan["smt_dmt"](length, seed, memory_noise=0.1)
    return replace(
        config,
        smt=replace(config.smt, steps=SMT_STEPS[length], seconds=0.0),
        dmt=DMTConfig(steps=DMT_STEPS[length], batch_size=64, learning_rate=1e-4),
    )


def bptt(length: int, rate: float, cell: str = "transformer", seconds: float = 0.0) -> RunConfig:
    """As many steps as SMT and DMT together, or as many as fit into some seconds."""
    config = plan["bptt"](length, 0, rate, cell)
    steps = SMT_STEPS.get(length, 0) + DMT_STEPS.get(length, 1)
    return replace(config, bptt=replace(config.bptt, steps=steps, seconds=seconds))


def curriculum(config_at, stage: str, lengths: dict[int, int]) -> list[RunConfig]:
    """Runs of increasing length; the last one has all its stages, the others only `stage`."""
    runs = []
    for length, steps in lengths.items():
        config = config_at(length)
        one = replace(getattr(config, stage), steps=steps)
        runs.append(replace(config, **{stage: one}, dmt=DMTConfig()))
    return [*runs, config_at(256)]


RUNS = {
    f"smt-dmt-T256-seed{seed}": curriculum(lambda T, seed=seed: smt_dmt(T, seed), "smt", CURRICULUM)
    for seed in range(3)
}
RUNS |= {f"smt-dmt-T{T}-seed{seed}": smt_dmt(T, seed) for T in (128, 64, 32) for seed in range(3)}
RUNS |= {f"bptt-T{T}-{rate:g}": bptt(T, rate) for T in (32, 64) for rate in (3e-4, 1e-3)}
RUNS |= {f"bptt-gru-T{T}": bptt(T, 1e-3, "gru") for T in (32, 64, 128)}
RUNS |= {
    f"bptt-curriculum-T256-{rate:g}": curriculum(
        lambda T, rate=rate: bptt(T, rate, seconds=200.0), "bptt", BPTT_CURRICULUM
    )
    for rate in (3e-4, 1e-3)
}
RUNS |= {"bptt-gru-T256": bptt(256, 1e-3, "gru")}
