"""Sizes of the models in recipes for real data."""

import math
from dataclasses import dataclass, replace

from memtrain.config import CellConfig, TeacherConfig, model_shapes
from memtrain.errors import MemtrainError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The models and batch of one size. The encoder decides the training (see datasets.py)."""

    teacher: TeacherConfig
    cell: CellConfig
    batch_size: int
    """Sequences per SMT step."""
    teacher_parameters: float
    """Millions, of encoder and decoder, with 256 tokens."""
    rnn_parameters: float
    """Millions, of cell and readout, with 256 tokens."""
    machine: str
    """The machine it is made for."""
    text_rate: float = 0.0
    """SMT's learning rate on text with the causal encoder; DMT has half of it (docs/LOG.md)."""
    segments_rate: float
    """That of SMT in segments and of BPTT in pieces (docs/RESULTS.md); untried at the two large
    sizes."""


SIZES: dict[str, Size] = {
    "paper": Size(
        **model_shapes(
            padding="void", width=256, layers=(8, 4, 8), heads=8, head_dim=64, memory_tokens=16
        ),
        batch_size=128,
        teacher_parameters=12.7,
        rnn_parameters=12.7,
        machine="a large GPU",
        segments_rate=1e-3,
    ),
    "medium": Size(
        **model_shapes(
            padding="void", width=192, layers=(6, 3, 6), heads=6, head_dim=32, memory_tokens=8
        ),
        batch_size=64,
        teacher_parameters=4.1,
        rnn_parameters=4.1,
        machine="any GPU",
        segments_rate=2e-3,
    ),
    "small": Size(
        **model_shapes(
            encoder="causal",
            context_length=128,
            width=96,
            layers=(3, 2, 2),
            heads=4,
            head_dim=24,
            memory_tokens=4,
        ),
        batch_size=16,
        teacher_parameters=0.6,
        rnn_parameters=0.5,
        machine="a laptop, minutes",
        segments_rate=6e-3,
        text_rate=2e-3,
    ),
    "tiny": Size(
        **model_shapes(
            encoder="causal",
            context_length=64,
            width=32,
            layers=(2, 1, 1),
            heads=2,
            head_dim=16,
            memory_tokens=2,
        ),
        batch_size=8,
        teacher_parameters=0.05,
        rnn_parameters=0.04,
        machine="a first try, a minute",
        segments_rate=1e-2,
        text_rate=6e-3,
    ),
}


def size_named(name: str) -> Size:
    """A size by name."""
    if name not in SIZES:
        raise MemtrainError(f"size={name!r}: {did_you_mean(name, SIZES)}")
    return SIZES[name]


RECURRENT_CELLS = ("gru", "lstm")
"""Cells with gates, whose states cannot reach RMS 1."""
RECURRENT_LAYERS = 4
"""Deeper stacks, such as the paper's 16 memory tokens would give, train badly by BPTT."""


def cell_of_kind(size: Size, kind: str) -> CellConfig:
    """A cell of another kind with about as many parameters as the size's own.

    A plain Transformer (attention) has no readout beside it, so it has the readout's blocks too,
    and it sees as far back as the teacher's encoder.
    """
    if kind == "attention":
        layers, context = size.teacher.decoder_layers, size.teacher.context_length
        return replace(
            size.cell, kind=kind, layers=size.cell.layers + layers, memory_tokens=context
        )
    return cell_like(size.cell, kind)


def cell_like(cell: CellConfig, kind: str) -> CellConfig:
    """A cell of another kind with about as many parameters as a Transformer cell.

    A GRU or LSTM has at most four wide layers; an MLP has two layers and the same memory shape.
    """
    attention = 4 * cell.width * cell.heads * cell.head_dim
    parameters = cell.layers * (attention + 8 * cell.width**2)
    if kind in RECURRENT_CELLS:
        layers = min(RECURRENT_LAYERS, cell.memory_tokens)
        matrices, states = (6, 1) if kind == "gru" else (8, 2)
        width = round(math.sqrt(parameters / (matrices * layers)) / 16) * 16
        return replace(cell, kind=kind, memory_tokens=states * layers, memory_dim=width)
    if kind == "mlp":
        ends = (2 * cell.memory_tokens + 1) * cell.memory_dim  # inputs and outputs
        width = (math.sqrt(ends**2 + 4 * parameters) - ends) / 2
        return replace(cell, kind=kind, width=round(width / 16) * 16, layers=2)
    return replace(cell, kind=kind)


def describe_sizes() -> str:
    """All sizes in one sentence, for --help."""
    parts = [
        f"{name} (RNN {size.rnn_parameters:g} M parameters, teacher {size.teacher_parameters:g} M; "
        f"{size.machine})"
        for name, size in SIZES.items()
    ]
    return "Size of the models: " + ", ".join(parts) + ". Options below change single fields."
