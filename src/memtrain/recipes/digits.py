"""scikit-learn's 8x8 digits: real handwriting, small enough for a laptop."""

from memtrain.config import (
    CellConfig,
    Digits,
    DMTConfig,
    LogConfig,
    RunConfig,
    SMTConfig,
    TeacherConfig,
)


def digits() -> RunConfig:
    """Draw 8x8 digits pixel by pixel from an empty memory. Seven or eight minutes on two cores."""
    return RunConfig(
        name="digits",
        data=Digits(),
        teacher=TeacherConfig(
            encoder="causal",
            context_length=64,
            width=64,
            encoder_layers=3,
            decoder_layers=1,
            heads=4,
            head_dim=16,
        ),
        cell=CellConfig(memory_tokens=4, memory_dim=64, width=64, layers=2, heads=4, head_dim=16),
        smt=SMTConfig(
            steps=2400,
            batch_size=32,
            learning_rate=2e-3,
            schedule="cosine",
            timesteps=16,
            decode_timesteps=8,
            future_length=16,
            next_weight=1.0,
        ),
        dmt=DMTConfig(
            steps=600,
            batch_size=32,
            learning_rate=5e-4,
            label_stride=8,
            segment=8,
            dynamics_weight=1.0,
            decode_weight=1.0,
            future_length=16,
        ),
        log=LogConfig(evaluate_every=200),
    )
