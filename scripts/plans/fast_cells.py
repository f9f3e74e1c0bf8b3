"""The seconds of a GRU by BPTT on one H200 (TinyStories 300, MNIST 341), cells that unroll fast.

At the paper's size a Transformer cell of 16 memory tokens computes 17 tokens for each that it
reads, and DMT reads 140,000 tokens per second where the GRU's BPTT reads 630,000. Fewer memory
tokens and fewer, wider layers make a step cheaper and shorter; DMT then takes more rows at once.
"16" is the paper's cell. "noise" and "steps" change SMT, so that DMT has less to do; "muon" takes
Muon for the matrices of both stages. Stages end by the clock: train one run at a time. segments.py
has what came after it.
`TINYSTORIES`, `ENWIK8` and `MNIST` name the prepared data.

    python scripts/many_runs.py scripts/plans/fast_cells.py --folder runs/fast --processes 1
"""

import os
from dataclasses import replace

from memtrain.config import CellConfig, DMTConfig, LogConfig, RunConfig, Stream
from memtrain.recipes import recipe

SECONDS = {"tinystories": 295.0, "enwik8": 295.0, "mnist": 336.0}
"""Of both stages; evaluations come on top."""
FOREVER = 100_000
SCHEDULE: dict = {"schedule": "cosine", "steps": FOREVER}
SMT: dict = {
    "batch_size": 64,
    "learning_rate": 1e-3,
    "timesteps": 8,
    "decode_timesteps": 4,
    "next_weight": 0.05,
    "token_weight": 1.0,
}


def run(
    memory_tokens: int = 4,
    layers: int = 8,
    width: int = 256,
    data: str = "tinystories",
    **smt,
) -> RunConfig:
    """The causal encoder of carried.py with another cell; memories keep the width of 256."""
    config = recipe(data)
    cell: CellConfig = replace(
        config.cell, memory_tokens=memory_tokens, layers=layers, width=width, heads=width // 32
    )
    path = os.environ.get(data.upper(), f"data/{data}")
    seconds = SECONDS[data]
    return replace(
        config,
        name="fast-cells",
        data=Stream(path=path, evaluate_length=784 if data == "mnist" else 1024),
        teacher=replace(config.teacher, encoder="causal", padding="mask"),
        cell=cell,
        smt=replace(config.smt, seconds=0.4 * seconds, **(SMT | SCHEDULE | smt)),
        dmt=dmt(1024 // memory_tokens if memory_tokens > 4 else 256, 0.6 * seconds),
        engine=replace(config.engine, compile=False),
        log=LogConfig(every=100, evaluate_every=0, evaluate_sequences=32, checkpoint_every=FOREVER),
    )


def dmt(rows: int, seconds: float, rate: float = 5e-4) -> DMTConfig:
    return replace(
        recipe("tinystories").dmt,
        seconds=seconds,
        batch_size=rows,
        learning_rate=rate,
        dynamics_weight=0.1,
        readout_stride=2,
        future_length=8,
        **SCHEDULE,
    )


def both(config: RunConfig, **changes) -> RunConfig:
    """The same options in both stages."""
    return replace(config, smt=replace(config.smt, **changes), dmt=replace(config.dmt, **changes))


def muon(config: RunConfig) -> RunConfig:
    return both(config, optimizer="muon")


def gru(decay: float) -> RunConfig:
    """The GRU by BPTT, as many steps as it takes in 300 s alone; recipe and data as above."""
    config = recipe("tinystories", "paper", "bptt", "gru")
    ours = run()
    return replace(
        config,
        data=ours.data,
        bptt=replace(config.bptt, steps=5719, learning_rate=3e-3, weight_decay=decay),
        engine=ours.engine,
        log=replace(ours.log, evaluate_every=1000),
    )


RUNS = {
    "16": run(16),
    "16-noise-0.3": run(16, memory_noise=0.3),
    "16-steps-4": run(16, dynamics_steps=4),
    "16-muon-noise-0.3": muon(run(16, memory_noise=0.3)),
    "4": run(),
    "4-noise-0.3": run(memory_noise=0.3),
    "4-muon-noise-0.3": muon(run(memory_noise=0.3)),
    "4-noise-0.3-decay-1": both(run(memory_noise=0.3), weight_decay=1.0),
    "4-noise-0.3-decay-3": both(run(memory_noise=0.3), weight_decay=3.0),
    "gru-decay-0.3": gru(0.3),
    "4-wide": run(layers=4, width=384),
    "1-wide": run(memory_tokens=1, layers=4, width=384),
    "8-muon-noise-0.3": muon(run(8, memory_noise=0.3)),
    "enwik8-4-noise-0.3": run(data="enwik8", memory_noise=0.3),
    "enwik8-4-muon-noise-0.3": muon(run(data="enwik8", memory_noise=0.3)),
    "mnist-8-noise-0.3": run(8, data="mnist", memory_noise=0.3),
    "mnist-8-muon-noise-0.3": muon(run(8, data="mnist", memory_noise=0.3)),
}
