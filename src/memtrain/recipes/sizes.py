"""How large the models of a stream's recipe are: teacher, cell and batch, in one place."""

import math
from dataclasses import dataclass, replace

from memtrain.config import CellConfig, TeacherConfig
from memtrain.errors import MemtrainError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The shapes of one size. The encoder decides how it is trained (see datasets.py)."""

    teacher: TeacherConfig
    cell: CellConfig
    batch_size: int
    """Sequences in a step of SMT."""
    teacher_parameters: float
    """Millions, of encoder and decoder, with 256 tokens."""
    rnn_parameters: float
    """Millions, of cell and readout, with 256 tokens."""
    machine: str
    """What it wants, for a person."""


def _size(
    *,
    encoder,
    context_length: int,
    width: int,
    layers: tuple[int, int, int],
    heads: int,
    head_dim: int,
    memory_tokens: int,
    **rest,
) -> Size:
    """One width and one shape of heads for everything; layers of encoder, decoder and cell."""
    encoder_layers, decoder_layers, cell_layers = layers
    return Size(
        teacher=TeacherConfig(
            encoder=encoder,
            padding="void" if encoder == "bidirectional" else "mask",
            context_length=context_length,
            width=width,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            heads=heads,
            head_dim=head_dim,
        ),
        cell=CellConfig(
            memory_tokens=memory_tokens,
            memory_dim=width,
            width=width,
            layers=cell_layers,
            heads=heads,
            head_dim=head_dim,
        ),
        **rest,
    )


SIZES: dict[str, Size] = {
    "paper": _size(
        encoder="bidirectional",
        context_length=256,
        width=256,
        layers=(8, 4, 8),
        heads=8,
        head_dim=64,
        memory_tokens=16,
        batch_size=128,
        teacher_parameters=12.7,
        rnn_parameters=12.7,
        machine="a large GPU",
    ),
    "medium": _size(
        encoder="bidirectional",
        context_length=256,
        width=192,
        layers=(6, 3, 6),
        heads=6,
        head_dim=32,
        memory_tokens=8,
        batch_size=64,
        teacher_parameters=4.1,
        rnn_parameters=4.1,
        machine="any GPU",
    ),
    "small": _size(
        encoder="causal",
        context_length=128,
        width=96,
        layers=(3, 2, 2),
        heads=4,
        head_dim=24,
        memory_tokens=4,
        batch_size=16,
        teacher_parameters=0.6,
        rnn_parameters=0.5,
        machine="a laptop, minutes",
    ),
    "tiny": _size(
        encoder="causal",
        context_length=64,
        width=32,
        layers=(2, 1, 1),
        heads=2,
        head_dim=16,
        memory_tokens=2,
        batch_size=8,
        teacher_parameters=0.05,
        rnn_parameters=0.04,
        machine="a try, a minute",
    ),
}


def size_named(name: str) -> Size:
    """A size by name."""
    if name not in SIZES:
        raise MemtrainError(f"size={name!r}: {did_you_mean(name, SIZES)}")
    return SIZES[name]


GRU_LAYERS = 4
"""Deeper stacks of GRUs, as the paper's 16 memory tokens would make, train badly by BPTT."""


def cell_of_kind(size: Size, kind: str) -> CellConfig:
    """The size's cell as another kind, with about as many parameters.

    A GRU has at most four layers, wide ones; an MLP keeps the memory's shape, with two layers.
    """
    cell = size.cell
    attention = 4 * cell.width * cell.heads * cell.head_dim
    wanted = cell.layers * (attention + 8 * cell.width**2)
    if kind == "gru":
        layers = min(GRU_LAYERS, cell.memory_tokens)
        width = math.sqrt(wanted / (6 * layers))
        return replace(cell, kind=kind, memory_tokens=layers, memory_dim=round(width / 16) * 16)
    if kind == "mlp":
        ends = (2 * cell.memory_tokens + 1) * cell.memory_dim  # what it reads and what it makes
        width = (math.sqrt(ends**2 + 4 * wanted) - ends) / 2
        return replace(cell, kind=kind, width=round(width / 16) * 16, layers=2)
    return replace(cell, kind=kind)


def describe_sizes() -> str:
    """All sizes in a few words, for --help."""
    parts = [
        f"{name} (RNN {size.rnn_parameters:g} M parameters, teacher {size.teacher_parameters:g} M; "
        f"{size.machine})"
        for name, size in SIZES.items()
    ]
    return "Size of the models: " + ", ".join(parts) + ". Options below change single fields."
