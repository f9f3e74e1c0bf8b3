"""The small network that comes with the package: digits that a laptop draws in seconds."""

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

PIXELS = 14 * 14
"""Patches of 2x2 pixels in an image of 28x28."""


def mnist_small() -> RunConfig:
    """The digits that `memtrain generate mnist-small` draws: MNIST in 2x2 patches of 4 greys.

    It learns what `memtrain data mnist --data-dir FOLDER --out data/mnist-small --option levels 4
    patch 2` prepared, 196 patches an image. Every sequence is an image from its first patch on, and
    the teacher sees all of it.
    """
    width, heads, head_dim = 128, 4, 32
    return RunConfig(
        name="mnist-small",
        data=Stream(path="data/mnist-small", evaluate_length=PIXELS, document_starts=1.0),
        teacher=TeacherConfig(
            padding="void",
            context_length=PIXELS,
            width=width,
            encoder_layers=6,
            decoder_layers=2,
            heads=heads,
            head_dim=head_dim,
        ),
        cell=CellConfig(
            memory_tokens=8,
            memory_dim=width,
            width=width,
            layers=4,
            heads=heads,
            head_dim=head_dim,
        ),
        smt=SMTConfig(
            steps=14_000,
            batch_size=128,
            learning_rate=1e-3,
            schedule="cosine",
            future_length=32,
            short_contexts=1.0,
        ),
        dmt=DMTConfig(
            steps=1_300,
            batch_size=64,
            learning_rate=2e-4,
            rollout_length=PIXELS,
            label_stride=4,
            segment=8,
            dynamics_weight=1.0,
            decode_weight=1.0,
            future_length=32,
        ),
        engine=EngineConfig(compile=True),
        log=LogConfig(every=50, evaluate_every=2500, evaluate_sequences=64, checkpoint_every=1000),
    )
