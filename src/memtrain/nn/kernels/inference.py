"""A Transformer stack without autograd in five kernels a block, for rollouts of few rows.

One recurrent step is a chain of small products: what counts is how many kernels stand in the
chain. Norms are folded into the product that reads them, bias and GELU into the one that makes
them, residuals into the one that ends them; many short sequences share a tile of attention.
Products are taken in bf16 and summed in fp32, the residual stream is fp32, as under autocast.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.nn.blocks import RMS_EPSILON, Block, Stack
from memtrain.nn.kernels.attention import LOG2_E

PRODUCTS = torch.bfloat16
"""The precision in which products are taken and what lies between them is written."""
LONGEST = 128
"""Positions in a sequence that one tile of attention holds."""
MOST_ROWS = 2**16
"""Above this, plain products fill the device and launches cost nothing."""


@triton.jit
def load_turned(x, rows, row_stride, there, cosine, sine, positions, E: tl.constexpr):
    """Rows of one head, (R, E) in fp32, turned by the angles of their positions."""
    column = tl.arange(0, E)
    partner = column ^ (E // 2)
    mask = there[:, None]
    own = tl.load(x + rows[:, None] * row_stride + column, mask=mask, other=0.0)
    other = tl.load(x + rows[:, None] * row_stride + partner, mask=mask, other=0.0)
    half = column % (E // 2)
    angle = positions[:, None] * (E // 2) + half
    c = tl.load(cosine + angle, mask=mask, other=0.0)
    s = tl.load(sine + angle, mask=mask, other=0.0)
    sign = tl.where(column < E // 2, -1.0, 1.0)
    return own.to(tl.float32) * c + other.to(tl.float32) * s * sign


@triton.jit
def _norm_linear(
    x,
    gain,
    weight,
    bias,
    out,
    rows,
    epsilon,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BIAS_GELU: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
):
    """out = norm(x) W^T, or GELU(norm(x) W^T + b): the norm's scale is applied at the end."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BO + tl.arange(0, BO)
    row_there = row[:, None] < rows
    total = tl.zeros((BR, BO), tl.float32)
    square = tl.zeros((BR,), tl.float32)
    for start in range(0, INNER, BI):
        inner = start + tl.arange(0, BI)
        inside = inner < INNER
        part = tl.load(
            x + row[:, None].to(tl.int64) * INNER + inner, mask=row_there & inside, other=0.0
        ).to(tl.float32)
        g = tl.load(gain + inner, mask=inside, other=0.0)
        w = tl.load(
            weight + column[None, :] * INNER + inner[:, None],
            mask=(column[None, :] < OUTER) & inside[:, None],
            other=0.0,
        )
        square += tl.sum(part * part, 1)
        total = tl.dot((part * g).to(w.dtype), w, total)
    total *= tl.rsqrt(square / INNER + epsilon)[:, None]
    there = row_there & (column[None, :] < OUTER)
    if BIAS_GELU:
        total += tl.load(bias + column, mask=column < OUTER, other=0.0)[None, :]
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    at = out + row[:, None].to(tl.int64) * OUTER + column
    tl.store(at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _linear_residual(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    length,
    kept,
    first,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BIAS: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
):
    """out = residual + x W^T (+ b), at the kept positions of every sequence."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BO + tl.arange(0, BO)
    row_there = row[:, None] < rows
    source = ((row // kept) * length + first + row % kept).to(tl.int64)
    total = tl.zeros((BR, BO), tl.float32)
    for start in range(0, INNER, BI):
        inner = start + tl.arange(0, BI)
        inside = inner < INNER
        part = tl.load(x + source[:, None] * INNER + inner, mask=row_there & inside, other=0.0)
        w = tl.load(
            weight + column[None, :] * INNER + inner[:, None],
            mask=(column[None, :] < OUTER) & inside[:, None],
            other=0.0,
        )
        total = tl.dot(part, w, total)
    if BIAS:
        total += tl.load(bias + column, mask=column < OUTER, other=0.0)[None, :]
    there = row_there & (column[None, :] < OUTER)
    total += tl.load(residual + source[:, None] * OUTER + column, mask=there, other=0.0)
    tl.store(out + row[:, None].to(tl.int64) * OUTER + column, total, mask=there)


@triton.jit
def _group_attention(
    qkv,
    out,
    cosine,
    sine,
    rows,
    scale,
    H: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    BR: tl.constexpr,
):
    """One head of GROUP whole sequences in one tile; positions see their own sequence only."""
    local = tl.arange(0, BR)
    row = tl.program_id(0).to(tl.int64) * (GROUP * L) + local
    there = (local < GROUP * L) & (row < rows)
    position = local % L
    head, stride = tl.program_id(1), 3 * H * E
    kind = qkv.dtype.element_ty
    at = qkv + head * E
    q = load_turned(at, row, stride, there, cosine, sine, position, E)
    q = (q * (scale * LOG2_E)).to(kind)
    k = load_turned(at + H * E, row, stride, there, cosine, sine, position, E).to(kind)
    seen = (local // L)[:, None] == (local // L)[None, :]
    if CAUSAL:
        seen = seen & (position[None, :] <= position[:, None])
    score = tl.where(seen, tl.dot(q, tl.trans(k)), -1e30)
    weight = tl.exp2(score - tl.max(score, 1)[:, None])
    column = tl.arange(0, E)
    where = row[:, None]
    v = tl.load(at + 2 * H * E + where * stride + column, mask=there[:, None], other=0.0)
    mixed = tl.dot(weight.to(kind), v) / tl.sum(weight, 1)[:, None]
    tl.store(out + where * (H * E) + head * E + column, mixed.to(kind), mask=there[:, None])


# ---------------------------------------------------------------------------------------- launch


def tiles(rows: int, outer: int) -> dict[str, int]:
    """Tiles of a product: small ones while the device is not full."""
    if rows <= 32:
        return {"BR": 32 if rows > 16 else 16, "BO": 32, "BI": 128, "num_warps": 4}
    if rows * outer <= 2**20:
        return {"BR": 32, "BO": 64, "BI": 128, "num_warps": 4}
    if rows <= 8192:
        return {"BR": 64, "BO": 128, "BI": 64, "num_warps": 4}
    return {"BR": 128, "BO": 128, "BI": 64, "num_warps": 8}


def norm_linear(
    x: Tensor,
    gain: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """norm(x) W^T; with a bias, GELU of it. x is (R, I) fp32, weight (O, I) bf16."""
    rows, inner = x.shape
    outer = len(weight)
    out = x.new_empty(rows, outer, dtype=dtype or PRODUCTS)
    tile = tiles(rows, outer)
    _norm_linear[triton.cdiv(rows, tile["BR"]), triton.cdiv(outer, tile["BO"])](
        x,
        gain,
        weight,
        gain if bias is None else bias,
        out,
        rows,
        RMS_EPSILON,
        INNER=inner,
        OUTER=outer,
        BIAS_GELU=bias is not None,
        **tile,
    )
    return out


def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, length: int, keep: range
) -> Tensor:
    """residual + x W^T at the kept positions of sequences of the given length, (R', O) fp32."""
    outer, inner = weight.shape
    rows = len(x) // length * len(keep)
    out = residual.new_empty(rows, outer)
    tile = tiles(rows, outer)
    _linear_residual[triton.cdiv(rows, tile["BR"]), triton.cdiv(outer, tile["BO"])](
        x,
        weight,
        residual if bias is None else bias,
        residual,
        out,
        rows,
        length,
        len(keep),
        keep.start,
        INNER=inner,
        OUTER=outer,
        BIAS=bias is not None,
        **tile,
    )
    return out


def group_attention(
    qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, length: int, causal: bool
) -> Tensor:
    """Attention inside each of R / length sequences, (R, 3·H·E) -> (R, H·E)."""
    rows, inner = qkv.shape
    head_dim = inner // 3 // heads
    out = qkv.new_empty(rows, inner // 3)
    count = rows // length
    tile = max(16, triton.next_power_of_2(length))
    while tile < 64 and tile // length < count:
        tile *= 2
    group = tile // length
    _group_attention[triton.cdiv(count, group), heads](
        qkv,
        out,
        cosine,
        sine,
        rows,
        1 / math.sqrt(head_dim),
        H=heads,
        L=length,
        E=head_dim,
        GROUP=group,
        CAUSAL=causal,
        BR=tile,
        num_warps=4 if tile >= 64 else 2,
    )
    return out


class InferenceStack:
    """`Stack.forward` for short sequences, without autograd; its weights are copies in bf16.

    `refresh` copies them anew after the stack has trained.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.blocks = [block for block in stack.blocks if isinstance(block, Block)]
        matrices = [_matrices(block) for block in self.blocks]
        # Detached: a copy that autograd remembers would tie a parameter's gradient to this stream.
        self.sources = [matrix.detach() for block in matrices for matrix in block]
        self.copies = [matrix.to(PRODUCTS) for matrix in self.sources]

    @torch.no_grad()
    def refresh(self) -> None:
        torch._foreach_copy_(self.copies, self.sources)

    def serves(self, x: Tensor) -> bool:
        """Whether the sequences are short enough for a tile, and few enough to gain by it."""
        return x.shape[1] <= LONGEST and len(x) * x.shape[1] <= MOST_ROWS

    @torch.no_grad()
    def __call__(self, x: Tensor, keep: slice, causal: bool) -> Tensor:
        """The residual stream after the last block at the kept positions, before the last norm."""
        count, length, width = x.shape
        positions = range(length)
        x = x.reshape(count * length, width).float()
        for index, block in enumerate(self.blocks):
            last = index == len(self.blocks) - 1
            kept = positions[keep] if last else positions
            project_in, project_out, rise, fall = self.copies[4 * index : 4 * index + 4]
            qkv = norm_linear(x, block.attention_norm.weight, project_in)
            mixed = group_attention(
                qkv,
                self.stack.rotary.cosine,
                self.stack.rotary.sine,
                block.attention.heads,
                length,
                causal,
            )
            x = linear_residual(mixed, project_out, None, x, length, kept)
            up, _, down = block.mlp
            hidden = norm_linear(x, block.mlp_norm.weight, rise, up.bias)
            x = linear_residual(hidden, fall, down.bias, x, 1, range(1))
        return x.unflatten(0, (count, -1))


def _matrices(block: Block) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    up, _, down = block.mlp
    attention = block.attention
    return attention.project_in.weight, attention.project_out.weight, up.weight, down.weight
