"""Recipes for real data, at a size that fits the machine (sizes.py).

Sizes with the paper's bidirectional encoder are trained as in the paper, for GPUs; those with the
causal one in a way that is fast on a CPU. Each can be trained by BPTT instead, whole or in pieces.
"""

from dataclasses import replace

from memtrain.config import (
    BPTTConfig,
    CellConfig,
    Digits,
    DMTConfig,
    EngineConfig,
    LabelFile,
    LogConfig,
    RunConfig,
    SMTConfig,
    Stream,
    model_shapes,
)
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.recipes.sizes import RECURRENT_CELLS, Size, cell_of_kind, size_named

METHODS = ("smt-dmt", "smt", "bptt", "pieces")
TEXT = ("tinystories", "enwik8", "text")
"""Characters need other weights than pixels (docs/RESULTS.md and docs/LOG.md)."""


def _stream(name: str, size: str, method: str, cell: str, evaluate_length: int) -> RunConfig:
    if method not in METHODS:
        raise MemtrainError(f"method={method!r}: {did_you_mean(method, METHODS)}")
    data = Stream(path=f"data/{name}", evaluate_length=evaluate_length)
    shape = size_named(size)
    make = _paper if shape.teacher.encoder == "bidirectional" else _laptop
    config = make(name, data, shape)
    if cell in RECURRENT_CELLS:  # their states cannot reach RMS 1
        config = replace(config, teacher=replace(config.teacher, normalize_memory=False))
    chosen = cell_of_kind(shape, cell)
    if method == "bptt":
        return by_bptt(config, chosen)
    if method == "pieces":
        return in_pieces(config, chosen, shape)
    if method == "smt":
        return in_segments(config, chosen, shape)
    if cell in RECURRENT_CELLS and make is _laptop and name in TEXT:
        # SMT leaves gated cells far from their teacher; DMT trains them (docs/RESULTS.md).
        dmt = replace(config.dmt, steps=1200, learning_rate=3e-3, future_length=8)
        config = replace(config, dmt=dmt)
    return replace(config, cell=chosen)


def by_bptt(config: RunConfig, cell: CellConfig | None = None) -> RunConfig:
    """The same data, cell (or another one) and readout trained by BPTT alone, for as many steps.

    Batches have the size of SMT's, sequences the length of DMT's rollouts. A step takes far longer
    than SMT's; for equal time set `bptt.seconds`. The learning rates were the best of three at the
    paper's size (docs/RESULTS.md; for a GRU on text, three times as much was better still). On text
    at the small sizes 3e-3 was better than 1e-3, and 6e-3 better still for a tiny GRU (LOG.md).
    """
    cell = cell or config.cell
    rate = 1e-3
    if config.teacher.encoder == "causal" and config.name in TEXT:
        rate = 3e-3
    elif config.teacher.encoder == "bidirectional" and cell.kind not in RECURRENT_CELLS:
        rate = 3e-4
    return RunConfig(
        name=f"{config.name}-bptt",
        data=config.data,
        teacher=config.teacher,  # its decoder is the readout
        cell=cell,
        bptt=BPTTConfig(
            steps=config.smt.steps + config.dmt.steps,
            batch_size=config.smt.batch_size,
            learning_rate=rate,
            warmup=0.05,
            schedule="cosine",
            sequence_length=config.dmt.rollout_length or BPTTConfig().sequence_length,
        ),
        engine=config.engine,
        log=replace(config.log, every=10, evaluate_every=250, checkpoint_every=250),
    )


def in_pieces(config: RunConfig, cell: CellConfig, size: Size) -> RunConfig:
    """BPTT whose sequences are trained in pieces of 16 steps, all at once; no teacher.

    A piece starts from the memory that the cell has after the piece before it, read from the empty
    memory. So little more than 16 tokens of the past are learned from, in few sequential steps.
    """
    config = by_bptt(config, cell)
    stage = replace(config.bptt, truncate=16, sweeps=1, learning_rate=size.segments_rate)
    return replace(config, name=config.name.replace("-bptt", "-pieces"), bptt=stage)


def in_segments(config: RunConfig, cell: CellConfig, size: Size) -> RunConfig:
    """SMT alone, for as many steps, whose cell takes 16 steps from where it was (docs/RESULTS.md).

    The teacher encodes the ends of segments only, and reads whole windows, of the length of BPTT's
    sequences. The decoding loss after the cell's own steps counts most: it trains what the RNN
    predicts, and the teacher serves to begin. Measured at the sizes tiny and small.
    """
    window = config.dmt.rollout_length
    return RunConfig(
        name=f"{config.name}-smt",
        data=config.data,
        teacher=replace(
            config.teacher, encoder="causal", padding="mask", context_length=window - 1
        ),
        cell=cell,
        smt=SMTConfig(
            steps=config.smt.steps,
            batch_size=config.smt.batch_size,
            learning_rate=size.segments_rate,
            schedule="cosine",
            timesteps=0,
            future_length=1,
            token_weight=1.0 if config.name in TEXT else 0.0,
            dynamics_steps=16,
            dynamics_labels="last",
            own_starts=1.0,
            memory_noise=0.3,
            cell_decode_weight=10.0,
        ),
        engine=config.engine,
        log=config.log,
    )


def _paper(name: str, data: Stream, size: Size) -> RunConfig:
    """The paper's models; the RNN also learns to start from the empty memory.

    A higher learning rate with a cosine schedule needs fewer steps than the paper's constant one
    (150,000 at 3e-4); the next target has more weight, most for text. DMT extends the paper's: some
    rollouts start from the empty memory, every 16th step is labelled, gradients pass through the
    8 steps before each label, a decoding loss is added, and there are more steps. The readout is
    trained at every 4th step.
    """
    return RunConfig(
        name=name,
        data=data,
        teacher=size.teacher,
        cell=size.cell,
        smt=SMTConfig(
            steps=24_000,
            batch_size=size.batch_size,
            learning_rate=8e-4,
            schedule="cosine",
            next_weight=0.05 if name in TEXT else 0.02,
        ),
        dmt=DMTConfig(
            steps=4_000,
            batch_size=size.batch_size // 2,
            learning_rate=1.5e-4,
            rollout_length=256,
            empty_start=0.5,
            label_stride=16,
            readout_stride=4,
            segment=8,
            dynamics_weight=1.0,
            decode_weight=1.0,
        ),
        engine=EngineConfig(compile=True),
        log=LogConfig(every=50, evaluate_every=2500, evaluate_sequences=32, checkpoint_every=1000),
    )


def mnist(size: str = "paper", method: str = "smt-dmt", cell: str = "transformer") -> RunConfig:
    """Handwritten digits, 28x28 pixels of 256 greys (--data FOLDER, its IDX files)."""
    return _stream("mnist", size, method, cell, 784)


def tinystories(
    size: str = "paper", method: str = "smt-dmt", cell: str = "transformer"
) -> RunConfig:
    """Short stories, character by character (--data FOLDER, its text files)."""
    return _stream("tinystories", size, method, cell, 1024)


def enwik8(size: str = "paper", method: str = "smt-dmt", cell: str = "transformer") -> RunConfig:
    """The first 100 MB of Wikipedia, byte by byte (--data FILE)."""
    return _stream("enwik8", size, method, cell, 1024)


def sketchy(size: str = "paper", method: str = "smt-dmt", cell: str = "transformer") -> RunConfig:
    """Drawings, 2x2 patches of 64x64 pixels (--data FOLDER, its PNGs)."""
    return _stream("sketchy", size, method, cell, 1024)


def _laptop(name: str, data: Stream, size: Size) -> RunConfig:
    """Small models and the causal encoder: minutes on two cores, seconds on a GPU.

    Every window is a sequence that starts from the empty memory. On text, the encoder is trained at
    every token, and DMT has a smaller dynamics weight and a higher learning rate (docs/LOG.md).
    """
    is_text = name in TEXT
    return RunConfig(
        name=name,
        data=data,
        teacher=size.teacher,
        cell=size.cell,
        smt=SMTConfig(
            steps=2000,
            batch_size=size.batch_size,
            learning_rate=size.text_rate if is_text else 2e-3,
            schedule="cosine",
            timesteps=16,
            decode_timesteps=8,
            future_length=32,
            next_weight=1.0,
            token_weight=1.0 if is_text else 0.0,
        ),
        dmt=DMTConfig(
            steps=300,
            batch_size=size.batch_size,
            learning_rate=size.text_rate / 2 if is_text else 3e-4,
            rollout_length=160,
            label_stride=8,
            segment=8,
            dynamics_weight=0.1 if is_text else 1.0,
            decode_weight=1.0,
            future_length=32,
        ),
        log=LogConfig(evaluate_every=250, evaluate_sequences=16),
    )


def text(size: str = "small", method: str = "smt-dmt", cell: str = "transformer") -> RunConfig:
    """Any text, byte by byte (--data FILE)."""
    return _stream("text", size, method, cell, 256)


def images(size: str = "small", method: str = "smt-dmt", cell: str = "transformer") -> RunConfig:
    """Any folder of images, pixel by pixel (--data FOLDER)."""
    return _stream("images", size, method, cell, 256)


def tokens(size: str = "small", method: str = "smt-dmt", cell: str = "transformer") -> RunConfig:
    """Any array of tokens (--data FILE.npy)."""
    return _stream("tokens", size, method, cell, 256)


def labels() -> RunConfig:
    """A cell from a file of memories, without a teacher (--data FILE, of `memtrain label`)."""
    return RunConfig(
        name="labels",
        data=LabelFile(),
        **model_shapes(width=64, layers=(1, 1, 1), heads=4, head_dim=16, memory_tokens=1),
        smt=SMTConfig(
            steps=900,
            learning_rate=2e-3,
            schedule="cosine",
            timesteps=0,
            train_teacher=False,
            dynamics_weight=1.0,
        ),
        dmt=DMTConfig(steps=300, learning_rate=3e-4, dynamics_weight=1.0),
        log=LogConfig(evaluate_every=100),
    )


def digits() -> RunConfig:
    """8x8 digits, pixel by pixel from the empty memory. Seven or eight minutes on two cores."""
    return RunConfig(
        name="digits",
        data=Digits(),
        **model_shapes(
            encoder="causal",
            context_length=64,
            width=64,
            layers=(3, 1, 2),
            heads=4,
            head_dim=16,
            memory_tokens=4,
        ),
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


PATCHES = 14 * 14
"""Patches of 2x2 pixels in an image of 28x28."""


def mnist_small() -> RunConfig:
    """The bundled model of `memtrain generate mnist-small`: MNIST in 2x2 patches of 4 greys.

    Data: `memtrain data mnist --data-dir FOLDER --out data/mnist-small --option levels 4 patch 2`,
    196 patches per image. Every sequence is a whole image, and the teacher sees all of it.
    """
    return RunConfig(
        name="mnist-small",
        data=Stream(path="data/mnist-small", evaluate_length=PATCHES, document_starts=1.0),
        **model_shapes(
            padding="void",
            context_length=PATCHES,
            width=128,
            layers=(6, 2, 4),
            heads=4,
            head_dim=32,
            memory_tokens=8,
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
            rollout_length=PATCHES,
            label_stride=4,
            segment=8,
            dynamics_weight=1.0,
            decode_weight=1.0,
            future_length=32,
        ),
        engine=EngineConfig(compile=True),
        log=LogConfig(every=50, evaluate_every=2500, evaluate_sequences=64, checkpoint_every=1000),
    )
