"""The five synthetic tasks, at sizes that two CPU cores train in minutes."""

from memtrain.config import (
    Arithmetic,
    BPTTConfig,
    CellConfig,
    Copy,
    DataConfig,
    DMTConfig,
    LogConfig,
    Recall,
    Retrieval,
    RunConfig,
    SMTConfig,
    Stack,
    TeacherConfig,
)


def _small(name: str, data: DataConfig, length: int, *, memory_tokens: int = 1) -> RunConfig:
    """SMT then DMT with small models and the causal encoder, all timesteps trained."""
    return RunConfig(
        name=name,
        data=data,
        teacher=TeacherConfig(
            encoder="causal",
            context_length=length,
            width=64,
            encoder_layers=2,
            decoder_layers=1,
            heads=4,
            head_dim=16,
        ),
        cell=CellConfig(
            memory_tokens=memory_tokens, memory_dim=64, width=64, layers=1, heads=4, head_dim=16
        ),
        smt=SMTConfig(
            steps=600,
            learning_rate=3e-3,
            schedule="cosine",
            timesteps="all",
            decode_timesteps=8,
            future_length=length,
        ),
        dmt=DMTConfig(steps=150, learning_rate=1e-3),
        log=LogConfig(evaluate_every=50),
    )


def retrieval() -> RunConfig:
    """Remember one token over 32 steps; BPTT with the same cell stays at chance. A minute."""
    return _small("retrieval", Retrieval(), 32)


def retrieval_bptt() -> RunConfig:
    """The same task and cell trained by BPTT alone, for comparison."""
    config = _small("retrieval-bptt", Retrieval(), 32)
    return RunConfig(
        name=config.name,
        data=config.data,
        teacher=config.teacher,
        cell=config.cell,
        bptt=BPTTConfig(steps=750, learning_rate=1e-3),
        log=config.log,
    )


def copy() -> RunConfig:
    """Say a string of 8 symbols backwards."""
    return _small("copy", Copy(), 16, memory_tokens=4)


def stack() -> RunConfig:
    """Track a stack of depth 4 over 16 operations."""
    return _small("stack", Stack(), 16, memory_tokens=2)


def recall() -> RunConfig:
    """Recall the value of one of 4 keys."""
    return _small("recall", Recall(), 9, memory_tokens=4)


def arithmetic() -> RunConfig:
    """Infer a linear rule modulo 11 from 8 examples."""
    return _small("arithmetic", Arithmetic(), 16, memory_tokens=2)
