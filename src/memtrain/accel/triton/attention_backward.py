"""Attention over rotated queries and keys: the backward pass.

Gradients are rotated back as they are written: the results are those of the projection before
rotation. The reference is autograd over `models.layers.Attention.forward`.
"""

import torch
import triton
import triton.language as tl

from memtrain.accel.triton.attention import (
    AttentionBackward,
    head_offsets,
    hopper_serves_attention,
    key_tiles,
    load_rows,
    score_scale,
)
from memtrain.accel.triton.common import HIDE, LOG2_E

MAX_SHORT = 32
"""Queries and keys that one tile of `_backward_short` holds."""


def run_attention_backward(given: AttentionBackward) -> None:
    """Fill the gradients of the heads before rotation."""
    heads = given.heads
    if hopper_serves_attention(heads, given.causal):
        from memtrain.accel.hopper.attention_backward import hopper_attention_backward

        hopper_attention_backward(given)
    elif max(heads.queries, heads.keys) <= MAX_SHORT:
        _run_short(given)
    else:
        _run_long(given)


# ---------------------------------------------------------------------------------------- writing


@triton.jit
def store_rotated_back(
    x, gradient, rows, row_stride, there, cosine, sine, positions, R: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """Rotate the gradient of rows, (R, E), back by their positions, and write it."""
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
def store_keys(
    key_gradient, value_gradient, dk, dv, keys, stride, there, cosine, sine,
    BK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values. Queries carry scale · log2(e) (see `query_scale`),
    and the gradient of the keys needs the scale alone."""
    store_rotated_back(key_gradient, dk / LOG2_E, keys, stride, there, cosine, sine, keys, BK, E)
    at = value_gradient + keys[:, None] * stride + tl.arange(0, E)
    tl.store(at, dv.to(value_gradient.dtype.element_ty), mask=there[:, None])


# -------------------------------------------------------------------------------- short sequences


@triton.jit
def _backward_short(
    query, key, value, out, out_gradient, log_sum, query_gradient, key_gradient, value_gradient,
    cosine, sine, first, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """All gradients of one head of one row of the batch. Scores are transposed, keys x queries."""
    row_head = tl.program_id(0).to(tl.int64)
    at_queries, at_keys, at_out = head_offsets(row_head, H, Q, K, E, QUERY_STRIDE, KEY_STRIDE)
    inner: tl.constexpr = H * E
    rows, keys = tl.arange(0, BQ), tl.arange(0, BK)
    q = load_rows(query + at_queries, rows, QUERY_STRIDE, Q, BQ > Q, E)
    do = load_rows(out_gradient + at_out, rows, inner, Q, BQ > Q, E)
    o = load_rows(out + at_out, rows, inner, Q, BQ > Q, E)
    k = load_rows(key + at_keys, keys, KEY_STRIDE, K, BK > K, E)
    v = load_rows(value + at_keys, keys, KEY_STRIDE, K, BK > K, E)
    offset = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Padding rows get a weight of zero.
    top = tl.load(log_sum + row_head * Q + rows, mask=rows < Q, other=1e30)
    weight = tl.exp2(tl.dot(k, tl.trans(q)) - top[None, :])
    if BK > K:
        weight = tl.where((keys < K)[:, None], weight, 0.0)
    if CAUSAL:
        weight = tl.where(keys[:, None] <= first + rows[None, :], weight, 0.0)
    ds = (weight * (tl.dot(v, tl.trans(do)) - offset[None, :])).to(k.dtype)
    dq = tl.dot(tl.trans(k), ds)  # (E, BQ)
    store_rotated_back(
        query_gradient + at_queries, tl.trans(dq) * scale, rows,
        QUERY_STRIDE, rows < Q, cosine, sine, first + rows, BQ, E,
    )  # fmt: skip
    store_keys(
        key_gradient + at_keys, value_gradient + at_keys, tl.dot(ds, q),
        tl.dot(weight.to(do.dtype), do), keys, KEY_STRIDE, keys < K, cosine, sine, BK, E,
    )  # fmt: skip


def _run_short(given: AttentionBackward) -> None:
    heads, gradients, out, log_sum, out_gradient, cosine, sine, first, causal = given
    queries, keys = (max(16, triton.next_power_of_2(n)) for n in (heads.queries, heads.keys))
    _backward_short[heads.rows * heads.heads,](
        heads.query, heads.key, heads.value, out, out_gradient, log_sum,
        gradients.query, gradients.key, gradients.value, cosine, sine,
        first, score_scale(heads.head_dim), CAUSAL=causal, **heads.constants,
        BQ=queries, BK=keys, num_warps=1, num_stages=1,
    )  # fmt: skip


# ------------------------------------------------------------------------------- longer sequences

# Two kernels pass over each sequence: programs of the first hold queries, those of the second hold
# keys. This computes the weights twice, but no program waits for another, and all sums stay in
# registers.


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
    first, keys, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
    BQ: tl.constexpr, RQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of BQ queries of one head, or of the last RQ; and `delta`, the sums over
    out · its gradient, for `_backward_keys`."""
    row_head = tl.program_id(1).to(tl.int64)
    at_queries, at_keys, at_out = head_offsets(row_head, H, Q, K, E, QUERY_STRIDE, KEY_STRIDE)
    inner: tl.constexpr = H * E
    sources = (query + at_queries, key + at_keys, value + at_keys, out + at_out)
    sources += (out_gradient + at_out, log_sum + row_head * Q)
    results = (query_gradient + at_queries, delta + row_head * Q)
    start = tl.program_id(0) * BQ
    if start < Q // BQ * BQ:
        _backward_query_tile(
            sources, results, cosine, sine, start, first, keys, scale,
            Q, K, E, QUERY_STRIDE, KEY_STRIDE, inner, CAUSAL, MAIN, TAIL, BQ, BK,
        )  # fmt: skip
    elif RQ:
        _backward_query_tile(
            sources, results, cosine, sine, start, first, keys, scale,
            Q, K, E, QUERY_STRIDE, KEY_STRIDE, inner, CAUSAL, MAIN, TAIL, RQ, BK,
        )  # fmt: skip


@triton.jit
def _backward_query_tile(
    sources, results, cosine, sine, start, first, keys, scale,
    Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, inner: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of BQ queries from `start` on. `keys` is MAIN (see HIDE)."""
    query, key, value, out, out_gradient, log_sum = sources
    query_gradient, delta = results
    rows = start + tl.arange(0, BQ)
    there = rows < Q
    q = load_rows(query, rows, QUERY_STRIDE, Q, Q % BQ != 0, E)
    do = load_rows(out_gradient, rows, inner, Q, Q % BQ != 0, E)
    o = load_rows(out, rows, inner, Q, Q % BQ != 0, E)
    offset = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + rows, offset, mask=there)
    top = tl.load(log_sum + rows, mask=there, other=1e30)
    dq = tl.zeros((BQ, E), tl.float32)
    for at_key in range(0, keys if HIDE else MAIN, BK):
        at = at_key + tl.arange(0, BK)
        k = load_rows(key, at, KEY_STRIDE, K, MAIN > K, E)
        v = load_rows(value, at, KEY_STRIDE, K, MAIN > K, E)
        ds = _score_gradient(q, do, k, v, top, offset, rows, at, first, K, MAIN > K, CAUSAL)
        dq = tl.dot(ds, k, dq)
    if TAIL:
        at = MAIN + tl.arange(0, TAIL)
        k = load_rows(key, at, KEY_STRIDE, K, True, E)
        v = load_rows(value, at, KEY_STRIDE, K, True, E)
        ds = _score_gradient(q, do, k, v, top, offset, rows, at, first, K, True, CAUSAL)
        dq = tl.dot(ds, k, dq)
    store_rotated_back(
        query_gradient, dq * scale, rows, QUERY_STRIDE, there, cosine, sine, first + rows, BQ, E
    )


@triton.jit(do_not_specialize=["queries"])
def _backward_keys(
    query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient, cosine, sine,
    first, queries,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, PQ: tl.constexpr,
):  # fmt: skip
    """The gradients of BK keys and values of one head, or of its tail."""
    row_head = tl.program_id(1).to(tl.int64)
    at_queries, at_keys, at_out = head_offsets(row_head, H, Q, K, E, QUERY_STRIDE, KEY_STRIDE)
    inner: tl.constexpr = H * E
    sources = (query + at_queries, key + at_keys, value + at_keys, out_gradient + at_out)
    sources += (log_sum + row_head * Q, delta + row_head * Q)
    results = (key_gradient + at_keys, value_gradient + at_keys)
    first_key = tl.program_id(0) * BK
    if first_key < MAIN:
        _backward_key_tile(
            sources, results, cosine, sine, first, queries, first_key,
            Q, K, E, QUERY_STRIDE, KEY_STRIDE, inner, CAUSAL, MAIN, BK, BQ,
        )  # fmt: skip
    elif TAIL:
        _backward_key_tail(
            sources, results, cosine, sine, first, queries,
            Q, K, E, QUERY_STRIDE, KEY_STRIDE, inner, CAUSAL, MAIN, TAIL, PQ,
        )  # fmt: skip


@triton.jit
def _backward_key_tile(
    sources, results, cosine, sine, first, queries, first_key,
    Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, inner: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Gradients of BK keys and values, kept in registers while looping over all queries. Scores are
    transposed, keys x queries, so that they can be multiplied from registers."""
    query, key, value, out_gradient, log_sum, delta = sources
    key_gradient, value_gradient = results
    kind = query.dtype.element_ty
    keys = first_key + tl.arange(0, BK)
    k = load_rows(key, keys, KEY_STRIDE, K, MAIN > K, E)
    v = load_rows(value, keys, KEY_STRIDE, K, MAIN > K, E)
    dk = tl.zeros((BK, E), tl.float32)
    dv = tl.zeros((BK, E), tl.float32)
    for start in range(0, queries if HIDE else Q, BQ):
        rows = start + tl.arange(0, BQ)
        q = load_rows(query, rows, QUERY_STRIDE, Q, Q % BQ != 0, E)
        do = load_rows(out_gradient, rows, inner, Q, Q % BQ != 0, E)
        # Products without dependencies come first, so that they run back to back.
        score = tl.dot(k, tl.trans(q))
        dweight = tl.dot(v, tl.trans(do))
        # Padding rows get a weight of zero.
        top = tl.load(log_sum + rows, mask=rows < Q, other=1e30)
        offset = tl.load(delta + rows, mask=rows < Q, other=0.0)
        weight = tl.exp2(score - top[None, :])
        if MAIN > K:
            weight = tl.where((keys < K)[:, None], weight, 0.0)
        if CAUSAL:
            weight = tl.where(keys[:, None] <= first + rows[None, :], weight, 0.0)
        dv = tl.dot(weight.to(kind), do, dv)
        dk = tl.dot((weight * (dweight - offset[None, :])).to(kind), q, dk)
    store_keys(
        key_gradient, value_gradient, dk, dv, keys, KEY_STRIDE, keys < K, cosine, sine, BK, E
    )


@triton.jit
def _backward_key_tail(
    sources, results, cosine, sine, first, queries,
    Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, inner: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, PQ: tl.constexpr,
):  # fmt: skip
    """Gradients of the tail's keys and values, summed transposed: a matrix unit takes 64 rows, and
    a head has them."""
    query, key, value, out_gradient, log_sum, delta = sources
    key_gradient, value_gradient = results
    kind = query.dtype.element_ty
    tail = MAIN + tl.arange(0, TAIL)
    k = load_rows(key, tail, KEY_STRIDE, K, True, E)
    v = load_rows(value, tail, KEY_STRIDE, K, True, E)
    dk = tl.zeros((E, TAIL), tl.float32)
    dv = tl.zeros((E, TAIL), tl.float32)
    for start in range(0, queries if HIDE else Q, PQ):
        rows = start + tl.arange(0, PQ)
        q = load_rows(query, rows, QUERY_STRIDE, Q, Q % PQ != 0, E)
        do = load_rows(out_gradient, rows, inner, Q, Q % PQ != 0, E)
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
    store_keys(
        key_gradient, value_gradient, tl.trans(dk), tl.trans(dv), tail, KEY_STRIDE,
        tail < K, cosine, sine, TAIL, E,
    )  # fmt: skip


def query_tiles(queries: int, keys: int) -> dict[str, int]:
    """The number of queries per program (RQ: of the last one), and of keys per step."""
    left = queries % 64
    size = {"BQ": 64, "RQ": max(16, triton.next_power_of_2(left)) if left else 0}
    if keys > 64:  # five programs share a processor's registers
        return size | {"BK": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 96}
    return size | {"BK": keys, "num_warps": 4, "num_stages": 2}


def _run_long(given: AttentionBackward) -> None:
    heads, gradients, out, log_sum, out_gradient, cosine, sine, first, causal = given
    sources = heads.query, heads.key, heads.value
    grid = heads.rows * heads.heads
    # A tail of 16 comes out wrong: Triton 3.6 misreads a right factor of 16 columns.
    constants = {"CAUSAL": causal, **heads.constants, **key_tiles(heads.keys, least=32)}
    main, tail = constants["MAIN"], constants["TAIL"]
    delta = torch.empty_like(log_sum)
    tiles = query_tiles(heads.queries, main)
    _backward_queries[triton.cdiv(heads.queries, tiles["BQ"]), grid](
        *sources, out, out_gradient, log_sum, gradients.query, delta,
        cosine, sine, first, main, score_scale(heads.head_dim), **constants, **tiles,
    )  # fmt: skip
    held = min(64, main)  # keys per program; BQ or, for the tail, PQ queries per step
    _backward_keys[main // held + bool(tail), grid](
        *sources, out_gradient, log_sum, delta, gradients.key, gradients.value,
        cosine, sine, first, heads.queries, **constants,
        BK=held, BQ=32, PQ=64, num_warps=4, num_stages=2, maxnreg=128,
    )  # fmt: skip
