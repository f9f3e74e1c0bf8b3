"""The backward pass of attention for short sequences: one program makes all three gradients of a
head.
"""

import triton
import triton.language as tl
from torch import Tensor

from memtrain.accel.triton.attention_heads import Heads, load_rows, score_scale
from memtrain.accel.triton.rotate_back import store_keys, store_turned_back

LONGEST = 32
"""Queries and keys that one tile holds."""


@triton.jit
def _backward_short(
    query, key, value, out, out_gradient, log_sum, query_gradient, key_gradient, value_gradient,
    cosine, sine, first, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """All gradients of one head of one row of the batch. Scores lie transposed, keys x queries."""
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // H, row_head % H
    inner: tl.constexpr = H * E
    at_queries, at_keys = row * Q * QUERY_STRIDE + head * E, row * K * KEY_STRIDE + head * E
    at_out = row * Q * inner + head * E
    rows, keys = tl.arange(0, BQ), tl.arange(0, BK)
    q = load_rows(query + at_queries, rows, QUERY_STRIDE, Q, BQ > Q, E)
    do = load_rows(out_gradient + at_out, rows, inner, Q, BQ > Q, E)
    o = load_rows(out + at_out, rows, inner, Q, BQ > Q, E)
    k = load_rows(key + at_keys, keys, KEY_STRIDE, K, BK > K, E)
    v = load_rows(value + at_keys, keys, KEY_STRIDE, K, BK > K, E)
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
    store_turned_back(
        query_gradient + at_queries, tl.trans(dq) * scale, rows,
        QUERY_STRIDE, rows < Q, cosine, sine, first + rows, BQ, E,
    )  # fmt: skip
    store_keys(
        key_gradient + at_keys, value_gradient + at_keys, tl.dot(ds, q),
        tl.dot(weight.to(do.dtype), do), keys, KEY_STRIDE, keys < K, cosine, sine, BK, E,
    )  # fmt: skip


def short_tiles(queries: int, keys: int) -> dict[str, int]:
    """One tile of all queries and keys, for `_backward_short`."""
    queries, keys = (max(16, triton.next_power_of_2(size)) for size in (queries, keys))
    return {"BQ": queries, "BK": keys, "num_warps": 1, "num_stages": 1}


def run_short_backward(
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
    """`run_backward` of up to LONGEST queries and keys."""
    _backward_short[heads.rows * heads.heads,](
        heads.query, heads.key, heads.value, out, out_gradient, log_sum,
        gradients.query, gradients.key, gradients.value, cosine, sine,
        first, score_scale(heads.head_dim), CAUSAL=causal, **heads.constants,
        **short_tiles(heads.queries, heads.keys),
    )  # fmt: skip
