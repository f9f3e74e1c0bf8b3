"""BPTT of the Transformer cell on retrieval at T = 128 and 256, with as many steps as SMT -> DMT.

Cell and data are those of retrieval_lengths.py, the needle in the first half. SMT -> DMT takes
8,000 + 4,000 steps at 128, and at 256 5,500 + 6,000 with a curriculum over the length, which BPTT
gets here too, from 8 tokens on; "-curriculum" gives it one at 128 as well.
"""

import runpy
from dataclasses import replace
from pathlib import Path

from memtrain.config import RunConfig

plan = runpy.run_path(str(Path(__file__).with_name("retrieval.py")))
STEPS = {128: 12_000, 256: 11_500}
CURRICULUM = {8: 500, 16: 500, 32: 500, 64: 1_000, 128: 1_500}


def bptt(length: int, rate: float, *, grow: bool) -> RunConfig:
    config = plan["bptt"](length, 0, rate)
    before = tuple(pair for pair in CURRICULUM.items() if pair[0] < length) if grow else ()
    stage = replace(config.bptt, steps=STEPS[length], seconds=0.0, curriculum=before)
    log = replace(config.log, evaluate_every=500, evaluate_sequences=256, checkpoint_every=250)
    return replace(config, bptt=stage, log=log)


RUNS = {
    "bptt-T128-0.0003": bptt(128, 3e-4, grow=False),
    "bptt-T128-0.0003-curriculum": bptt(128, 3e-4, grow=True),
    "bptt-T256-0.0003-curriculum": bptt(256, 3e-4, grow=True),
}
