"""Memories that a cell can follow: options of SMT and DMT on TinyStories at a small size.

Teacher and cell of 4/2/4 layers of width 128, eight memory tokens, context 128; the encoder is
causal and learns at every token. DMT's gradients pass through segments of eight steps. The names
with "carried" keep memories between training steps instead of rolling out, in half of the seconds.
`TINYSTORIES` names the prepared data.
"""

import os
from dataclasses import replace

from memtrain.config import (
    CellConfig,
    DMTConfig,
    EngineConfig,
    LogConfig,
    RunConfig,
    SMTConfig,
    Stream,
    TeacherConfig,
)

SMT_SECONDS, DMT_SECONDS = 240.0, 100.0
BASE = RunConfig(
    name="followable",
    data=Stream(path=os.environ.get("TINYSTORIES", "data/tinystories"), evaluate_length=512),
    teacher=TeacherConfig(
        encoder="causal",
        context_length=128,
        width=128,
        encoder_layers=4,
        decoder_layers=2,
        heads=4,
        head_dim=32,
    ),
    cell=CellConfig(memory_tokens=8, memory_dim=128, width=128, layers=4, heads=4, head_dim=32),
    smt=SMTConfig(
        steps=20_000,
        seconds=SMT_SECONDS,
        batch_size=64,
        learning_rate=1e-3,
        schedule="cosine",
        timesteps=16,
        decode_timesteps=8,
        future_length=32,
        next_weight=1.0,
        token_weight=1.0,
    ),
    dmt=DMTConfig(
        steps=6_000,
        seconds=DMT_SECONDS,
        batch_size=32,
        learning_rate=5e-4,
        rollout_length=160,
        label_stride=8,
        readout_stride=2,
        segment=8,
        dynamics_weight=0.1,
        decode_weight=1.0,
        future_length=32,
    ),
    engine=EngineConfig(device="auto"),
    log=LogConfig(every=50, evaluate_every=0, evaluate_sequences=32, checkpoint_every=5000),
)


def smt(**changes) -> RunConfig:
    return replace(BASE, smt=replace(BASE.smt, **changes))


def gru(**changes) -> RunConfig:
    """A GRU of four layers of 256; its states are not normalised, so the teacher's are not."""
    return replace(
        smt(**changes),
        teacher=replace(BASE.teacher, normalize_memory=False),
        cell=replace(BASE.cell, kind="gru", memory_tokens=4, memory_dim=256),
    )


def carried(config: RunConfig, segment: int, **changes) -> RunConfig:
    """DMT without rollouts, in half of the seconds; its steps are many, so the rate is halved."""
    return replace(
        config,
        dmt=replace(
            config.dmt,
            rollout="carried",
            rollout_length=256,
            segment=segment,
            label_stride=segment,
            steps=100_000,
            seconds=DMT_SECONDS / 2,
            batch_size=128,
            learning_rate=config.dmt.learning_rate / 2,
            **changes,
        ),
    )


RUNS = {
    "plain": smt(),
    "no-token-loss": smt(token_weight=0.0),
    "noise-0.3": smt(memory_noise=0.3),
    "steps-4": smt(dynamics_steps=4),
    "steps-8": smt(dynamics_steps=8),
    "normalized": smt(normalize_dynamics=True),
    "normalized-steps-4": smt(normalize_dynamics=True, dynamics_steps=4),
    "normalized-weight-1": smt(normalize_dynamics=True, dynamics_weight=1.0),
    "weight-1": smt(dynamics_weight=1.0),
    "cell-decode": smt(cell_decode_weight=1.0),
    "cell-decode-steps-4": smt(cell_decode_weight=1.0, dynamics_steps=4),
    "carried-8": carried(smt(), 8),
    "carried-32": carried(smt(), 32),
    "steps-4-carried-8": carried(smt(dynamics_steps=4), 8),
    "gru-carried-8": carried(gru(), 8),
    "gru-carried-32": carried(gru(), 32),
    "gru-carried-32-without-labels": carried(gru(), 32, dynamics_weight=0.0),
    "gru-plain": gru(),
    "gru-normalized": gru(normalize_dynamics=True),
    "gru-normalized-steps-4": gru(normalize_dynamics=True, dynamics_steps=4),
}
