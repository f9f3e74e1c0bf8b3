"""SMT in segments at the paper's size, in the seconds of a GRU by BPTT on one H200.

The cell takes 32 steps from each of the teacher's memories, or from where it ended the segment
before, and is decoded after each; the teacher encodes the ends of segments only. There is no DMT.
segments_cpu.py has the same at sizes for a CPU, where the options were chosen (docs/LOG.md).
Names: data, cell, SMT's rate. The GRU and the LSTM are the recipes', with as many parameters as the
paper's cell; "4" and "16" are its Transformer cell with as many memory tokens. "bptt" is the GRU by
BPTT, at two rates; "pieces" are GRU and Transformer cell by BPTT in pieces of 32 steps that are
trained at once, without a teacher. Stages end by the clock: train one run at a time.
`TINYSTORIES`, `ENWIK8`, `MNIST` and `SKETCHY` name the prepared data.

    python scripts/many_runs.py scripts/plans/segments.py --folder runs/segments --processes 1 --only RUN ...
"""  # noqa: E501

import os
from dataclasses import replace

from memtrain.config import DMTConfig, LogConfig, RunConfig, Stream
from memtrain.recipes import recipe

SECONDS = {"tinystories": 300.0, "enwik8": 300.0, "mnist": 341.0, "sketchy": 314.0}
"""Evaluations come on top."""
LENGTHS = {"mnist": 784, "sketchy": 1024}
WINDOW = 256
"""Tokens that the teacher sees, and BPTT unrolls."""
FOREVER = 100_000
LOG = LogConfig(every=100, evaluate_every=0, evaluate_sequences=32, checkpoint_every=FOREVER)
SEGMENTS: dict = {
    "timesteps": 0,
    "decode_timesteps": 0,
    "future_length": 1,
    "next_weight": 0.0,
    "dynamics_steps": 32,
    "dynamics_labels": "last",
    "own_starts": 1.0,
    "cell_decode_weight": 10.0,
    "memory_noise": 0.3,
    "schedule": "cosine",
    "steps": FOREVER,
}


def on_data(config: RunConfig, data: str) -> RunConfig:
    path = os.environ.get(data.upper(), f"data/{data}")
    stream = Stream(path=path, evaluate_length=LENGTHS.get(data, 1024))
    engine = replace(config.engine, compile=False)
    return replace(config, name="segments", data=stream, engine=engine, log=LOG)


def smt(data: str, cell: str, rate: float, **options) -> RunConfig:
    kind = cell if cell in ("gru", "lstm") else "transformer"
    config = on_data(recipe(data, "paper", "smt-dmt", kind), data)
    if kind == "transformer":
        config = replace(config, cell=replace(config.cell, memory_tokens=int(cell)))
    changes: dict = {
        "batch_size": 128,
        "token_weight": 1.0 if data in ("tinystories", "enwik8") else 0.0,
    }
    changes |= SEGMENTS | {"learning_rate": rate, "seconds": SECONDS[data]} | options
    return replace(
        config,
        teacher=replace(
            config.teacher, encoder="causal", padding="mask", context_length=WINDOW - 1
        ),
        smt=replace(config.smt, **changes),
        dmt=DMTConfig(),
    )


def bptt(data: str, rate: float, cell: str = "gru", **options) -> RunConfig:
    """The recipe's GRU, or another cell, in the same seconds."""
    kind = cell if cell in ("gru", "lstm") else "transformer"
    config = on_data(recipe(data, "paper", "bptt", kind), data)
    if kind == "transformer":
        config = replace(config, cell=replace(config.cell, memory_tokens=int(cell)))
    changes: dict = {"steps": FOREVER, "seconds": SECONDS[data], "learning_rate": rate} | options
    return replace(config, bptt=replace(config.bptt, **changes))


RUNS = {
    f"{data}-{cell}-{rate:g}": smt(data, cell, rate)
    for data in SECONDS
    for cell, rates in {
        "gru": (1e-3, 3e-3),
        "lstm": (1e-3, 3e-3),
        "4": (1e-3,),
        "16": (1e-3,),
    }.items()
    for rate in rates
}
RUNS |= {
    f"{data}-{cell}-{rate:g}-{name}": smt(data, cell, rate, **options)
    for data, cell, rate in (("tinystories", "gru", 3e-3), ("tinystories", "4", 1e-3))
    for name, options in {
        "teacher-starts": {"own_starts": 0.0},
        "16-steps": {"dynamics_steps": 16},
        "decode-3": {"cell_decode_weight": 3.0},
        "muon": {"optimizer": "muon"},
    }.items()
}
RUNS |= {f"{data}-bptt-{rate:g}": bptt(data, rate) for data in SECONDS for rate in (3e-3, 6e-3)}
RUNS |= {
    f"{data}-pieces-{cell}-{rate:g}": bptt(data, rate, cell, truncate=32, sweeps=1)
    for data in SECONDS
    for cell, rate in (("gru", 3e-3), ("gru", 6e-3), ("4", 1e-3), ("16", 1e-3))
}
