"""Attention over heads whose queries and keys are turned: the forward pass.

One program holds all keys and values of a head and goes over the queries once, with no running
maximum. The reference is `nn.blocks.Attention.forward`.
"""

import triton
import triton.language as tl
from torch import Tensor

from memtrain.accel.triton.attention_heads import Heads, key_tiles, load_rows, on_hopper
from memtrain.accel.triton.common import HIDE

# Within a thread Triton reduces one number after the other, and each step waits for the one before
# it. Columns half a tile apart lie in the same thread: folded in half twice, rows make four chains.


@triton.jit
def _halves(x, R: tl.constexpr, C: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@triton.jit
def _greatest(x, R: tl.constexpr, C: tl.constexpr):
    """The greatest number of every row of x, (R, C)."""
    if C >= 64:
        left, right = _halves(x, R, C)
        left, right = _halves(tl.maximum(left, right), R, C // 2)
        return tl.max(tl.maximum(left, right), 1)
    return tl.max(x, 1)


@triton.jit
def _sum(x, R: tl.constexpr, C: tl.constexpr):
    """The sum of every row of x, (R, C)."""
    if C >= 64:
        left, right = _halves(x, R, C)
        left, right = _halves(left + right, R, C // 2)
        return tl.sum(left + right, 1)
    return tl.sum(x, 1)


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
        best = _greatest(score, BQ, MAIN)
        if TAIL:
            score_tail = tl.dot(q, tl.trans(k_tail))
            seen = (tail < K)[None, :]
            if CAUSAL:
                seen = seen & (tail[None, :] <= first + rows[:, None])
            score_tail = tl.where(seen, score_tail, -1e30)
            best = tl.maximum(best, tl.max(score_tail, 1))
            weight = tl.exp2(score - best[:, None])
            weight_tail = tl.exp2(score_tail - best[:, None])
            total = _sum(weight, BQ, MAIN) + tl.sum(weight_tail, 1)
            mixed = tl.dot(weight_tail.to(kind), v_tail)
            mixed = tl.dot(weight.to(kind), v, mixed)
        else:
            weight = tl.exp2(score - best[:, None])
            total = _sum(weight, BQ, MAIN)
            mixed = tl.dot(weight.to(kind), v)
        at = out + rows[:, None] * inner + tl.arange(0, E)
        tl.store(at, (mixed * (1.0 / total)[:, None]).to(kind), mask=(rows < Q)[:, None])
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
    if on_hopper(heads, causal):
        import memtrain.accel.hopper.attention as attention_forward

        attention_forward.run_forward(heads, out, log_sum)
        return out, log_sum
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
