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


def _laptop(name: str, data: Stream) -> RunConfig:
    """Small models and the causal encoder: minutes on two cores, seconds on a GPU.

    Every window is a sequence that starts from the empty memory.
    """
    return RunConfig(
        name=name,
        data=data,
        teacher=TeacherConfig(
            encoder="causal",
            context_length=128,
            width=96,
            encoder_layers=3,
            decoder_layers=2,
            heads=4,
            head_dim=24,
        ),
        cell=CellConfig(memory_tokens=4, memory_dim=96, width=96, layers=2, heads=4, head_dim=24),
        smt=SMTConfig(
            steps=2000,
            batch_size=16,
            learning_rate=2e-3,
            schedule="cosine",
            timesteps=16,
            decode_timesteps=8,
            future_length=32,
        ),
        dmt=DMTConfig(
            steps=300, batch_size=16, learning_rate=3e-4, rollout_length=160, label_stride=2
        ),
        log=LogConfig(evaluate_every=250, evaluate_sequences=16),
    )


def text() -> RunConfig:
    """Any text, byte by byte (prepare with: memtrain data FILE)."""
    return _laptop("text", Stream(path="data/text", evaluate_length=256))


def images() -> RunConfig:
    """Any folder of images, pixel by pixel (prepare with: memtrain data FOLDER)."""
    return _laptop("images", Stream(path="data/images", evaluate_length=256))


def tokens() -> RunConfig:
    """Any array of tokens (prepare with: memtrain data FILE.npy)."""
    return _laptop("tokens", Stream(path="data/tokens", evaluate_length=256))
