"""The parts of a rollout step around the stacks, one kernel each.

A token is sampled; its embedding is appended to the memory as the cell's input; two norms follow
the cell's stack. torch would launch one kernel per operation, and at this size each costs the same.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor, nn
from triton.language.extra import cuda

from memtrain.accel.triton.common import LOG2_E
from memtrain.accel.triton.rollout_linear import LIMITS, Rows, dependent_launch
from memtrain.accel.triton.rollout_stack import InferenceStack
from memtrain.models.layers import RMS_EPSILON
from memtrain.models.sampler import Choose

MAX_SYMBOLS = 4096
"""Tokens that one program can choose among."""


@triton.jit
def _cell_input(
    memory, token, table, out, squares, rows, token_stride,
    MEASURE: tl.constexpr, DEPENDENT: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
    BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """[memory, table[token]] of each sequence, and the rows' sums of squares."""
    if DEPENDENT:
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
def _two_norms(
    x, gain, out, rows, epsilon,
    DEPENDENT: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """A norm with a gain, then one without."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BW)[None, :]
    there = (row < rows)[:, None] & (column < W)
    scale = tl.load(gain + column, mask=column < W, other=0.0)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    at = row[:, None].to(tl.int64) * W + column
    y = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 1) / W + epsilon)[:, None] * scale
    y *= tl.rsqrt(tl.sum(y * y, 1) / W + epsilon)[:, None]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _sample(
    logits, uniform, out, stride, uniform_stride, sharpness, V: tl.constexpr, BV: tl.constexpr
):
    """The first token of one row whose cumulative probability exceeds the uniform number."""
    row = tl.program_id(0)
    symbol = tl.arange(0, BV)
    mark = tl.minimum(tl.load(uniform + row * uniform_stride), 1 - 1e-6)
    at = logits + row.to(tl.int64) * stride + symbol
    score = tl.load(at, mask=symbol < V, other=float("-inf")).to(tl.float32)
    weight = tl.exp2((score - tl.max(score, 0)) * sharpness)
    total = tl.cumsum(weight, 0)
    mark *= tl.max(total, 0)
    # Independent of rounding, only tokens of nonzero probability are sampled.
    likely = weight > 0
    passed = tl.min(tl.where(likely & (total > mark), symbol, BV), 0)
    final = tl.max(tl.where(likely, symbol, 0), 0)
    tl.store(out + row, tl.minimum(passed, final).to(tl.int64))


def _tile(rows: int, width: int) -> dict[str, int]:
    """The number of whole rows per program: one if there are few."""
    span = triton.next_power_of_2(width)
    size = 1 if rows <= LIMITS.few_rows else max(1, 2048 // span)
    return {"BR": size, "BW": span, "num_warps": 1 if size * span <= 256 else 4}


def cell_input(
    memory: Float[Tensor, "B M W"], token: Int[Tensor, " B"], table: Float[Tensor, "V W"]
) -> Rows:
    """[memory, table[token]] as the rows of B sequences of M + 1.

    With many rows, their squares are summed too, to save the first product from doing so.
    """
    count, length, width = memory.shape[0], memory.shape[1] + 1, memory.shape[2]
    rows = count * length
    out = torch.empty(rows, width, dtype=LIMITS.precision, device=memory.device)
    few = rows <= LIMITS.few_rows
    squares = None if few else torch.empty(1, rows, device=memory.device)
    tile = _tile(rows, width)
    kernel: Any = _cell_input
    kernel[triton.cdiv(rows, tile["BR"]),](
        memory.contiguous(), token, table, out, out if squares is None else squares,
        rows, token.stride(0), MEASURE=squares is not None, L=length, W=width,
        **dependent_launch(out, rows, first=True), **tile,
    )  # fmt: skip
    return Rows(out, squares)


def two_norms(x: Float[Tensor, "R W"], gain: Float[Tensor, " W"]) -> Float[Tensor, "R W"]:
    """The stack's last norm, then the memory's, which has no gain."""
    rows, width = x.shape
    out = torch.empty_like(x)
    tile = _tile(rows, width)
    kernel: Any = _two_norms
    kernel[triton.cdiv(rows, tile["BR"]),](
        x, gain, out, rows, RMS_EPSILON, W=width, **dependent_launch(x, rows), **tile
    )
    return out


class InferenceCell:
    """`TransformerCell.forward` without autograd, if memory and stack have the same width."""

    def __init__(self, embedding: nn.Embedding, fast: InferenceStack) -> None:
        self.embedding = embedding
        self.fast = fast

    def serves(self, memory: Float[Tensor, "B M D"]) -> bool:
        """Whether [memory, token] fits into a tile."""
        return memory.shape[1] < LIMITS.max_length

    @torch.no_grad()
    def __call__(
        self, memory: Float[Tensor, "B M D"], token: Int[Tensor, " B"]
    ) -> Float[Tensor, "B M D"]:
        """One step of the recurrence."""
        tokens = memory.shape[1]
        x = cell_input(memory, token, self.embedding.weight)
        x = self.fast.stream(x, tokens + 1, slice(tokens), causal=False, first=False)
        return two_norms(x, self.fast.stack.norm.weight).view(memory.shape)


class KernelSampler:
    """`Sampler.__call__` at a temperature above 0, without top-k or top-p.

    `plain` is the original sampler, for vocabularies larger than a tile.
    """

    def __init__(self, plain: Choose, temperature: float, allowed: int) -> None:
        self.plain = plain
        self.temperature = temperature
        self.allowed = allowed

    def __call__(
        self, logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]
    ) -> Int[Tensor, " B"]:
        """One token per row; `uniform` is uniform in [0, 1)."""
        rows, symbols = logits.shape
        symbols = min(symbols, self.allowed or symbols)
        if symbols > MAX_SYMBOLS:
            return self.plain(logits, uniform)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        span = max(32, triton.next_power_of_2(symbols))
        out = torch.empty(rows, dtype=torch.long, device=logits.device)
        kernel: Any = _sample
        kernel[rows,](
            logits, uniform, out, logits.stride(0), uniform.stride(0),
            LOG2_E.value / self.temperature,
            V=symbols, BV=span, num_warps=min(8, max(1, span // 256)),
        )  # fmt: skip
        return out
