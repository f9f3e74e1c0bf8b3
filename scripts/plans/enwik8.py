"""enwik8 at the paper's size: SMT -> DMT, and a GRU of as many parameters by BPTT at two rates.

The data is prepared first, once for each part that is held out:

    memtrain data enwik8 --data-dir enwik8.gz --out data/enwik8
    memtrain data enwik8 --data-dir enwik8.gz --option held_out test --out data/enwik8-test

Both sides have steps for about 300 s of an H200 each, by what a step takes alone on it: 14.2 ms of
SMT, 119 ms of DMT, 52.4 ms of the GRU. SMT -> DMT takes the steps that TinyStories has in as many
seconds (docs/RESULTS.md), the GRU the rate of its recipe, and three times that; a trial has a tenth
of the steps. carried.py has SMT -> DMT with the causal encoder and DMT without rollouts.
"""

from dataclasses import replace

from memtrain.config import RunConfig
from memtrain.recipes import recipe


def smt_dmt() -> RunConfig:
    config = recipe("enwik8")
    return replace(config, smt=replace(config.smt, steps=8000), dmt=replace(config.dmt, steps=1400))


def gru(rate: float, steps: int = 5719) -> RunConfig:
    config = recipe("enwik8", "paper", "bptt", "gru")
    return replace(
        config,
        bptt=replace(config.bptt, steps=steps, learning_rate=rate),
        engine=replace(config.engine, compile=False),
        log=replace(config.log, evaluate_every=1000, evaluate_sequences=32),
    )


RUNS = {"smt-dmt": smt_dmt(), "gru-1e-3": gru(1e-3), "gru-3e-3": gru(3e-3)}
RUNS |= {"gru-1e-3-trial": gru(1e-3, 572), "gru-3e-3-trial": gru(3e-3, 572)}
