"""Attention with rotary positions for sequences whose keys fit on one chip's tile.

Sequences here are short (272, 79 and 17 rows at the paper's size), so one program holds all keys
and values of a head and goes over the queries once, with no running maximum. The heads stay where
the projection put them, side by side in the last dimension; queries and keys are turned as they are
read, gradients turned back as they are written. The reference is `nn.blocks.Attention.forward`.

A length is taken as a power of two and a tail, 272 as 256 + 16: tiles are powers of two, and a
padded one would waste half of the work.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.nn.kernels.functions import HIDE, LOG2_E

LONGEST = 320
"""Keys that a program can hold; longer sequences take the reference."""


# --------------------------------------------------------------------------------------- turning


@triton.jit
def _load_turned(
    x, rows, stride, limit, cosine, sine, positions, scale, kept, kept_stride,
    MASKED: tl.constexpr, KEEP: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The left and right half of rows of one head, turned by the angles of their positions and
    scaled; kept for the backward pass if it will come."""
    half = tl.arange(0, E // 2)
    there = (rows < limit)[:, None]
    angle = positions[:, None] * (E // 2) + half
    at = x + rows[:, None] * stride + half
    if MASKED:
        c = tl.load(cosine + angle, mask=there, other=0.0)
        s = tl.load(sine + angle, mask=there, other=0.0)
        left = tl.load(at, mask=there, other=0.0).to(tl.float32)
        right = tl.load(at + E // 2, mask=there, other=0.0).to(tl.float32)
    else:
        c, s = tl.load(cosine + angle), tl.load(sine + angle)
        left, right = tl.load(at).to(tl.float32), tl.load(at + E // 2).to(tl.float32)
    kind = x.dtype.element_ty
    turned_left = ((left * c - right * s) * scale).to(kind)
    turned_right = ((right * c + left * s) * scale).to(kind)
    if KEEP:
        to = kept + rows[:, None] * kept_stride + half
        tl.store(to, turned_left, mask=there)
        tl.store(to + E // 2, turned_right, mask=there)
    return turned_left, turned_right


@triton.jit
def _store_turned_back(
    x, gradient, rows, row_stride, there, cosine, sine, positions, R: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """Write the gradient, (R, E), of rows that were turned when they were read."""
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
def _load(x, rows, row_stride, limit, MASKED: tl.constexpr, E: tl.constexpr):
    at = x + rows[:, None] * row_stride + tl.arange(0, E)
    if MASKED:
        return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    return tl.load(at)


# --------------------------------------------------------------------------------------- forward


@triton.jit(do_not_specialize=["queries"])
def _forward(
    query,
    key,
    value,
    turned_query,
    turned_key,
    out,
    log_sum,
    cosine,
    sine,
    query_stride,
    key_stride,
    first,
    queries,
    scale,
    H: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEEP: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BQ: tl.constexpr,
):
    """A program has one head of one row of the batch."""
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // H, row_head % H
    inner: tl.constexpr = H * E
    query += row * Q * query_stride + head * E
    key += row * K * key_stride + head * E
    value += row * K * key_stride + head * E
    turned_query += row * Q * inner + head * E
    turned_key += row * K * inner + head * E
    out += row * Q * inner + head * E
    log_sum += row_head * Q

    main = tl.arange(0, MAIN)
    k_left, k_right = _load_turned(
        key, main, key_stride, K, cosine, sine, main, 1.0, turned_key, inner, MAIN > K, KEEP, E
    )
    v = _load(value, main, key_stride, K, MAIN > K, E)
    tail = MAIN + tl.arange(0, TAIL if TAIL else 16)
    if TAIL:
        tail_left, tail_right = _load_turned(
            key, tail, key_stride, K, cosine, sine, tail, 1.0, turned_key, inner, True, KEEP, E
        )
        v_tail = _load(value, tail, key_stride, K, True, E)
    kind = query.dtype.element_ty
    for start in range(0, queries if HIDE else Q, BQ):
        rows = start + tl.arange(0, BQ)
        q_left, q_right = _load_turned(
            query, rows, query_stride, Q, cosine, sine, first + rows, scale, turned_query, inner,
            Q % BQ != 0, KEEP, E,
        )  # fmt: skip
        score = tl.dot(q_right, tl.trans(k_right), tl.dot(q_left, tl.trans(k_left)))
        if MAIN > K:
            score = tl.where((main < K)[None, :], score, -1e30)
        if CAUSAL:
            score = tl.where(main[None, :] <= first + rows[:, None], score, -1e30)
        best = tl.max(score, 1)
        if TAIL:
            score_tail = tl.dot(q_right, tl.trans(tail_right), tl.dot(q_left, tl.trans(tail_left)))
            seen = (tail < K)[None, :]
            if CAUSAL:
                seen = seen & (tail[None, :] <= first + rows[:, None])
            score_tail = tl.where(seen, score_tail, -1e30)
            best = tl.maximum(best, tl.max(score_tail, 1))
            weight = tl.exp2(score - best[:, None])
            weight_tail = tl.exp2(score_tail - best[:, None])
            total = tl.sum(weight, 1) + tl.sum(weight_tail, 1)
            mixed = tl.dot(weight_tail.to(kind), v_tail)
            mixed = tl.dot(weight.to(kind), v, mixed)
        else:
            weight = tl.exp2(score - best[:, None])
            total = tl.sum(weight, 1)
            mixed = tl.dot(weight.to(kind), v)
        at = out + rows[:, None] * inner + tl.arange(0, E)
        tl.store(at, (mixed / total[:, None]).to(kind), mask=(rows < Q)[:, None])
        if KEEP:
            tl.store(log_sum + rows, best + tl.log2(total), mask=rows < Q)


# -------------------------------------------------------------------------------------- backward

# Short sequences have one tile a head, and one program makes all three gradients. Longer ones are
# gone over twice: by programs that hold queries, and by programs that hold keys. The weights are
# made twice then, but no program waits for another, and no sum leaves the registers.


@triton.jit
def _backward_short(
    query, key, value, out, out_gradient, log_sum, query_gradient, key_gradient, value_gradient,
    cosine, sine, value_stride, query_gradient_stride, key_gradient_stride, first, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """All gradients of one head of one row of the batch. Scores lie transposed, keys x queries."""
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // H, row_head % H
    inner: tl.constexpr = H * E
    at_queries, at_keys = row * Q * inner + head * E, row * K * inner + head * E
    rows, keys = tl.arange(0, BQ), tl.arange(0, BK)
    q = _load(query + at_queries, rows, inner, Q, BQ > Q, E)
    do = _load(out_gradient + at_queries, rows, inner, Q, BQ > Q, E)
    o = _load(out + at_queries, rows, inner, Q, BQ > Q, E)
    k = _load(key + at_keys, keys, inner, K, BK > K, E)
    v = _load(value + row * K * value_stride + head * E, keys, value_stride, K, BK > K, E)
    offset = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Rows that are not there weigh nothing.
    top = tl.load(log_sum + row_head * Q + rows, mask=rows < Q, other=1e30)
    weight = tl.exp2(tl.dot(k, tl.trans(q)) - top[None, :])
    if BK > K:
        weight = tl.where((keys < K)[:, None], weight, 0.0)
    if CAUSAL:
        weight = tl.where(keys[:, None] <= first + rows[None, :], weight, 0.0)
    ds = (weight * (tl.dot(v, tl.trans(do)) - offset[None, :])).to(k.dtype)
    dq = tl.dot(tl.trans(k), ds)  # (E, BQ)
    _store_turned_back(
        query_gradient + row * Q * query_gradient_stride + head * E, tl.trans(dq) * scale, rows,
        query_gradient_stride, rows < Q, cosine, sine, first + rows, BQ, E,
    )  # fmt: skip
    of_keys = row * K * key_gradient_stride + head * E
    _store_keys(
        key_gradient + of_keys, value_gradient + of_keys, tl.dot(ds, q),
        tl.dot(weight.to(do.dtype), do), keys, key_gradient_stride, keys < K, cosine, sine, BK, E,
    )  # fmt: skip


@triton.jit
def _store_keys(
    key_gradient, value_gradient, dk, dv, keys, stride, there, cosine, sine,
    BK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Queries carried scale · log2(e); the gradient of the keys wants scale alone."""
    _store_turned_back(
        key_gradient, dk / LOG2_E, keys, stride, there, cosine, sine, keys, BK, E
    )  # fmt: skip
    at = value_gradient + keys[:, None] * stride + tl.arange(0, E)
    tl.store(at, dv.to(value_gradient.dtype.element_ty), mask=there[:, None])


@triton.jit
def _score_gradient(
    q, do, k, v, top, offset, rows, keys, first,
    K: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradient of scores, queries x keys."""
    weight = tl.exp2(tl.dot(q, tl.trans(k)) - top[:, None])
    if MASKED:
        weight = tl.where((keys < K)[None, :], weight, 0.0)
    if CAUSAL:
        weight = tl.where(keys[None, :] <= first + rows[:, None], weight, 0.0)
    return (weight * (tl.dot(do, tl.trans(v)) - offset[:, None])).to(k.dtype)


@triton.jit(do_not_specialize=["keys"])
def _backward_queries(
    query, key, value, out, out_gradient, log_sum, query_gradient, delta, cosine, sine,
    value_stride, query_gradient_stride, first, keys, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of BQ queries of one head, and for the keys' programs the sums over
    out · its gradient (`delta`). `keys` is MAIN, kept from the compiler (see HIDE)."""
    row_head = tl.program_id(1).to(tl.int64)
    row, head = row_head // H, row_head % H
    inner: tl.constexpr = H * E
    at_queries = row * Q * inner + head * E
    key += row * K * inner + head * E
    value += row * K * value_stride + head * E
    rows = tl.program_id(0) * BQ + tl.arange(0, BQ)
    there = rows < Q
    q = _load(query + at_queries, rows, inner, Q, Q % BQ != 0, E)
    do = _load(out_gradient + at_queries, rows, inner, Q, Q % BQ != 0, E)
    o = _load(out + at_queries, rows, inner, Q, Q % BQ != 0, E)
    offset = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + row_head * Q + rows, offset, mask=there)
    top = tl.load(log_sum + row_head * Q + rows, mask=there, other=1e30)
    dq = tl.zeros((BQ, E), tl.float32)
    for start in range(0, keys if HIDE else MAIN, BK):
        at = start + tl.arange(0, BK)
        k = _load(key, at, inner, K, MAIN > K, E)
        v = _load(value, at, value_stride, K, MAIN > K, E)
        ds = _score_gradient(q, do, k, v, top, offset, rows, at, first, K, MAIN > K, CAUSAL)
        dq = tl.dot(ds, k, dq)
    if TAIL:
        at = MAIN + tl.arange(0, TAIL)
        k = _load(key, at, inner, K, True, E)
        v = _load(value, at, value_stride, K, True, E)
        ds = _score_gradient(q, do, k, v, top, offset, rows, at, first, K, True, CAUSAL)
        dq = tl.dot(ds, k, dq)
    _store_turned_back(
        query_gradient + row * Q * query_gradient_stride + head * E, dq * scale, rows,
        query_gradient_stride, there, cosine, sine, first + rows, BQ, E,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries"])
def _backward_keys(
    query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient, cosine, sine,
    value_stride, key_gradient_stride, first, queries,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, PQ: tl.constexpr,
):  # fmt: skip
    """The gradients of BK keys and values of one head, or those of its tail."""
    row_head = tl.program_id(1).to(tl.int64)
    row, head = row_head // H, row_head % H
    inner: tl.constexpr = H * E
    query += row * Q * inner + head * E
    out_gradient += row * Q * inner + head * E
    key += row * K * inner + head * E
    value += row * K * value_stride + head * E
    key_gradient += row * K * key_gradient_stride + head * E
    value_gradient += row * K * key_gradient_stride + head * E
    log_sum += row_head * Q
    delta += row_head * Q
    first_key = tl.program_id(0) * BK
    if first_key < MAIN:
        _backward_main(
            query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient,
            cosine, sine, value_stride, key_gradient_stride, first, queries, first_key,
            inner, Q, K, E, CAUSAL, MAIN, BK, BQ,
        )  # fmt: skip
    elif TAIL:
        _backward_tail(
            query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient,
            cosine, sine, value_stride, key_gradient_stride, first, queries,
            inner, Q, K, E, CAUSAL, MAIN, TAIL, PQ,
        )  # fmt: skip


@triton.jit
def _backward_main(
    query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient,
    cosine, sine, value_stride, key_gradient_stride, first, queries, first_key,
    inner: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Gradients of BK keys and values, kept in registers while all queries go by. Scores lie
    transposed, keys x queries, so that they multiply from registers."""
    kind = query.dtype.element_ty
    keys = first_key + tl.arange(0, BK)
    k = _load(key, keys, inner, K, MAIN > K, E)
    v = _load(value, keys, value_stride, K, MAIN > K, E)
    dk = tl.zeros((BK, E), tl.float32)
    dv = tl.zeros((BK, E), tl.float32)
    for start in range(0, queries if HIDE else Q, BQ):
        rows = start + tl.arange(0, BQ)
        q = _load(query, rows, inner, Q, Q % BQ != 0, E)
        do = _load(out_gradient, rows, inner, Q, Q % BQ != 0, E)
        # Products that wait for nothing come first: so they run one behind the other.
        score = tl.dot(k, tl.trans(q))
        dweight = tl.dot(v, tl.trans(do))
        # Rows that are not there weigh nothing.
        top = tl.load(log_sum + rows, mask=rows < Q, other=1e30)
        offset = tl.load(delta + rows, mask=rows < Q, other=0.0)
        weight = tl.exp2(score - top[None, :])
        if MAIN > K:
            weight = tl.where((keys < K)[:, None], weight, 0.0)
        if CAUSAL:
            weight = tl.where(keys[:, None] <= first + rows[None, :], weight, 0.0)
        dv = tl.dot(weight.to(kind), do, dv)
        dk = tl.dot((weight * (dweight - offset[None, :])).to(kind), q, dk)
    _store_keys(
        key_gradient, value_gradient, dk, dv, keys, key_gradient_stride, keys < K, cosine, sine,
        BK, E,
    )  # fmt: skip


@triton.jit
def _backward_tail(
    query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient,
    cosine, sine, value_stride, key_gradient_stride, first, queries,
    inner: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, PQ: tl.constexpr,
):  # fmt: skip
    """Gradients of the tail's keys and values, summed up transposed: a matrix unit wants 64 rows,
    and a head has them."""
    kind = query.dtype.element_ty
    tail = MAIN + tl.arange(0, TAIL)
    k = _load(key, tail, inner, K, True, E)
    v = _load(value, tail, value_stride, K, True, E)
    dk = tl.zeros((E, TAIL), tl.float32)
    dv = tl.zeros((E, TAIL), tl.float32)
    for start in range(0, queries if HIDE else Q, PQ):
        rows = start + tl.arange(0, PQ)
        q = _load(query, rows, inner, Q, Q % PQ != 0, E)
        do = _load(out_gradient, rows, inner, Q, Q % PQ != 0, E)
        score = tl.dot(q, tl.trans(k))
        dweight = tl.dot(do, tl.trans(v))
        top = tl.load(log_sum + rows, mask=rows < Q, other=1e30)
        offset = tl.load(delta + rows, mask=rows < Q, other=0.0)
        seen = (tail < K)[None, :]
        if CAUSAL:
            seen = seen & (tail[None, :] <= first + rows[:, None])
        weight = tl.where(seen, tl.exp2(score - top[:, None]), 0.0)
        dv = tl.dot(tl.trans(do), weight.to(kind), dv)
        dk = tl.dot(tl.trans(q), (weight * (dweight - offset[:, None])).to(kind), dk)
    _store_keys(
        key_gradient, value_gradient, tl.trans(dk), tl.trans(dv), tail, key_gradient_stride,
        tail < K, cosine, sine, TAIL, E,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- launch


def key_tiles(keys: int, least: int = 16) -> dict[str, int]:
    """A power of two of keys, and the rest of them, taken as `least` or more."""
    if keys <= 32:
        return {"MAIN": max(16, triton.next_power_of_2(keys)), "TAIL": 0}
    main = 1 << (keys.bit_length() - 1)
    rest = keys - main
    tail = max(least, triton.next_power_of_2(rest)) if rest else 0
    return {"MAIN": main, "TAIL": tail} if tail < main else {"MAIN": 2 * main, "TAIL": 0}


def forward_tiles(queries: int, keys: int) -> dict[str, int]:
    """How many queries are answered at once, and by how many warps."""
    size = min(64, max(16, triton.next_power_of_2(queries)))
    if max(queries, keys) <= 32:
        return {"BQ": size, "num_warps": 1, "num_stages": 1}
    return {"BQ": size, "num_warps": 4, "num_stages": 2}


def short_tiles(queries: int, keys: int) -> dict[str, int]:
    """One tile of all queries and keys, for `_backward_short`."""
    queries, keys = (max(16, triton.next_power_of_2(size)) for size in (queries, keys))
    return {"BQ": queries, "BK": keys, "num_warps": 1, "num_stages": 1}


def query_tiles(keys: int) -> dict[str, int]:
    """How many queries a program holds, and how many keys it takes at once."""
    if keys > 64:
        return {"BQ": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
    return {"BQ": 64, "BK": keys, "num_warps": 4, "num_stages": 2}


def keys_tiles(keys: int) -> dict[str, int]:
    """How many keys a program holds, and how many queries it takes at once (PQ: for the tail)."""
    size = {"BK": min(64, keys), "BQ": 32, "PQ": 64}
    return size | {"num_warps": 4, "num_stages": 2, "maxnreg": 128}


def fits(keys: int) -> bool:
    """Whether a program can hold that many keys."""
    return keys <= 32 or sum(key_tiles(keys).values()) <= LONGEST


class Heads:
    """Where queries, keys and values of all heads lie, and what every launch says of them."""

    def __init__(self, query: Tensor | None, rest: Tensor, heads: int) -> None:
        if query is None:  # one projection has all three
            self.query, self.key, self.value = rest.chunk(3, dim=-1)
        else:
            self.query = query
            self.key, self.value = rest.chunk(2, dim=-1)
        self.rows, self.queries, self.inner = self.query.shape
        self.keys = self.key.shape[1]
        self.heads, self.head_dim = heads, self.inner // heads

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def constants(self) -> dict[str, int]:
        return {"H": self.heads, "Q": self.queries, "K": self.keys, "E": self.head_dim}


def run_forward(
    heads: Heads, cosine: Tensor, sine: Tensor, first: int, causal: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The heads' weighted sums side by side (N, Q, H·E); and if they are to be kept, turned queries
    (N, Q, H·E), scaled, turned keys (N, K, H·E), and log2 of the weights' sums (N, H, Q)."""
    rest = heads.value
    out = rest.new_empty(heads.rows, heads.queries, heads.inner)
    query, key, log_sum = kept(heads) if keep else (out, out, out)
    _forward[heads.rows * heads.heads,](
        heads.query,
        heads.key,
        heads.value,
        query,
        key,
        out,
        log_sum,
        cosine,
        sine,
        heads.query.stride(1),
        heads.key.stride(1),
        first,
        heads.queries,
        heads.scale * LOG2_E.value,
        CAUSAL=causal,
        KEEP=keep,
        **heads.constants,
        **key_tiles(heads.keys),
        **forward_tiles(heads.queries, heads.keys),
    )
    return out, query, key, log_sum


def kept(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what the backward pass needs."""
    like = heads.value
    return (
        like.new_empty(heads.rows, heads.queries, heads.inner),
        like.new_empty(heads.rows, heads.keys, heads.inner),
        like.new_empty(heads.rows, heads.heads, heads.queries, dtype=torch.float32),
    )


def run_backward(
    heads: Heads,
    gradients: Heads,
    query: Tensor,
    key: Tensor,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
    cosine: Tensor,
    sine: Tensor,
    first: int,
    causal: bool,
) -> None:
    """Fill the gradients, laid out as the heads are."""
    out_gradient = out_gradient.contiguous()
    grid = heads.rows * heads.heads
    constants = {"CAUSAL": causal, **heads.constants}
    stride = heads.value.stride(1), gradients.query.stride(1), gradients.key.stride(1)
    if max(heads.queries, heads.keys) <= 32:
        _backward_short[grid,](
            query, key, heads.value, out, out_gradient, log_sum,
            gradients.query, gradients.key, gradients.value, cosine, sine, *stride,
            first, heads.scale, **constants, **short_tiles(heads.queries, heads.keys),
        )  # fmt: skip
        return
    # A tail of 16 comes out wrong: Triton 3.6 misreads a right factor of 16 columns.
    constants |= key_tiles(heads.keys, least=32)
    main, tail = constants["MAIN"], constants["TAIL"]
    delta = torch.empty_like(log_sum)
    tiles = query_tiles(main)
    _backward_queries[triton.cdiv(heads.queries, tiles["BQ"]), grid](
        query, key, heads.value, out, out_gradient, log_sum, gradients.query, delta,
        cosine, sine, *stride[:2], first, main, heads.scale, **constants, **tiles,
    )  # fmt: skip
    tiles = keys_tiles(main)
    _backward_keys[main // tiles["BK"] + bool(tail), grid](
        query, key, heads.value, out_gradient, log_sum, delta, gradients.key, gradients.value,
        cosine, sine, stride[0], stride[2], first, heads.queries, **constants, **tiles,
    )  # fmt: skip
