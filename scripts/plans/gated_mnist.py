"""GRU and LSTM by SMT -> DMT beside BPTT on MNIST, pixel by pixel, at size small on a GPU.

DMT has what gated cells needed on the 8x8 digits (gated_cells.py). Both sides have the same cell
and readout, two rates, and about as many tokens. `MNIST` names the prepared data.

    python scripts/many_runs.py scripts/plans/gated_mnist.py --folder runs/gated-mnist --processes 8
"""

import os
from dataclasses import replace

from memtrain.config import LogConfig, RunConfig, Stream
from memtrain.recipes import recipe

CELLS = ("gru", "lstm")
RATES = (1e-3, 3e-3)
DATA = Stream(path=os.environ.get("MNIST", "data/mnist"), evaluate_length=784)
LOG = LogConfig(every=100, evaluate_every=2000, evaluate_sequences=64, checkpoint_every=2000)


def smt_dmt(cell: str, rate: float) -> RunConfig:
    """SMT at the recipe's rate, then DMT that carries memories through whole images."""
    config = replace(recipe("mnist", "small", "smt-dmt", cell), data=DATA, log=LOG)
    return replace(
        config,
        smt=replace(config.smt, steps=8_000),
        dmt=replace(
            config.dmt,
            steps=12_000,
            batch_size=128,
            learning_rate=rate,
            rollout="carried",
            rollout_length=784,
            segment=16,
            label_stride=4,
            dynamics_weight=0.1,
            future_length=16,
        ),
    )


def bptt(cell: str, rate: float) -> RunConfig:
    config = replace(recipe("mnist", "small", "bptt", cell), data=DATA, log=LOG)
    return replace(config, bptt=replace(config.bptt, steps=10_000, learning_rate=rate))


RUNS = {f"{cell}-{rate:g}": smt_dmt(cell, rate) for cell in CELLS for rate in RATES}
RUNS |= {f"{cell}-bptt-{rate:g}": bptt(cell, rate) for cell in CELLS for rate in RATES}
