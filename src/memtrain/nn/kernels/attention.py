"""Attention with rotary positions inside: one kernel forward, two backward.

The heads stay where the projection put them, side by side in the last dimension, and are turned
as they are read: no transposed or turned copy is ever written. Sequences here are short (272, 79
and 17 rows at the paper's size), where that traffic costs as much as the attention itself. The
reference is `nn.blocks.Attention.forward`, which every kernel is tested against.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


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
def _store_turned_back(
    x, gradient, rows, row_stride, there, cosine, sine, positions, R: tl.constexpr, E: tl.constexpr
):
    """Write the gradient of rows that were turned when they were read."""
    half = tl.arange(0, E // 2)
    mask = there[:, None]
    left, right = tl.split(tl.permute(tl.reshape(gradient, (R, 2, E // 2)), (0, 2, 1)))
    angle = positions[:, None] * (E // 2) + half
    c = tl.load(cosine + angle, mask=mask, other=0.0)
    s = tl.load(sine + angle, mask=mask, other=0.0)
    at = x + rows[:, None] * row_stride + half
    kind = x.dtype.element_ty
    tl.store(at, (left * c + right * s).to(kind), mask=mask)
    tl.store(at + E // 2, (right * c - left * s).to(kind), mask=mask)


@triton.jit
def _load(x, rows, row_stride, there, E: tl.constexpr):
    column = tl.arange(0, E)
    return tl.load(x + rows[:, None] * row_stride + column, mask=there[:, None], other=0.0)


@triton.jit
def _forward(
    query,
    key,
    value,
    out,
    log_sum,
    cosine,
    sine,
    query_stride,
    key_stride,
    first,
    scale,
    H: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Programs: blocks of queries x (rows of the batch x heads)."""
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = row_head // H, row_head % H
    query += row * Q * query_stride + head * E
    key += row * K * key_stride + head * E
    value += row * K * key_stride + head * E

    q_row = block * BQ + tl.arange(0, BQ)
    q_there = q_row < Q
    kind = query.dtype.element_ty
    q = load_turned(query, q_row, query_stride, q_there, cosine, sine, first + q_row, E)
    q = (q * (scale * LOG2_E)).to(kind)

    best = tl.full((BQ,), -1e30, tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    mixed = tl.zeros((BQ, E), tl.float32)
    for start in range(0, K, BK):
        k_row = start + tl.arange(0, BK)
        k_there = k_row < K
        k = load_turned(key, k_row, key_stride, k_there, cosine, sine, k_row, E).to(kind)
        score = tl.dot(q, tl.trans(k))
        seen = k_there[None, :]
        if CAUSAL:
            seen = seen & (k_row[None, :] <= first + q_row[:, None])
        score = tl.where(seen, score, -1e30)
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.where(seen, tl.exp2(score - higher[:, None]), 0.0)
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weight, 1)
        v = _load(value, k_row, key_stride, k_there, E)
        mixed = tl.dot(weight.to(kind), v, mixed * shrink[:, None])
        best = higher

    column = tl.arange(0, E)
    at = out + (row * Q + q_row[:, None]) * (H * E) + head * E + column
    tl.store(at, (mixed / total[:, None]).to(kind), mask=q_there[:, None])
    tl.store(log_sum + row_head * Q + q_row, best + tl.log2(total), mask=q_there)


@triton.jit
def _backward_keys(
    query,
    key,
    value,
    out_gradient,
    log_sum,
    delta,
    key_gradient,
    value_gradient,
    cosine,
    sine,
    query_stride,
    key_stride,
    first,
    scale,
    H: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of a block of keys and values, over all queries."""
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = row_head // H, row_head % H
    query += row * Q * query_stride + head * E
    key += row * K * key_stride + head * E
    value += row * K * key_stride + head * E
    out_gradient += row * Q * (H * E) + head * E

    k_row = block * BK + tl.arange(0, BK)
    k_there = k_row < K
    kind = query.dtype.element_ty
    k = load_turned(key, k_row, key_stride, k_there, cosine, sine, k_row, E).to(kind)
    v = _load(value, k_row, key_stride, k_there, E)
    dk = tl.zeros((BK, E), tl.float32)
    dv = tl.zeros((BK, E), tl.float32)
    for start in range(0, Q, BQ):
        q_row = start + tl.arange(0, BQ)
        q_there = q_row < Q
        q = load_turned(query, q_row, query_stride, q_there, cosine, sine, first + q_row, E)
        q = (q * (scale * LOG2_E)).to(kind)
        do = _load(out_gradient, q_row, H * E, q_there, E)
        top = tl.load(log_sum + row_head * Q + q_row, mask=q_there, other=0.0)
        offset = tl.load(delta + row_head * Q + q_row, mask=q_there, other=0.0)
        seen = q_there[None, :]
        if CAUSAL:
            seen = seen & (k_row[:, None] <= first + q_row[None, :])
        weight = tl.where(seen, tl.exp2(tl.dot(k, tl.trans(q)) - top[None, :]), 0.0)  # (BK, BQ)
        dv = tl.dot(weight.to(kind), do, dv)
        ds = weight * (tl.dot(v, tl.trans(do)) - offset[None, :])
        dk = tl.dot(ds.to(kind), q, dk)

    # q carried scale · log2(e); the gradient wants scale alone.
    gradient = key_gradient + row * K * key_stride + head * E
    _store_turned_back(
        gradient, dk / LOG2_E, k_row, key_stride, k_there, cosine, sine, k_row, BK, E
    )
    column = tl.arange(0, E)
    at = value_gradient + (row * K + k_row[:, None]) * key_stride + head * E + column
    tl.store(at, dv.to(kind), mask=k_there[:, None])


@triton.jit
def _backward_queries(
    query,
    key,
    value,
    out_gradient,
    log_sum,
    delta,
    query_gradient,
    cosine,
    sine,
    query_stride,
    key_stride,
    first,
    scale,
    H: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of a block of queries, over all keys."""
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = row_head // H, row_head % H
    query += row * Q * query_stride + head * E
    key += row * K * key_stride + head * E
    value += row * K * key_stride + head * E
    out_gradient += row * Q * (H * E) + head * E

    q_row = block * BQ + tl.arange(0, BQ)
    q_there = q_row < Q
    kind = query.dtype.element_ty
    q = load_turned(query, q_row, query_stride, q_there, cosine, sine, first + q_row, E)
    q = (q * (scale * LOG2_E)).to(kind)
    do = _load(out_gradient, q_row, H * E, q_there, E)
    top = tl.load(log_sum + row_head * Q + q_row, mask=q_there, other=0.0)
    offset = tl.load(delta + row_head * Q + q_row, mask=q_there, other=0.0)
    dq = tl.zeros((BQ, E), tl.float32)
    for start in range(0, K, BK):
        k_row = start + tl.arange(0, BK)
        k_there = k_row < K
        k = load_turned(key, k_row, key_stride, k_there, cosine, sine, k_row, E).to(kind)
        v = _load(value, k_row, key_stride, k_there, E)
        seen = k_there[None, :]
        if CAUSAL:
            seen = seen & (k_row[None, :] <= first + q_row[:, None])
        weight = tl.where(seen, tl.exp2(tl.dot(q, tl.trans(k)) - top[:, None]), 0.0)
        ds = weight * (tl.dot(do, tl.trans(v)) - offset[:, None])
        dq = tl.dot(ds.to(kind), k, dq)

    gradient = query_gradient + row * Q * query_stride + head * E
    _store_turned_back(
        gradient,
        dq * scale,
        q_row,
        query_stride,
        q_there,
        cosine,
        sine,
        first + q_row,
        BQ,
        E,
    )


@triton.jit
def _delta(
    out,
    out_gradient,
    delta,
    H: tl.constexpr,
    Q: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
):
    """Sum over a head of out · its gradient, for every query."""
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = row_head // H, row_head % H
    q_row = block * B + tl.arange(0, B)
    there = q_row < Q
    base = row * Q * (H * E) + head * E
    o = _load(out + base, q_row, H * E, there, E).to(tl.float32)
    do = _load(out_gradient + base, q_row, H * E, there, E).to(tl.float32)
    tl.store(delta + row_head * Q + q_row, tl.sum(o * do, 1), mask=there)


# ---------------------------------------------------------------------------------------- launch


def tiles(own: int, others: int) -> tuple[int, int, dict[str, int]]:
    """Sizes of a program's own block and of those it goes over, and how it is run.

    Short sequences are one block; of long ones a program owns 64 rows, as many as a warp group's
    product has, and goes over the rest in pieces that waste little of the last.
    """
    sizes = [min(64, max(16, triton.next_power_of_2(count))) for count in (own, others)]
    short = max(own, others) <= 32
    how = {"num_warps": 2, "num_stages": 1} if short else {"num_warps": 4, "num_stages": 2}
    return sizes[0], sizes[1], how


class Heads:
    """Queries, keys and values of all heads as views, and what every launch says of them."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, heads: int, first: int, causal: bool
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.first = first
        self.rows, self.queries, inner = query.shape
        self.keys = key.shape[1]
        self.heads, self.head_dim = heads, inner // heads
        self.causal = causal

    @classmethod
    def packed(cls, qkv: Tensor, heads: int, causal: bool) -> "Heads":
        query, key, value = qkv.chunk(3, dim=-1)
        return cls(query, key, value, heads, 0, causal)

    @classmethod
    def split(
        cls, query: Tensor, key_value: Tensor, heads: int, first: int, causal: bool
    ) -> "Heads":
        key, value = key_value.chunk(2, dim=-1)
        return cls(query, key, value, heads, first, causal)

    def arguments(self, cosine: Tensor, sine: Tensor) -> tuple:
        """From the tables on, in the order of the kernels' signatures."""
        return (
            cosine,
            sine,
            self.query.stride(1),
            self.key.stride(1),
            self.first,
            1 / math.sqrt(self.head_dim),
        )

    def constants(self) -> dict[str, int]:
        return {
            "H": self.heads,
            "Q": self.queries,
            "K": self.keys,
            "E": self.head_dim,
            "CAUSAL": self.causal,
        }


def run_forward(heads: Heads, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """The heads' weighted sums side by side (N, Q, H·E), and log2 of the weights' sums."""
    query = heads.query
    out = query.new_empty(heads.rows, heads.queries, heads.heads * heads.head_dim)
    log_sum = query.new_empty(heads.rows, heads.heads, heads.queries, dtype=torch.float32)
    own, others, how = tiles(heads.queries, heads.keys)
    _forward[triton.cdiv(heads.queries, own), heads.rows * heads.heads](
        query,
        heads.key,
        heads.value,
        out,
        log_sum,
        *heads.arguments(cosine, sine),
        **heads.constants(),
        BQ=own,
        BK=others,
        **how,
    )
    return out, log_sum


def run_backward(
    heads: Heads,
    gradients: Heads,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
    cosine: Tensor,
    sine: Tensor,
) -> None:
    """Fill the gradients, laid out as the heads are."""
    out_gradient = out_gradient.contiguous()
    delta = torch.empty_like(log_sum)
    constants, rows = heads.constants(), heads.rows * heads.heads
    size = {"H": heads.heads, "Q": heads.queries, "E": heads.head_dim}
    _delta[triton.cdiv(heads.queries, 32), rows](out, out_gradient, delta, B=32, **size)
    given = (heads.query, heads.key, heads.value, out_gradient, log_sum, delta)
    arguments = heads.arguments(cosine, sine)
    own, others, how = tiles(heads.keys, heads.queries)
    _backward_keys[triton.cdiv(heads.keys, own), rows](
        *given, gradients.key, gradients.value, *arguments, **constants, BK=own, BQ=others, **how
    )
    own, others, how = tiles(heads.queries, heads.keys)
    _backward_queries[triton.cdiv(heads.queries, own), rows](
        *given, gradients.query, *arguments, **constants, BQ=own, BK=others, **how
    )


# ------------------------------------------------------------------------------- torch operators


@torch.library.custom_op("memtrain::attend", mutates_args=())
def attend(
    qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of all positions, from one projection (N, L, 3·H·E)."""
    return run_forward(Heads.packed(qkv, heads, causal), cosine, sine)


@attend.register_fake
def _(qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, causal: bool) -> tuple[Tensor, Tensor]:
    rows, length, inner = qkv.shape
    out = qkv.new_empty(rows, length, inner // 3)
    return out, qkv.new_empty(rows, heads, length, dtype=torch.float32)


@torch.library.custom_op("memtrain::attend_backward", mutates_args=())
def attend_backward(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    causal: bool,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
) -> Tensor:
    gradient = torch.empty_like(qkv)
    run_backward(
        Heads.packed(qkv, heads, causal),
        Heads.packed(gradient, heads, causal),
        out,
        log_sum,
        out_gradient,
        cosine,
        sine,
    )
    return gradient


@attend_backward.register_fake
def _(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    causal: bool,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
) -> Tensor:
    return torch.empty_like(qkv)


def _attend_context(ctx, inputs, output) -> None:
    qkv, cosine, sine, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(qkv, cosine, sine, *output)


def _attend_gradient(ctx, out_gradient, _):
    qkv, cosine, sine, out, log_sum = ctx.saved_tensors
    gradient = attend_backward(qkv, cosine, sine, ctx.heads, ctx.causal, out, log_sum, out_gradient)
    return gradient, None, None, None, None


attend.register_autograd(_attend_gradient, setup_context=_attend_context)


@torch.library.custom_op("memtrain::attend_some", mutates_args=())
def attend_some(
    query: Tensor,
    key_value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    first: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of the Q positions from `first` on, (N, Q, H·E), to all, (N, K, 2·H·E)."""
    return run_forward(Heads.split(query, key_value, heads, first, causal), cosine, sine)


@attend_some.register_fake
def _(
    query: Tensor,
    key_value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    first: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    rows, queries, _ = query.shape
    return torch.empty_like(query), query.new_empty(rows, heads, queries, dtype=torch.float32)


@torch.library.custom_op("memtrain::attend_some_backward", mutates_args=())
def attend_some_backward(
    query: Tensor,
    key_value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    first: int,
    causal: bool,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    gradients = torch.empty_like(query), torch.empty_like(key_value)
    run_backward(
        Heads.split(query, key_value, heads, first, causal),
        Heads.split(*gradients, heads, first, causal),
        out,
        log_sum,
        out_gradient,
        cosine,
        sine,
    )
    return gradients


@attend_some_backward.register_fake
def _(
    query: Tensor,
    key_value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    first: int,
    causal: bool,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key_value)


def _attend_some_context(ctx, inputs, output) -> None:
    query, key_value, cosine, sine, ctx.heads, ctx.first, ctx.causal = inputs
    ctx.save_for_backward(query, key_value, cosine, sine, *output)


def _attend_some_gradient(ctx, out_gradient, _):
    query, key_value, cosine, sine, out, log_sum = ctx.saved_tensors
    gradients = attend_some_backward(
        query, key_value, cosine, sine, ctx.heads, ctx.first, ctx.causal, out, log_sum, out_gradient
    )
    return *gradients, None, None, None, None, None


attend_some.register_autograd(_attend_some_gradient, setup_context=_attend_some_context)


class KernelAttention:
    """What `nn.blocks.Attention` calls in the place of its reference."""

    def whole(self, qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, causal: bool) -> Tensor:
        return attend(qkv, cosine, sine, heads, causal)[0]

    def some(
        self,
        query: Tensor,
        key_value: Tensor,
        cosine: Tensor,
        sine: Tensor,
        heads: int,
        first: int,
        causal: bool,
    ) -> Tensor:
        return attend_some(query, key_value, cosine, sine, heads, first, causal)[0]
