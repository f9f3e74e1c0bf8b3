"""Real data at the paper's size: 16 memory tokens of 256, encoder 8, decoder 4, cell 8 layers."""

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


def _paper(name: str, path: str, evaluate_length: int) -> RunConfig:
    """The paper's defaults, except that the RNN also learns to start from nothing.

    DMT goes past the paper: rollouts start from the empty memory too, with labels at every 8th
    step, and there are more of them.
    """
    return RunConfig(
        name=name,
        data=Stream(path=path, evaluate_length=evaluate_length),
        teacher=TeacherConfig(padding="void"),
        cell=CellConfig(),
        smt=SMTConfig(steps=150_000, batch_size=128),
        dmt=DMTConfig(
            steps=1_500,
            batch_size=64,
            learning_rate=1e-4,
            rollout_length=256,
            empty_start=0.5,
            label_stride=8,
        ),
        engine=EngineConfig(compile=True),
        log=LogConfig(every=50, evaluate_every=1000, evaluate_sequences=32, checkpoint_every=1000),
    )


def mnist() -> RunConfig:
    """Handwritten digits, 28x28 pixels of 256 greys (prepare with: memtrain data mnist)."""
    return _paper("mnist", "data/mnist", 784)


def tinystories() -> RunConfig:
    """Short stories, character by character (prepare with: memtrain data tinystories)."""
    return _paper("tinystories", "data/tinystories", 1024)


def sketchy() -> RunConfig:
    """Drawings, 2x2 patches of 64x64 pixels (prepare with: memtrain data sketchy)."""
    return _paper("sketchy", "data/sketchy", 1024)
