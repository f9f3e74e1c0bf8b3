"""The models: the teacher and the recurrent cell."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from memtrain.config.validation import CUSTOM_PATH, Bounds, Checked, Fraction, Options, Width
from memtrain.errors import MemtrainError, did_you_mean

Layers = Annotated[int, Bounds(1, 256)]
Heads = Annotated[int, Bounds(1, 1024)]
HeadDim = Annotated[int, Bounds(2, 2**14, even="RoPE rotates pairs of channels")]
MemoryTokens = Annotated[int, Bounds(1, 2**16, hint="the paper uses 16")]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig(Checked):
    """The Transformer encoder and decoder that make the memory labels."""

    encoder: Literal["bidirectional", "causal"] = "bidirectional"
    """The paper's encoder reads one window per memory; the causal one makes all memories of a
    sequence in one pass."""
    context_length: Annotated[int, Bounds(1, 2**20, hint="the paper uses 256")] = 256
    """How many tokens back the encoder sees, T_c."""
    padding: Literal["mask", "void"] = "mask"
    """What replaces the past before a sequence begins (bidirectional encoder): masked positions,
    or a learned token, which needs no mask and so runs faster on a GPU."""
    width: Width = 256
    """Inner width of encoder, decoder and readout."""
    encoder_layers: Layers = 8
    """Transformer blocks of the encoder."""
    decoder_layers: Layers = 4
    """Transformer blocks of the decoder, and of the RNN's readout."""
    heads: Heads = 8
    """Attention heads."""
    head_dim: HeadDim = 64
    """Width of one head; it need not divide the inner width."""
    rotary_fraction: Fraction = 1.0
    """Fraction of each head's channels that RoPE rotates (the authors' code: 0.5)."""
    head_bias: bool = False
    """Add a bias to the logits of decoder and readout (the authors' code: on)."""
    normalize_memory: bool = True
    """Scale every memory token to RMS 1. Turn it off for cells that cannot reach RMS 1."""

    def check(self) -> None:
        check_rotary(self.head_dim, self.rotary_fraction)


CELLS = ("transformer", "mlp", "gru", "lstm", "attention")
TORCH_CELLS = ("torch.nn:RNNCell", "torch.nn:GRUCell", "torch.nn:LSTMCell")
"""Classes that a config may name without permission to import code."""
_MEMORY = frozenset({"kind", "memory_tokens", "memory_dim"})
_USED = {
    "transformer": _MEMORY | {"width", "layers", "heads", "head_dim", "rotary_fraction"},
    "mlp": _MEMORY | {"width", "layers"},
    "gru": _MEMORY,
    "lstm": _MEMORY,
    "attention": frozenset(
        {"kind", "memory_tokens", "width", "layers", "heads", "head_dim", "rotary_fraction"}
    ),
}
_USED_BY_OTHERS = frozenset({"kind", "options"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CellConfig(Checked):
    """The recurrent cell, one step (memory, token) -> memory, and the shape of its memory."""

    kind: str = "transformer"
    """transformer, mlp, gru, lstm, your own class as package.module:Class, or any recurrent cell,
    such as torch.nn:LSTMCell. attention is no recurrent cell but a plain causal Transformer
    language model, for comparison; it is trained by BPTT alone."""
    memory_tokens: MemoryTokens = 16
    """Tokens per memory (layers of a GRU; two per layer of an LSTM; how many tokens back a layer of
    attention sees). Other classes state their own."""
    memory_dim: Width = 256
    """Width of a memory token. Other classes state their own; it is the default of a wrapped cell's
    input_size and hidden_size."""
    width: Width = 256
    """Inner width (Transformer) or hidden width (MLP); not used by a GRU or LSTM."""
    layers: Layers = 8
    """Blocks (Transformer, attention) or hidden layers (MLP); a GRU has one layer per memory token,
    an LSTM one per two."""
    heads: Heads = 8
    """Attention heads (Transformer)."""
    head_dim: HeadDim = 64
    """Width of one head (Transformer)."""
    rotary_fraction: Fraction = 1.0
    """Fraction of each head's channels that RoPE rotates (Transformer; the authors' code: 0.5)."""
    options: Options = field(default_factory=dict)
    """Keyword arguments of the class, besides vocab_size."""

    def check(self) -> None:
        check_rotary(self.head_dim, self.rotary_fraction)
        if self.kind not in CELLS and not CUSTOM_PATH.fullmatch(self.kind):
            raise MemtrainError(
                f"kind={self.kind!r}: {did_you_mean(self.kind, CELLS)}, or package.module:Class"
            )


def check_rotary(head_dim: int, fraction: float) -> None:
    """Refuse a fraction of a head that is not a whole number of pairs of channels."""
    pairs = head_dim * fraction / 2
    if abs(pairs - round(pairs)) > 1e-6:
        raise MemtrainError(
            f"rotary_fraction={fraction:g}: must rotate an even number of the head_dim={head_dim} "
            "channels (RoPE rotates pairs); 1 rotates all"
        )


def model_shapes(
    *,
    width: int,
    heads: int,
    head_dim: int,
    layers: tuple[int, int, int],
    memory_tokens: int,
    memory_dim: int = 0,
    rotary_fraction: float = 1.0,
    **teacher: Any,
) -> dict[str, Any]:
    """A teacher and a Transformer cell of one width, as keyword arguments of RunConfig.

    Args:
        width: of both, and of a memory token unless `memory_dim` is given.
        layers: blocks of encoder, decoder and cell.
        **teacher: other fields of TeacherConfig.

    Example: `RunConfig(name="mine", **model_shapes(width=64, heads=4, head_dim=16, ...))`.
    """
    encoder_layers, decoder_layers, cell_layers = layers
    size: dict[str, Any] = {
        "width": width,
        "heads": heads,
        "head_dim": head_dim,
        "rotary_fraction": rotary_fraction,
    }
    memory: dict[str, Any] = {"memory_tokens": memory_tokens, "memory_dim": memory_dim or width}
    return {
        "teacher": TeacherConfig(
            encoder_layers=encoder_layers, decoder_layers=decoder_layers, **size, **teacher
        ),
        "cell": CellConfig(layers=cell_layers, **size, **memory),
    }


def check_used(cell: CellConfig, default: CellConfig) -> None:
    """Refuse fields that differ from the default although cells of this kind do not use them.

    Fields that a recipe filled in for another kind may stay.
    """
    used = _USED.get(cell.kind, _USED_BY_OTHERS)
    for one in fields(cell):
        value = getattr(cell, one.name)
        if one.name in used or value == getattr(default, one.name):
            continue
        having = [kind for kind in CELLS if one.name in _USED[kind]] or ["package.module:Class"]
        own = (
            "; cell.options sets the arguments of a class (hidden_size, ...)"
            if ":" in cell.kind
            else ""
        )
        raise MemtrainError(
            f"cell.{one.name}={value}: must be left out with cell.kind={cell.kind}, which does not "
            f"use it; it is for {', '.join(having)}{own}"
        )
