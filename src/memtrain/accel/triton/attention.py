"""Attention over rotated queries and keys: where its heads lie, and the forward pass.

Heads stay where the projection wrote them, side by side in the last dimension: queries rotated and
scaled, keys rotated, values (see `qkv`). Sequences are short (272, 79 and 17 rows at the paper's
size), so one program holds all keys and values of a head and passes over the queries once, without
a running maximum. Tiles are powers of two; to avoid padding to the next one, the keys are split
into a power of two and a tail, 272 into 256 + 16. The reference is
`models.layers.Attention.forward`.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.accel import hopper
from memtrain.accel.triton.common import HIDE, LOG2_E

MAX_KEYS = 320
"""Keys that a program can hold; longer sequences use the reference."""


# ----------------------------------------------------------------------------------------- heads


@triton.jit
def load_rows(x, rows, stride, limit, MASKED: tl.constexpr, E: tl.constexpr):
    """Load rows of one head; if MASKED, those from `limit` on are zero."""
    at = x + rows[:, None] * stride + tl.arange(0, E)
    if MASKED:
        return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def head_offsets(
    row_head, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr,
):  # fmt: skip
    """Where a head of one row of the batch begins among queries, keys (or values) and results."""
    row, head = row_head // H, row_head % H
    at_queries = row * Q * QUERY_STRIDE + head * E
    at_keys = row * K * KEY_STRIDE + head * E
    return at_queries, at_keys, row * Q * (H * E) + head * E


def key_tiles(keys: int, least: int = 16) -> dict[str, int]:
    """Split the keys into a power of two and a tail, padded to at least `least`."""
    if keys <= 32:
        return {"MAIN": max(16, triton.next_power_of_2(keys)), "TAIL": 0}
    main = 1 << (keys.bit_length() - 1)
    rest = keys - main
    tail = max(least, triton.next_power_of_2(rest)) if rest else 0
    return {"MAIN": main, "TAIL": tail} if tail < main else {"MAIN": 2 * main, "TAIL": 0}


def keys_fit(keys: int) -> bool:
    """Whether a program can hold this many keys."""
    return keys <= 32 or sum(key_tiles(keys).values()) <= MAX_KEYS


class Heads:
    """Queries, keys and values of all heads, (N, L, H·E) each, as views of the projections.

    Args:
        query: The projected queries; None if `rest` holds queries, keys and values.
        rest: The projected keys and values, side by side.
        heads: The number of heads.
    """

    def __init__(self, query: Tensor | None, rest: Tensor, heads: int) -> None:
        if query is None:
            self.query, self.key, self.value = rest.chunk(3, dim=-1)
        else:
            self.query = query
            self.key, self.value = rest.chunk(2, dim=-1)
        self.rows, self.queries, self.inner = self.query.shape
        self.keys = self.key.shape[1]
        self.heads, self.head_dim = heads, self.inner // heads

    @property
    def constants(self) -> dict[str, int]:
        """The sizes and row strides that every kernel takes."""
        return {
            "H": self.heads,
            "Q": self.queries,
            "K": self.keys,
            "E": self.head_dim,
            "QUERY_STRIDE": self.query.stride(1),
            "KEY_STRIDE": self.key.stride(1),
        }


class AttentionBackward(NamedTuple):
    """The arguments of attention's backward pass.

    It fills `gradients`, those of the projections before rotation, laid out as `heads`.
    """

    heads: Heads
    gradients: Heads
    out: Tensor
    """The heads' results, (N, Q, H·E)."""
    log_sum: Tensor
    """log2 of the sum of each query's weights, (N, H, Q)."""
    out_gradient: Tensor
    cosine: Tensor
    sine: Tensor
    first: int
    """The position of the first query."""
    causal: bool


def hopper_serves_attention(heads: Heads, causal: bool) -> bool:
    """Whether `hopper.attention` can run: it expects the encoder of the paper's size."""
    shape = heads.queries, heads.keys, heads.head_dim
    parts = heads.query, heads.key, heads.value
    return (
        not causal
        and shape == (272, 272, 64)
        # All three are views of one projection.
        and len({x.stride(1) for x in parts}) == 1
        and all(x.stride(0) == x.shape[1] * x.stride(1) for x in parts)
        and hopper.serves(*parts)
    )


def score_scale(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim)


def query_scale(head_dim: int) -> float:
    """The factor that queries carry: the scale of scores, and log2(e), for weights 2^score."""
    return score_scale(head_dim) * LOG2_E.value


# --------------------------------------------------------------------------------------- forward

# Triton reduces the numbers of one thread sequentially, each step depending on the previous one.
# Columns half a tile apart lie in the same thread: folding rows in half twice gives four chains.


@triton.jit
def _halves(x, R: tl.constexpr, C: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@triton.jit
def _row_max(x, R: tl.constexpr, C: tl.constexpr):
    """The maximum of each row of x, (R, C)."""
    if C >= 64:
        left, right = _halves(x, R, C)
        left, right = _halves(tl.maximum(left, right), R, C // 2)
        return tl.max(tl.maximum(left, right), 1)
    return tl.max(x, 1)


@triton.jit
def _row_sum(x, R: tl.constexpr, C: tl.constexpr):
    """The sum of each row of x, (R, C)."""
    if C >= 64:
        left, right = _halves(x, R, C)
        left, right = _halves(left + right, R, C // 2)
        return tl.sum(left + right, 1)
    return tl.sum(x, 1)


@triton.jit(do_not_specialize=["first", "queries"])
def _attention(
    query, key, value, out, log_sum, first, queries,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    KEEP: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """One head of one row of the batch per program. `queries` is Q (see HIDE)."""
    row_head = tl.program_id(0).to(tl.int64)
    at_queries, at_keys, at_out = head_offsets(row_head, H, Q, K, E, QUERY_STRIDE, KEY_STRIDE)
    query += at_queries
    key += at_keys
    value += at_keys
    out += at_out
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
        best = _row_max(score, BQ, MAIN)
        if TAIL:
            score_tail = tl.dot(q, tl.trans(k_tail))
            seen = (tail < K)[None, :]
            if CAUSAL:
                seen = seen & (tail[None, :] <= first + rows[:, None])
            score_tail = tl.where(seen, score_tail, -1e30)
            best = tl.maximum(best, tl.max(score_tail, 1))
            weight = tl.exp2(score - best[:, None])
            weight_tail = tl.exp2(score_tail - best[:, None])
            total = _row_sum(weight, BQ, MAIN) + tl.sum(weight_tail, 1)
            mixed = tl.dot(weight_tail.to(kind), v_tail)
            mixed = tl.dot(weight.to(kind), v, mixed)
        else:
            weight = tl.exp2(score - best[:, None])
            total = _row_sum(weight, BQ, MAIN)
            mixed = tl.dot(weight.to(kind), v)
        at = out + rows[:, None] * (H * E) + tl.arange(0, E)
        tl.store(at, (mixed * (1.0 / total)[:, None]).to(kind), mask=(rows < Q)[:, None])
        if KEEP:
            tl.store(log_sum + rows, best + tl.log2(total), mask=rows < Q)


def forward_tiles(queries: int, keys: int) -> dict[str, int]:
    """The number of queries per tile, and how many warps compute one."""
    size = min(64, max(16, triton.next_power_of_2(queries)))
    if max(queries, keys) <= 32:
        return {"BQ": size, "num_warps": 1, "num_stages": 1}
    return {"BQ": size, "num_warps": 4, "num_stages": 2}


def run_attention(
    heads: Heads, first: int, causal: bool, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The heads' results side by side, (N, Q, H·E); and if `keep`, log2 of the sums of weights,
    (N, H, Q), for the backward pass."""
    rows, queries = heads.rows, heads.queries
    out = heads.value.new_empty(rows, queries, heads.inner)
    log_sum = None
    if keep:
        log_sum = heads.value.new_empty(rows, heads.heads, queries, dtype=torch.float32)
    if hopper_serves_attention(heads, causal):
        from memtrain.accel.hopper.attention import hopper_attention

        hopper_attention(heads, out, log_sum)
        return out, log_sum
    _attention[rows * heads.heads,](
        heads.query, heads.key, heads.value, out, out if log_sum is None else log_sum,
        first, queries, CAUSAL=causal, KEEP=keep, **heads.constants,
        **key_tiles(heads.keys), **forward_tiles(queries, heads.keys),
    )  # fmt: skip
    return out, log_sum
