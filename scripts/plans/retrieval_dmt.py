"""Retrieval at T = 128: which DMT keeps what SMT with noise on its memories has learned?

The paper's DMT (one step, memory labels only), and DMT through time with the decoder's loss.
"""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

from memtrain.config import RunConfig

smt_dmt = runpy.run_path(str(Path(__file__).with_name("retrieval.py")))["smt_dmt"]


def noisy(
    seed: int, noise: float, dmt: dict[str, Any], cell: dict[str, Any] | None = None, **smt: Any
) -> RunConfig:
    """SMT for 220 s with noise on the memories it steps from, then 90 s of this DMT."""
    config = smt_dmt(128, seed, memory_noise=noise, **smt)
    return replace(
        config,
        smt=replace(config.smt, seconds=220.0),
        dmt=replace(config.dmt, seconds=90.0, **dmt),
        cell=replace(config.cell, **(cell or {})),
    )


ONE_STEP = {"through_time": False, "decode_weight": 0.0, "learning_rate": 3e-5}
THROUGH_TIME = {"learning_rate": 3e-5}
RUNS = {f"one-3e-5-noise0.1-s{seed}": noisy(seed, 0.1, ONE_STEP) for seed in (0, 1, 2)}
RUNS |= {f"through-3e-5-noise0.1-s{seed}": noisy(seed, 0.1, THROUGH_TIME) for seed in (0, 1, 2)}
RUNS |= {
    "one-1e-4-noise0.1-s0": noisy(0, 0.1, ONE_STEP | {"learning_rate": 1e-4}),
    "one-3e-5-noise0.3-s1": noisy(1, 0.3, ONE_STEP),
    "through-3e-5-noise0.3-s1": noisy(1, 0.3, THROUGH_TIME),
    "through-3e-5-noise0.1-M4-s0": noisy(0, 0.1, THROUGH_TIME, {"memory_tokens": 4}),
    "through-3e-5-noise0.1-steps4-s0": noisy(0, 0.1, THROUGH_TIME, dynamics_steps=4),
    "through-3e-5-noise0.1-4layers-s0": noisy(0, 0.1, THROUGH_TIME, {"layers": 4}),
}
