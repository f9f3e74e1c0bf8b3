"""The five synthetic tasks, at sizes that two CPU cores train in minutes."""

from memtrain.config import (
    Arithmetic,
    BPTTConfig,
    CellConfig,
    Copy,
    Custom,
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


def _small(name: str, data: DataConfig, *, memory_tokens: int = 1) -> RunConfig:
    """SMT then DMT with small models and the causal encoder, all timesteps trained.

    Context and future reach over the whole sequence, T_c = T_f = T, up to 256 tokens.
    """
    return RunConfig(
        name=name,
        data=data,
        teacher=TeacherConfig(
            encoder="causal",
            context_length=256,
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
            steps=900,
            learning_rate=3e-3,
            schedule="cosine",
            timesteps=0,
            decode_timesteps=8,
            future_length=256,
        ),
        # One-step DMT is enough where SMT's rollout half works; through time rescues the rest.
        dmt=DMTConfig(steps=450, learning_rate=1e-3, through_time=True),
        log=LogConfig(evaluate_every=50),
    )


def retrieval() -> RunConfig:
    """Remember one token over 32 steps. A minute."""
    return _small("retrieval", Retrieval())


def retrieval_bptt() -> RunConfig:
    """The same task and cell trained by BPTT alone, for comparison."""
    config = _small("retrieval-bptt", Retrieval())
    return RunConfig(
        name=config.name,
        data=config.data,
        teacher=config.teacher,
        cell=config.cell,
        bptt=BPTTConfig(steps=1350, learning_rate=1e-3),
        log=config.log,
    )


def copy() -> RunConfig:
    """Say a string of 8 symbols backwards."""
    return _small("copy", Copy(), memory_tokens=4)


def stack() -> RunConfig:
    """Track a stack of depth 4 over 16 operations."""
    return _small("stack", Stack(), memory_tokens=2)


def recall() -> RunConfig:
    """Recall the value of one of 4 keys."""
    return _small("recall", Recall(), memory_tokens=4)


def custom() -> RunConfig:
    """A task of yours: --data.path my_file:MyTask, a class that derives from memtrain.Task."""
    return _small("custom", Custom(), memory_tokens=4)


def arithmetic() -> RunConfig:
    """Infer a linear rule modulo 11 from 8 examples."""
    return _small("arithmetic", Arithmetic(), memory_tokens=2)
