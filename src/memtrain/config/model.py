"""What learns: the teacher and the recurrent cell."""

from dataclasses import dataclass, field, fields
from typing import Literal

from memtrain.config.validation import CUSTOM_PATH, at_least, check_bounds
from memtrain.errors import MemtrainError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The Transformer pair that makes the memory labels: encoder and decoder."""

    encoder: Literal["bidirectional", "causal"] = "bidirectional"
    """The paper's encoder reads a window for every memory; ours makes all memories in one pass."""
    context_length: int = 256
    """How many tokens back the encoder looks, T_c."""
    padding: Literal["mask", "void"] = "mask"
    """What stands for the past before a sequence began (bidirectional encoder): nothing, masked
    out; or a token of its own, which needs no mask and so runs faster on a GPU."""
    width: int = 256
    """Inner width of encoder, decoder and readout."""
    encoder_layers: int = 8
    """Transformer blocks of the encoder."""
    decoder_layers: int = 4
    """Transformer blocks of the decoder, and of the RNN's readout."""
    heads: int = 8
    """Attention heads."""
    head_dim: int = 64
    """Width of one head; it need not divide the inner width."""
    normalize_memory: bool = True
    """Scale every memory token to RMS 1. A cell that cannot reach RMS 1 may want this off."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 1, "context_length", hint="the paper uses 256")
        at_least(self, 1, "width", "encoder_layers", "decoder_layers", "heads")
        at_least(self, 2, "head_dim")
        if self.head_dim % 2:
            raise MemtrainError(f"head_dim={self.head_dim}: must be even, RoPE turns pairs")


CELLS = ("transformer", "mlp", "gru")
_MEMORY = frozenset({"kind", "memory_tokens", "memory_dim"})
_USED = {
    "transformer": _MEMORY | {"width", "layers", "heads", "head_dim"},
    "mlp": _MEMORY | {"width", "layers"},
    "gru": _MEMORY,
}
_USED_BY_OTHERS = frozenset({"kind", "options"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CellConfig:
    """The recurrent cell, one step (memory, token) -> memory, and the shape of its memory."""

    kind: str = "transformer"
    """transformer, mlp, gru, or a class of yours as package.module:Class."""
    memory_tokens: int = 16
    """Tokens in a memory (the layers of a GRU). A class of yours states its own."""
    memory_dim: int = 256
    """Width of a memory token. A class of yours states its own."""
    width: int = 256
    """Inner width (Transformer) or hidden width (MLP); a GRU has none."""
    layers: int = 8
    """Blocks (Transformer) or hidden layers (MLP); a GRU has one layer a memory token."""
    heads: int = 8
    """Attention heads (Transformer)."""
    head_dim: int = 64
    """Width of one head (Transformer)."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Keyword arguments for a class of yours, beside vocab_size."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 1, "memory_tokens", hint="the paper uses 16")
        at_least(self, 1, "memory_dim", "width", "layers", "heads")
        at_least(self, 2, "head_dim")
        if self.head_dim % 2:
            raise MemtrainError(f"head_dim={self.head_dim}: must be even, RoPE turns pairs")
        if self.kind not in CELLS and not CUSTOM_PATH.fullmatch(self.kind):
            raise MemtrainError(
                f"kind={self.kind!r}: {did_you_mean(self.kind, CELLS)}, or package.module:Class"
            )


def check_used(cell: CellConfig, default: CellConfig) -> None:
    """Refuse fields that were changed from the default though a cell of this kind has none such.

    Fields that a recipe filled in for another kind may stay.
    """
    used = _USED.get(cell.kind, _USED_BY_OTHERS)
    for one in fields(cell):
        value = getattr(cell, one.name)
        if one.name in used or value == getattr(default, one.name):
            continue
        having = [kind for kind in CELLS if one.name in _USED[kind]] or ["package.module:Class"]
        raise MemtrainError(
            f"cell.{one.name}={value}: must be left out with cell.kind={cell.kind}, which does not "
            f"use it; it is for {', '.join(having)}"
        )
