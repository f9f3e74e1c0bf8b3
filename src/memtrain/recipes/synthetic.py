"""The synthetic tasks, at sizes that two CPU cores train in minutes, and a user's task."""

from dataclasses import replace

from memtrain.config import (
    S5,
    Arithmetic,
    BPTTConfig,
    Copy,
    Custom,
    DataConfig,
    DMTConfig,
    LogConfig,
    ModularArithmetic,
    Parity,
    Recall,
    Retrieval,
    RunConfig,
    SMTConfig,
    Stack,
    model_shapes,
)


def _small(name: str, data: DataConfig, *, memory_tokens: int = 1) -> RunConfig:
    """SMT then DMT with small models and the causal encoder, all timesteps trained.

    Context and future cover the whole sequence, T_c = T_f = T, up to 256 tokens.
    """
    return RunConfig(
        name=name,
        data=data,
        **model_shapes(
            encoder="causal",
            width=64,
            layers=(2, 1, 1),
            heads=4,
            head_dim=16,
            memory_tokens=memory_tokens,
        ),
        smt=SMTConfig(
            steps=900,
            learning_rate=3e-3,
            schedule="cosine",
            timesteps=0,
            decode_timesteps=8,
            future_length=256,
        ),
        # One-step DMT is enough where SMT's rollout nearly works; through time rescues the rest.
        dmt=DMTConfig(steps=450, learning_rate=1e-3, through_time=True),
        log=LogConfig(evaluate_every=50),
    )


def retrieval() -> RunConfig:
    """Remember a token of the first half of 32. A minute."""
    return _small("retrieval", Retrieval())


def retrieval_bptt() -> RunConfig:
    """The same task and cell trained by BPTT alone, for comparison."""
    config, off = retrieval(), {"smt": SMTConfig(), "dmt": DMTConfig()}
    bptt = BPTTConfig(steps=1350, learning_rate=1e-3)
    return replace(config, name="retrieval-bptt", bptt=bptt, **off)


def copy() -> RunConfig:
    """Output a string of 8 symbols backwards."""
    return _small("copy", Copy(), memory_tokens=4)


def stack() -> RunConfig:
    """Track a stack of depth 4 over 16 operations."""
    return _small("stack", Stack(), memory_tokens=2)


def recall() -> RunConfig:
    """Recall the value of one of 4 keys."""
    return _small("recall", Recall(), memory_tokens=4)


def custom() -> RunConfig:
    """Your own task: --data.path my_file:MyTask, a class that derives from memtrain.Task."""
    return _small("custom", Custom(), memory_tokens=4)


def arithmetic() -> RunConfig:
    """Infer a linear rule modulo 11 from 8 examples."""
    return _small("arithmetic", Arithmetic(), memory_tokens=2)


def parity() -> RunConfig:
    """Track the parity of 16 bits; the RNN then tracks that of 1,024, too. A few minutes.

    Two opposite memories survive noise, a count of ones does not; the decoding loss after a step
    makes the cell keep the state, which may be a small part of a memory (docs/RESULTS.md).
    """
    config = _small("parity", Parity())
    return replace(
        config,
        cell=replace(config.cell, memory_dim=4),
        smt=replace(
            config.smt,
            steps=2000,
            learning_rate=2e-3,
            decode_timesteps=0,
            future_length=1,
            dynamics_weight=1.0,
            memory_noise=1.0,
            cell_decode_weight=1.0,
            curriculum=((4, 300), (8, 500)),
        ),
        dmt=DMTConfig(steps=1000, learning_rate=7e-4),
    )


def modular_arithmetic() -> RunConfig:
    """Track the value of an expression modulo 5 over 16 operations."""
    return _small("modular-arithmetic", ModularArithmetic())


def s5() -> RunConfig:
    """Track the order of five items over 12 swaps and rotations."""
    config = _small("s5", S5(), memory_tokens=2)
    # A target is the whole state: T_f = 1 is enough, and spares the decoder the multiplication.
    smt = replace(config.smt, future_length=1, decode_timesteps=0, dynamics_weight=1.0)
    return replace(config, smt=smt, teacher=replace(config.teacher, encoder_layers=3))
