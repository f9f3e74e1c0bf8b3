"""Retrieval at T = 32 to 128, the needle in the first half: SMT -> the paper's DMT, beside BPTT.

Every run has the same cell (two layers of width 128, two memory tokens), noise on SMT's memories
and one-step DMT with memory labels only. Longer sequences: retrieval_long.py.
"""

import runpy
from dataclasses import replace
from pathlib import Path

from memtrain.config import DMTConfig, RunConfig

plan = runpy.run_path(str(Path(__file__).with_name("retrieval.py")))
SMT_STEPS = {32: 3_000, 64: 4_000, 128: 8_000}
DMT_STEPS = {32: 1_000, 64: 1_500, 128: 4_000}


def smt_dmt(length: int, seed: int) -> RunConfig:
    config = plan["smt_dmt"](length, seed, memory_noise=0.1)
    return replace(
        config,
        smt=replace(config.smt, steps=SMT_STEPS[length], seconds=0.0),
        dmt=DMTConfig(steps=DMT_STEPS[length], batch_size=64, learning_rate=1e-4),
    )


def bptt(length: int, rate: float, cell: str = "transformer") -> RunConfig:
    """As many steps as SMT and DMT together."""
    config = plan["bptt"](length, 0, rate, cell)
    steps = SMT_STEPS[length] + DMT_STEPS[length]
    return replace(config, bptt=replace(config.bptt, steps=steps, seconds=0.0))


RUNS = {f"smt-dmt-T{T}-seed{seed}": smt_dmt(T, seed) for T in (128, 64, 32) for seed in range(3)}
RUNS |= {f"bptt-T{T}-{rate:g}": bptt(T, rate) for T in (32, 64) for rate in (3e-4, 1e-3)}
RUNS |= {f"bptt-gru-T{T}": bptt(T, 1e-3, "gru") for T in (32, 64, 128)}
