"""The network of a page: its shape as JSON, and its weights as one block of bytes."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memtrain.config import CELLS
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.generation.pretrained import Pretrained
from memtrain.models.cells import GRUCell, LSTMCell, MLPCell, TransformerCell
from memtrain.models.layers import RMS_EPSILON, Block, Stack
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder, count_parameters
from memtrain.shapes import Values

Precision = Literal["exact", "fp16", "int8"]
CELL_KINDS = {TransformerCell: "transformer", MLPCell: "mlp", GRUCell: "gru", LSTMCell: "lstm"}
MAX_WEIGHT_BYTES = 2**26
"""Of the weights in a page, which are a third larger there as text; browsers and phones open a file
of this size, and a step of a larger network would take seconds."""
TYPES = {torch.float32: "f32", torch.float16: "f16", torch.int8: "i8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedNetwork:
    """A network as the page's script reads it."""

    shape: dict[str, Any]
    """Cell, readout, and the place of every tensor in `weights`."""
    weights: bytes
    kept: RNN
    """The network with the weights as the page has them."""


def check_network(model: Pretrained) -> str:
    """The kind of the model's cell.

    Raises:
        MemtrainError: the page cannot run the model, and why.
    """
    if isinstance(model.space, Values):
        raise MemtrainError(
            f"--html: {model.name} is trained on numbers, and the page samples tokens; take a "
            "model of text, images or tokens"
        )
    if model.spelling is None:
        raise MemtrainError(
            f"--html: the task of {model.name} asks for answers and has no sequences to sample; "
            "take a model of text, images or tokens"
        )
    kind = CELL_KINDS.get(type(model.cell))
    if kind is None or not isinstance(model.readout, Decoder):
        written = ", ".join(CELL_KINDS.values())
        own = model.config.cell.kind
        why = "reads its last tokens again at every step" if own in CELLS else "is not written"
        raise MemtrainError(
            f"--html: cell.kind={own} {why} in the page's script; train with --cell.kind {written}"
        )
    return kind


def pack(model: Pretrained, precision: str) -> PackedNetwork:
    """Pack the cell and the readout of a model.

    Args:
        model: on the CPU.
        precision: "exact" keeps 32 bits, 16 where they hold the same numbers; "fp16" rounds to 16
            bits; "int8" rounds matrices to 8 bits with one scale per row, and the rest to 16.

    Raises:
        MemtrainError: the page cannot run the model, or it is too large.
    """
    if precision not in get_args(Precision):
        raise MemtrainError(
            f"precision={precision!r}: {did_you_mean(precision, get_args(Precision))}"
        )
    kind = check_network(model)
    _check_size(model, precision)
    tensors: list[dict[str, Any]] = []
    kept: dict[str, Tensor] = {}
    blocks: list[bytes] = []
    size = 0
    for name, value in model.state_dict().items():
        stored, scale = _round(value.float(), precision)
        entry = {"name": name, "shape": list(value.shape), "type": TYPES[stored.dtype]}
        kept[name] = stored.float()
        if scale is not None:
            kept[name] *= scale
            entry["scale"] = size
            blocks.append(_bytes(scale))
            size += len(blocks[-1])
        entry["start"] = size
        blocks.append(_bytes(stored))
        size += len(blocks[-1])
        tensors.append(entry)
    shape = {
        "cell": _cell_shape(model.cell, kind),
        "readout": _readout_shape(model.readout),
        "epsilon": RMS_EPSILON,
        "tensors": tensors,
    }
    return PackedNetwork(shape=shape, weights=b"".join(blocks), kept=_with_weights(model, kept))


def _check_size(model: Pretrained, precision: str) -> None:
    count = count_parameters(model)
    bits = {"exact": 32, "fp16": 16, "int8": 8}
    if precision == "exact" and all(_is_half(value) for value in model.state_dict().values()):
        bits["exact"] = 16
    size = count * bits[precision] // 8
    if size <= MAX_WEIGHT_BYTES:
        return
    smaller = [name for name, width in bits.items() if count * width // 8 <= MAX_WEIGHT_BYTES]
    remedy = f"take --html-weights {smaller[0]}" if smaller else "export a smaller model"
    raise MemtrainError(
        f"--html: {count:,} parameters take {size / 2**20:,.0f} MiB with --html-weights "
        f"{precision}, and a page holds {MAX_WEIGHT_BYTES // 2**20} MiB; {remedy}"
    )


def _is_half(value: Float[Tensor, "..."]) -> bool:
    """Whether 16 bits hold the same numbers."""
    return torch.equal(value.half().float(), value.float())


def _round(
    value: Float[Tensor, "..."], precision: str
) -> tuple[Tensor, Float[Tensor, "rows 1"] | None]:
    """A tensor as it is stored, and the scale of each row if these are whole numbers."""
    if precision == "exact":
        return (value.half() if _is_half(value) else value), None
    if precision == "int8" and value.dim() == 2:
        scale = value.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        return (value / scale).round().to(torch.int8), scale
    half = value.half()
    return (half if half.isfinite().all() else value), None


def _bytes(value: Tensor) -> bytes:
    """The numbers in little-endian order, padded to whole words of 4 bytes."""
    plain = value.contiguous().numpy().astype(value.numpy().dtype.newbyteorder("<"))
    return plain.tobytes() + b"\0" * (-plain.nbytes % 4)


def _with_weights(model: Pretrained, weights: dict[str, Tensor]) -> RNN:
    """A copy of the network with other weights."""
    from copy import deepcopy

    copied = RNN(deepcopy(model.cell), deepcopy(model.readout)).eval()
    copied.load_state_dict(weights)
    return copied


def _cell_shape(cell: nn.Module, kind: str) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "kind": kind,
        "memoryTokens": cell.memory_tokens,
        "memoryDim": cell.memory_dim,
    }
    if isinstance(cell, TransformerCell):
        shape["stack"] = _stack_shape(cell.stack)
    if isinstance(cell, MLPCell):
        shape["layers"] = sum(isinstance(layer, nn.Linear) for layer in cell.mlp)
    return shape


def _readout_shape(readout: nn.Module) -> dict[str, Any]:
    assert isinstance(readout, Decoder)
    return {
        "causal": readout.causal,
        "stack": _stack_shape(readout.stack),
        "vocabSize": readout.head.out_features,
    }


def _stack_shape(stack: Stack) -> dict[str, Any]:
    block = stack.blocks[0]
    assert isinstance(block, Block)
    return {
        "layers": len(stack.blocks),
        "width": block.attention.project_in.in_features,
        "heads": block.attention.heads,
        "headDim": block.attention.head_dim,
        "rotated": stack.rotary.rotated,
        "base": stack.rotary.base,
    }
