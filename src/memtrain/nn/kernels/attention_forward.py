"""Attention over heads whose queries and keys are turned: the forward pass.

One program holds all keys and values of a head and goes over the queries once, with no running
maximum. The reference is `nn.blocks.Attention.forward`.
"""

import triton
import triton.language as tl
from torch import Tensor

from memtrain.nn.kernels.functions import HIDE
from memtrain.nn.kernels.heads import Heads, key_tiles, load_rows


@triton.jit(do_not_specialize=["first", "queries"])
def _forward(
    query,
    key,
    value,
    out,
    log_sum,
    first,
    queries,
    H: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
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
    query += row * Q * QUERY_STRIDE + head * E
    key += row * K * KEY_STRIDE + head * E
    value += row * K * KEY_STRIDE + head * E
    out += row * Q * inner + head * E
    log_sum += row_head * Q

    main = tl.arange(0, MAIN)
    k = load_rows(key, main, KEY_STRIDE, K, MAIN > K, E)
    v = load_rows(value, main, KEY_STRIDE, K, MAIN > K, E)
    tail = MAIN + tl.arange(0, TAIL if TAIL else 16)
    if TAIL:
        k_tail = load_rows(key, tail, KEY_STRIDE, K, True, E)
        v_tail = load_rows(value, tail, KEY_STRIDE, K, True, E)
    kind = query.dtype.element_ty
    for start in range(0, queries if HIDE else Q, BQ):
        rows = start + tl.arange(0, BQ)
        q = load_rows(query, rows, QUERY_STRIDE, Q, Q % BQ != 0, E)
        score = tl.dot(q, tl.trans(k))
        if MAIN > K:
            score = tl.where((main < K)[None, :], score, -1e30)
        if CAUSAL:
            score = tl.where(main[None, :] <= first + rows[:, None], score, -1e30)
        best = tl.max(score, 1)
        if TAIL:
            score_tail = tl.dot(q, tl.trans(k_tail))
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


def tiles(queries: int, keys: int) -> dict[str, int]:
    """How many queries are answered at once, and by how many warps."""
    size = min(64, max(16, triton.next_power_of_2(queries)))
    if max(queries, keys) <= 32:
        return {"BQ": size, "num_warps": 1, "num_stages": 1}
    return {"BQ": size, "num_warps": 4, "num_stages": 2}


def run_forward(heads: Heads, first: int, causal: bool, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The heads' weighted sums side by side (N, Q, H·E); and if it is to be kept, log2 of the
    weights' sums (N, H, Q)."""
    out = heads.empty_out()
    log_sum = heads.empty_log_sum() if keep else None
    _forward[heads.rows * heads.heads,](
        heads.query,
        heads.key,
        heads.value,
        out,
        out if log_sum is None else log_sum,
        first,
        heads.queries,
        CAUSAL=causal,
        KEEP=keep,
        **heads.constants,
        **key_tiles(heads.keys),
        **tiles(heads.queries, heads.keys),
    )
    return out, log_sum
