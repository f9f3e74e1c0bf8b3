"""The backward pass of attention for longer sequences: two kernels go over each of them.

Programs of the first hold queries, those of the second hold keys. The weights are made twice then,
but no program waits for another, and no sum leaves the registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.accel.triton.attention_heads import Heads, key_tiles, load_rows, score_scale
from memtrain.accel.triton.common import HIDE
from memtrain.accel.triton.rotate_back import store_keys, store_turned_back


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
    """The gradient of BQ queries of one head, or of the RQ that are left; and for the keys'
    programs the sums over out · its gradient (`delta`)."""
    row_head = tl.program_id(1).to(tl.int64)
    row, head = row_head // H, row_head % H
    inner: tl.constexpr = H * E
    query += row * Q * QUERY_STRIDE + head * E
    query_gradient += row * Q * QUERY_STRIDE + head * E
    out += row * Q * inner + head * E
    out_gradient += row * Q * inner + head * E
    key += row * K * KEY_STRIDE + head * E
    value += row * K * KEY_STRIDE + head * E
    log_sum += row_head * Q
    delta += row_head * Q
    start = tl.program_id(0) * BQ
    if start < Q // BQ * BQ:
        _backward_some(
            query, key, value, out, out_gradient, log_sum, query_gradient, delta, cosine, sine,
            start, first, keys, scale,
            Q, K, E, QUERY_STRIDE, KEY_STRIDE, inner, CAUSAL, MAIN, TAIL, BQ, BK,
        )  # fmt: skip
    elif RQ:
        _backward_some(
            query, key, value, out, out_gradient, log_sum, query_gradient, delta, cosine, sine,
            start, first, keys, scale,
            Q, K, E, QUERY_STRIDE, KEY_STRIDE, inner, CAUSAL, MAIN, TAIL, RQ, BK,
        )  # fmt: skip


@triton.jit
def _backward_some(
    query, key, value, out, out_gradient, log_sum, query_gradient, delta, cosine, sine,
    start, first, keys, scale,
    Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, inner: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of BQ queries from `start` on. `keys` is MAIN, kept from the compiler (see
    HIDE)."""
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
    store_turned_back(
        query_gradient, dq * scale, rows, QUERY_STRIDE, there, cosine, sine, first + rows, BQ, E
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries"])
def _backward_keys(
    query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient, cosine, sine,
    first, queries,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, PQ: tl.constexpr,
):  # fmt: skip
    """The gradients of BK keys and values of one head, or those of its tail."""
    row_head = tl.program_id(1).to(tl.int64)
    row, head = row_head // H, row_head % H
    inner: tl.constexpr = H * E
    query += row * Q * QUERY_STRIDE + head * E
    out_gradient += row * Q * inner + head * E
    key += row * K * KEY_STRIDE + head * E
    value += row * K * KEY_STRIDE + head * E
    key_gradient += row * K * KEY_STRIDE + head * E
    value_gradient += row * K * KEY_STRIDE + head * E
    log_sum += row_head * Q
    delta += row_head * Q
    first_key = tl.program_id(0) * BK
    if first_key < MAIN:
        _backward_main(
            query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient,
            cosine, sine, first, queries, first_key,
            Q, K, E, QUERY_STRIDE, KEY_STRIDE, inner, CAUSAL, MAIN, BK, BQ,
        )  # fmt: skip
    elif TAIL:
        _backward_tail(
            query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient,
            cosine, sine, first, queries,
            Q, K, E, QUERY_STRIDE, KEY_STRIDE, inner, CAUSAL, MAIN, TAIL, PQ,
        )  # fmt: skip


@triton.jit
def _backward_main(
    query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient,
    cosine, sine, first, queries, first_key,
    Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, inner: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Gradients of BK keys and values, kept in registers while all queries go by. Scores lie
    transposed, keys x queries, so that they multiply from registers."""
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
    store_keys(
        key_gradient, value_gradient, dk, dv, keys, KEY_STRIDE, keys < K, cosine, sine,
        BK, E,
    )  # fmt: skip


@triton.jit
def _backward_tail(
    query, key, value, out_gradient, log_sum, delta, key_gradient, value_gradient,
    cosine, sine, first, queries,
    Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr, QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, inner: tl.constexpr, CAUSAL: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, PQ: tl.constexpr,
):  # fmt: skip
    """Gradients of the tail's keys and values, summed up transposed: a matrix unit wants 64 rows,
    and a head has them."""
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


# ---------------------------------------------------------------------------------------- launch


def query_tiles(queries: int, keys: int) -> dict[str, int]:
    """How many queries a program holds, the last one of a head, and how many keys it takes at
    once."""
    left = queries % 64
    size = {"BQ": 64, "RQ": max(16, triton.next_power_of_2(left)) if left else 0}
    if keys > 64:  # five programs share a processor's registers
        return size | {"BK": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 96}
    return size | {"BK": keys, "num_warps": 4, "num_stages": 2}


def keys_tiles(keys: int) -> dict[str, int]:
    """How many keys a program holds, and how many queries it takes at once (PQ: for the tail)."""
    size = {"BK": min(64, keys), "BQ": 32, "PQ": 64}
    return size | {"num_warps": 4, "num_stages": 2, "maxnreg": 128}


def run_long_backward(
    heads: Heads,
    gradients: Heads,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
    cosine: Tensor,
    sine: Tensor,
    first: int,
    causal: bool,
) -> None:
    """`run_backward` of as many keys as a program can hold."""
    given = heads.query, heads.key, heads.value
    grid = heads.rows * heads.heads
    # A tail of 16 comes out wrong: Triton 3.6 misreads a right factor of 16 columns.
    constants = {"CAUSAL": causal, **heads.constants, **key_tiles(heads.keys, least=32)}
    main, tail = constants["MAIN"], constants["TAIL"]
    delta = torch.empty_like(log_sum)
    tiles = query_tiles(heads.queries, main)
    _backward_queries[triton.cdiv(heads.queries, tiles["BQ"]), grid](
        *given, out, out_gradient, log_sum, gradients.query, delta,
        cosine, sine, first, main, score_scale(heads.head_dim), **constants, **tiles,
    )  # fmt: skip
    tiles = keys_tiles(main)
    _backward_keys[main // tiles["BK"] + bool(tail), grid](
        *given, out_gradient, log_sum, delta, gradients.key, gradients.value,
        cosine, sine, first, heads.queries, **constants, **tiles,
    )  # fmt: skip
