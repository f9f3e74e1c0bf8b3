"""What stands around the stacks in one step of a rollout, in a kernel each.

A token is chosen; its row beside the memory begins the cell's stack; behind the stack stand two
norms. torch would take a kernel for every operation, and at this size each costs the same.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor, nn
from triton.language.extra import cuda

from memtrain.accel.triton.common import LOG2_E
from memtrain.accel.triton_rollout import limits
from memtrain.accel.triton_rollout.dependent_launch import chain
from memtrain.accel.triton_rollout.rows import Rows
from memtrain.accel.triton_rollout.stack import InferenceStack
from memtrain.models.layers import RMS_EPSILON
from memtrain.models.rnn import Choose

WIDEST = 4096
"""Tokens that a program can choose among."""


@triton.jit
def _begin(
    memory,
    token,
    table,
    out,
    squares,
    rows,
    token_stride,
    MEASURE: tl.constexpr,
    CHAINED: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """[memory, the token's row of the table] of every sequence, and the rows' squares."""
    if CHAINED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BW)[None, :]
    sequence, position = row // L, row % L
    there, last = row < rows, position == L - 1
    symbol = tl.load(token + sequence * token_stride, mask=there & last, other=0).to(tl.int64)
    held = (sequence * (L - 1) + position).to(tl.int64)
    inside = column < W
    kept = tl.load(
        memory + held[:, None] * W + column, mask=(there & (position < L - 1))[:, None] & inside,
        other=0.0,
    )  # fmt: skip
    read = tl.load(
        table + symbol[:, None] * W + column, mask=(there & last)[:, None] & inside, other=0.0
    )
    x = tl.where(last[:, None], read.to(tl.float32), kept.to(tl.float32))
    at = out + row[:, None].to(tl.int64) * W + column
    tl.store(at, x.to(out.dtype.element_ty), mask=there[:, None] & inside)
    if MEASURE:
        tl.store(squares + row, tl.sum(x * x, 1), mask=there)


@triton.jit
def _end(
    x,
    gain,
    out,
    rows,
    epsilon,
    CHAINED: tl.constexpr,
    W: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """A norm with a gain, then one without."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BW)[None, :]
    there = (row < rows)[:, None] & (column < W)
    scale = tl.load(gain + column, mask=column < W, other=0.0)
    if CHAINED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    at = row[:, None].to(tl.int64) * W + column
    y = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 1) / W + epsilon)[:, None] * scale
    y *= tl.rsqrt(tl.sum(y * y, 1) / W + epsilon)[:, None]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _choose(
    logits, chance, out, stride, chance_stride, sharpness, V: tl.constexpr, BV: tl.constexpr
):
    """The token of one row at which the probabilities up to it pass the chance."""
    row = tl.program_id(0)
    symbol = tl.arange(0, BV)
    mark = tl.minimum(tl.load(chance + row * chance_stride), 1 - 1e-6)
    at = logits + row.to(tl.int64) * stride + symbol
    score = tl.load(at, mask=symbol < V, other=float("-inf")).to(tl.float32)
    weight = tl.exp2((score - tl.max(score, 0)) * sharpness)
    total = tl.cumsum(weight, 0)
    mark *= tl.max(total, 0)
    # However sums are rounded, only a token that has a probability is taken.
    likely = weight > 0
    passed = tl.min(tl.where(likely & (total > mark), symbol, BV), 0)
    final = tl.max(tl.where(likely, symbol, 0), 0)
    tl.store(out + row, tl.minimum(passed, final).to(tl.int64))


def _tile(rows: int, width: int) -> dict[str, int]:
    """Rows of a program that reads them whole: one where there are few."""
    span = triton.next_power_of_2(width)
    size = 1 if rows <= limits.FEW_ROWS else max(1, 2048 // span)
    return {"BR": size, "BW": span, "num_warps": 1 if size * span <= 256 else 4}


def begin(
    memory: Float[Tensor, "B M W"], token: Int[Tensor, " B"], table: Float[Tensor, "V W"]
) -> Rows:
    """[memory, table[token]] as the rows of B sequences of M + 1, as the stack wants them.

    Their squares are summed where a product would otherwise have to.
    """
    count, length, width = memory.shape[0], memory.shape[1] + 1, memory.shape[2]
    rows = count * length
    out = torch.empty(rows, width, dtype=limits.PRODUCTS, device=memory.device)
    few = rows <= limits.FEW_ROWS
    squares = None if few else torch.empty(1, rows, device=memory.device)
    tile = _tile(rows, width)
    kernel: Any = _begin
    kernel[triton.cdiv(rows, tile["BR"]),](
        memory.contiguous(),
        token,
        table,
        out,
        out if squares is None else squares,
        rows,
        token.stride(0),
        MEASURE=squares is not None,
        L=length,
        W=width,
        **chain(out, rows, first=True),
        **tile,
    )
    return Rows(out, squares)


def end(x: Float[Tensor, "R W"], gain: Float[Tensor, " W"]) -> Float[Tensor, "R W"]:
    """The stack's last norm, then the memory's."""
    rows, width = x.shape
    out = torch.empty_like(x)
    tile = _tile(rows, width)
    kernel: Any = _end
    kernel[triton.cdiv(rows, tile["BR"]),](
        x, gain, out, rows, RMS_EPSILON, W=width, **chain(x, rows), **tile
    )
    return out


class InferenceCell:
    """`TransformerCell.forward` without autograd, at equal widths of memory and stack."""

    def __init__(self, embedding: nn.Embedding, fast: InferenceStack) -> None:
        self.embedding = embedding
        self.fast = fast

    def serves(self, memory: Float[Tensor, "B M D"]) -> bool:
        """Whether [memory, token] is short enough for a tile."""
        return memory.shape[1] < limits.LONGEST

    @torch.no_grad()
    def __call__(
        self, memory: Float[Tensor, "B M D"], token: Int[Tensor, " B"]
    ) -> Float[Tensor, "B M D"]:
        """One step of the recurrence."""
        tokens = memory.shape[1]
        x = begin(memory, token, self.embedding.weight)
        x = self.fast.stream(x, tokens + 1, slice(tokens), causal=False, first=False)
        return end(x, self.fast.stack.norm.weight).view(memory.shape)


class KernelSampler:
    """`Sampler.__call__` of a temperature above 0 without top-k or top-p; `plain` is that sampler,
    for vocabularies larger than a tile."""

    def __init__(self, plain: Choose, temperature: float, allowed: int) -> None:
        self.plain = plain
        self.temperature = temperature
        self.allowed = allowed

    def __call__(
        self, logits: Float[Tensor, "B V"], chance: Float[Tensor, " B"]
    ) -> Int[Tensor, " B"]:
        """One token a row; `chance` is uniform in [0, 1)."""
        rows, symbols = logits.shape
        symbols = min(symbols, self.allowed or symbols)
        if symbols > WIDEST:
            return self.plain(logits, chance)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        span = max(32, triton.next_power_of_2(symbols))
        out = torch.empty(rows, dtype=torch.long, device=logits.device)
        kernel: Any = _choose
        kernel[rows,](
            logits,
            chance,
            out,
            logits.stride(0),
            chance.stride(0),
            LOG2_E.value / self.temperature,
            V=symbols,
            BV=span,
            num_warps=min(8, max(1, span // 256)),
        )
        return out
