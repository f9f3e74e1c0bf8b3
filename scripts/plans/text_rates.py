"""Learning rates of SMT, DMT and BPTT on TinyStories, at sizes for a CPU.

Names: size, cell, then the rates. DMT has a future of 8 unless it says otherwise; "muon" takes Muon
for the matrices. `TINYSTORIES` names the prepared data.
"""

import os
from dataclasses import replace

from memtrain.config import LogConfig, RunConfig, Stream
from memtrain.recipes import recipe

LOG = LogConfig(evaluate_every=0, evaluate_sequences=64, checkpoint_every=10**6)
DATA = Stream(path=os.environ.get("TINYSTORIES", "data/tinystories"), evaluate_length=256)


def smt_dmt(
    smt: float,
    dmt: float,
    cell: str = "transformer",
    size: str = "tiny",
    future: int = 8,
    optimizers: tuple[str, str] = ("adamw", "adamw"),
    **options,
) -> RunConfig:
    config = replace(recipe("text", size, "smt-dmt", cell), data=DATA, log=LOG)
    return replace(
        config,
        smt=replace(config.smt, learning_rate=smt, optimizer=optimizers[0], **options),
        dmt=replace(config.dmt, learning_rate=dmt, future_length=future, optimizer=optimizers[1]),
    )


def bptt(rate: float, cell: str) -> RunConfig:
    config = replace(recipe("text", "tiny", "bptt", cell), data=DATA, log=LOG)
    return replace(config, bptt=replace(config.bptt, learning_rate=rate))


RUNS = {
    "tiny-2e-3-1e-3-future32": smt_dmt(2e-3, 1e-3, future=32),
    "tiny-4e-3-1e-3-future32": smt_dmt(4e-3, 1e-3, future=32),
    "tiny-2e-3-3e-3": smt_dmt(2e-3, 3e-3),
    "tiny-4e-3-3e-3": smt_dmt(4e-3, 3e-3),
    "tiny-6e-3-3e-3-future32": smt_dmt(6e-3, 3e-3, future=32),
    "tiny-6e-3-3e-3": smt_dmt(6e-3, 3e-3),
    "tiny-8e-3-3e-3": smt_dmt(8e-3, 3e-3),
    "tiny-16e-3-3e-3": smt_dmt(16e-3, 3e-3),
    "tiny-8e-3-6e-3": smt_dmt(8e-3, 6e-3),
    "tiny-8e-3-3e-3-noise-0.3": smt_dmt(8e-3, 3e-3, memory_noise=0.3),
    "tiny-muon-8e-3-3e-3": smt_dmt(8e-3, 3e-3, optimizers=("muon", "adamw")),
    "tiny-muon-2e-2-3e-3": smt_dmt(2e-2, 3e-3, optimizers=("muon", "adamw")),
    "tiny-8e-3-muon-1e-2": smt_dmt(8e-3, 1e-2, optimizers=("adamw", "muon")),
    "tiny-gru-2e-3-3e-3": smt_dmt(2e-3, 3e-3, "gru"),
    "tiny-gru-6e-3-3e-3": smt_dmt(6e-3, 3e-3, "gru"),
    "tiny-mlp-2e-3-3e-3": smt_dmt(2e-3, 3e-3, "mlp"),
    "tiny-mlp-6e-3-3e-3": smt_dmt(6e-3, 3e-3, "mlp"),
    "small-2e-3-1e-3-future32": smt_dmt(2e-3, 1e-3, size="small", future=32),
    "small-6e-3-3e-3": smt_dmt(6e-3, 3e-3, size="small"),
    "tiny-gru-bptt-1e-3": bptt(1e-3, "gru"),
    "tiny-gru-bptt-3e-3": bptt(3e-3, "gru"),
    "tiny-gru-bptt-6e-3": bptt(6e-3, "gru"),
    "tiny-transformer-bptt-3e-3": bptt(3e-3, "transformer"),
}
