"""Retrieval with the needle in the first half of the sequence, as the paper's authors have it.

The same cell by SMT -> DMT and by BPTT, and a GRU by BPTT, in the same seconds.
"""

from dataclasses import replace

from memtrain.config import (
    BPTTConfig,
    CellConfig,
    DMTConfig,
    EngineConfig,
    LogConfig,
    Retrieval,
    RunConfig,
    SMTConfig,
    TeacherConfig,
)

SMT_SECONDS, DMT_SECONDS = 250.0, 110.0


def smt_dmt(length: int, seed: int, **smt) -> RunConfig:
    """All timesteps encoded, 16 of them decoded; DMT through time with the teacher's decoder."""
    return RunConfig(
        name=f"retrieval-{length}",
        seed=seed,
        data=Retrieval(sequence_length=length, needle_within=0.5),
        teacher=TeacherConfig(
            encoder="causal",
            context_length=length,
            width=128,
            encoder_layers=4,
            decoder_layers=2,
            heads=4,
            head_dim=32,
        ),
        cell=CellConfig(memory_tokens=2, memory_dim=128, width=128, layers=2, heads=4, head_dim=32),
        smt=SMTConfig(
            steps=12_000,
            seconds=SMT_SECONDS,
            batch_size=64,
            learning_rate=1e-3,
            schedule="cosine",
            timesteps=0,
            decode_timesteps=16,
            future_length=length,
            **smt,
        ),
        dmt=DMTConfig(
            steps=4_000,
            seconds=DMT_SECONDS,
            batch_size=64,
            learning_rate=3e-4,
            through_time=True,
            dynamics_weight=1.0,
            decode_weight=1.0,
        ),
        engine=EngineConfig(device="auto"),
        log=LogConfig(every=50, evaluate_every=1000, evaluate_sequences=512, checkpoint_every=4000),
    )


def bptt(length: int, seed: int, rate: float, cell: str = "transformer") -> RunConfig:
    """The same cell and readout by BPTT; a GRU has two layers of 256."""
    config = smt_dmt(length, seed)
    gru = replace(config.cell, kind="gru", memory_tokens=2, memory_dim=256)
    return RunConfig(
        name=f"{config.name}-bptt",
        seed=seed,
        data=config.data,
        teacher=config.teacher,
        cell=gru if cell == "gru" else config.cell,
        bptt=BPTTConfig(
            steps=20_000,
            seconds=SMT_SECONDS + DMT_SECONDS,
            batch_size=64,
            learning_rate=rate,
            schedule="cosine",
        ),
        engine=config.engine,
        log=replace(config.log, evaluate_every=500),
    )


RUNS = {f"smt-dmt-T{T}-seed{seed}": smt_dmt(T, seed) for T in (64, 128) for seed in range(3)}
RUNS |= {
    f"bptt-{cell}-T{T}-{rate:g}": bptt(T, 0, rate, cell)
    for T in (64, 128)
    for cell, rate in (("transformer", 3e-4), ("transformer", 1e-3), ("gru", 1e-3))
}

# Drift is what fails at T=128: what makes the cell correct its errors within SMT?
RUNS |= {
    f"smt-dmt-T{T}-{name}-seed{seed}": smt_dmt(T, seed, **changes)
    for T, name, changes, seeds in (
        (128, "noise-0.1", {"memory_noise": 0.1}, (0,)),
        (128, "noise-0.3", {"memory_noise": 0.3}, (0, 1, 2)),
        (128, "noise-1", {"memory_noise": 1.0}, (0,)),
        (128, "steps-8", {"dynamics_steps": 8}, (0,)),
        (128, "noise-0.3-steps-4", {"memory_noise": 0.3, "dynamics_steps": 4}, (0,)),
        (256, "noise-0.3", {"memory_noise": 0.3}, (0, 1)),
        (256, "noise-1", {"memory_noise": 1.0}, (0,)),
    )
    for seed in seeds
}
RUNS |= {
    f"bptt-{cell}-T256-{rate:g}": bptt(256, 0, rate, cell)
    for cell, rate in (("transformer", 3e-4), ("gru", 1e-3))
}
