"""Digits drawn by class: a Transformer cell and a GRU by SMT -> DMT, beside both by BPTT.

Images of 14x14 pixels in four greys, in patches of 2x2, after a token that names the class: 50
tokens of 266. `DIGITS` names the prepared data:

    memtrain data mnist --data-dir FOLDER --out data/digits14 \\
        --option size 14 levels 4 patch 2 labels true

Each run is scored by scripts/draw_by_class.py.
"""

import os
from dataclasses import replace

from memtrain.config import (
    BPTTConfig,
    CellConfig,
    DMTConfig,
    LogConfig,
    RunConfig,
    SMTConfig,
    Stream,
    model_shapes,
)

LENGTH = 50
BASE = RunConfig(
    name="labelled-digits",
    data=Stream(path=os.environ.get("DIGITS", "data/digits14"), evaluate_length=LENGTH),
    **model_shapes(
        encoder="causal",
        context_length=LENGTH,
        width=64,
        layers=(3, 1, 2),
        heads=4,
        head_dim=16,
        memory_tokens=4,
        memory_dim=64,
    ),
    smt=SMTConfig(
        steps=4_000,
        batch_size=32,
        learning_rate=1.5e-3,
        schedule="cosine",
        timesteps=16,
        decode_timesteps=8,
        future_length=16,
        next_weight=1.0,
        token_weight=1.0,
    ),
    dmt=DMTConfig(
        steps=4_000,
        batch_size=32,
        learning_rate=1e-3,
        schedule="cosine",
        rollout="carried",
        rollout_length=LENGTH,
        segment=10,
        label_stride=5,
        readout_stride=1,
        future_length=16,
        dynamics_weight=0.1,
        decode_weight=1.0,
    ),
    log=LogConfig(every=100, evaluate_every=0, checkpoint_every=10**6),
)


def gru(config: RunConfig) -> RunConfig:
    """A GRU of two layers; its states are not normalised, so the teacher's are not."""
    cell = CellConfig(kind="gru", memory_tokens=2, memory_dim=128, width=128, layers=2)
    teacher = replace(config.teacher, normalize_memory=False)
    return replace(config, cell=cell, teacher=teacher)


def bptt(config: RunConfig, rate: float) -> RunConfig:
    """Whole images, as many tokens as SMT and DMT read."""
    stage = BPTTConfig(
        steps=8_000,
        batch_size=32,
        learning_rate=rate,
        warmup=0.05,
        schedule="cosine",
        sequence_length=LENGTH,
    )
    return replace(config, smt=SMTConfig(), dmt=DMTConfig(), bptt=stage)


RUNS = {
    "transformer": BASE,
    "gru": gru(BASE),
    "gru-bptt-1e-3": bptt(gru(BASE), 1e-3),
    "gru-bptt-3e-3": bptt(gru(BASE), 3e-3),
    "transformer-bptt-3e-4": bptt(BASE, 3e-4),
    "transformer-bptt-1e-3": bptt(BASE, 1e-3),
}
