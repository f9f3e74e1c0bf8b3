"""The backward pass of attention for Hopper in Gluon, at the encoder's shape.

It computes the same as `triton.attention_backward`. Sequences have 4 x 64 + 16 rows, heads have 64
numbers, and zero is masked. A program, one group of four warps, has one head and passes over it
twice: with all keys and values in shared memory, looping over queries, and the other way round, in
blocks of 64 rows. Products are started ahead of time, so that the matrix units are busy while
weights are computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

import memtrain.accel.hopper.layout as L
from memtrain.accel.triton.attention import AttentionBackward, score_scale
from memtrain.accel.triton.common import LOG2_E


@gluon.jit
def _store_keys(key_gradient, value_gradient, dk, dv, cosine, sine, first, stride):
    """Queries carry scale · log2(e); the gradient of the keys needs the scale alone."""
    L.store_rows(key_gradient, L.rotated_back(dk / LOG2_E, cosine, sine, first, 0), first, stride)
    L.store_rows(value_gradient, dv, first, stride)


# --------------------------------------------------------------------------------------- passes

# Products run one after another, in the order they were started. `warpgroup_mma_wait(n)` waits
# until at most n of them are left: those started after the one that is needed.


@gluon.jit
def _queries_pass(
    queries, gradients, outs, k_tiles, v_tiles, offsets, blocks, came, block_came,
    log_sum, query_gradient, cosine, sine, start, scale, row, column, zero,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """The gradients of the queries except the tail's, and their sums over out · its gradient."""
    for block in range(L.TILES):
        first = block * L.SIDE
        no_offset = block * zero
        top = gl.load(log_sum + first + gl.arange(0, L.SIDE, gl.SliceLayout(1, L.SUMS)))
        mbarrier.wait(block_came, block & 1)
        q = blocks.index(0).load(L.FACTOR)
        do = blocks.index(1).load(L.FACTOR)
        mbarrier.wait(came[0], 0)
        score = L.start_scores(q, L.rows_of(k_tiles, 0, no_offset))
        dweight = L.start_scores(do, L.rows_of(v_tiles, 0, no_offset))
        sums = L.row_products(blocks.index(1), blocks.index(2))
        offset = gl.convert_layout(sums, gl.SliceLayout(1, L.SUMS))
        offsets.index(block).store(offset)
        gl.thread_barrier()
        fence_async_shared()
        at = [row + first + L.SIDE, column]
        mbarrier.expect(block_came, 3 * L.SIDE * L.E * 2)
        tma.async_copy_global_to_shared(queries, at, block_came, blocks.index(0))
        tma.async_copy_global_to_shared(gradients, at, block_came, blocks.index(1))
        tma.async_copy_global_to_shared(outs, at, block_came, blocks.index(2))
        dq = gl.zeros((L.SIDE, L.E), gl.float32, L.SUMS)
        for tile in gl.static_range(L.ALL_TILES):
            # Started since these scores: dq of the previous tile, dweight.
            score = warpgroup_mma_wait(2 if tile else 1, (score,))
            weight = gl.exp2(score - L.per_row(top, tile))
            if tile < L.TILES:
                mbarrier.wait(came[tile + 1], 0)
                score = L.start_scores(q, L.rows_of(k_tiles, tile + 1, no_offset))
            # Started since dweight: the next scores.
            dweight = warpgroup_mma_wait(1 if tile < L.TILES else 0, (dweight,))
            ds = weight * (dweight - L.per_row(offset, tile))
            dq = warpgroup_mma(
                L.as_factor(ds), L.rows_of(k_tiles, tile, no_offset), dq, is_async=True
            )
            if tile < L.TILES:
                dweight = L.start_scores(do, L.rows_of(v_tiles, tile + 1, no_offset))
        dq = warpgroup_mma_wait(0, (dq,))
        gradient = L.rotated_back(dq * scale, cosine, sine, first, start)
        L.store_rows(query_gradient, gradient, first, STRIDE)


@gluon.jit
def _keys_pass(
    keys, values, q_tiles, d_tiles, tops, offsets, blocks, came, block_came,
    key_gradient, value_gradient, cosine, sine, row, column, zero,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """The gradients of keys and values except the tail's. Scores are transposed, keys x queries."""
    for block in range(L.TILES):
        first = block * L.SIDE
        no_offset = block * zero
        # An odd number of blocks were fetched before these.
        mbarrier.wait(block_came, block + 1 & 1)
        k = blocks.index(0).load(L.FACTOR)
        v = blocks.index(1 + (block & 1))
        mbarrier.wait(came[0], 1)
        score = L.start_scores(k, L.rows_of(q_tiles, 0, no_offset))
        dweight = L.start_scores(v, L.rows_of(d_tiles, 0, no_offset))
        gl.thread_barrier()
        fence_async_shared()
        at = [row + first + L.SIDE, column]
        mbarrier.expect(block_came, 2 * L.SIDE * L.E * 2)
        tma.async_copy_global_to_shared(keys, at, block_came, blocks.index(0))
        tma.async_copy_global_to_shared(values, at, block_came, blocks.index(2 - (block & 1)))
        dk = gl.zeros((L.SIDE, L.E), gl.float32, L.SUMS)
        dv = gl.zeros((L.SIDE, L.E), gl.float32, L.SUMS)
        for tile in gl.static_range(L.ALL_TILES):
            q, do = L.rows_of(q_tiles, tile, no_offset), L.rows_of(d_tiles, tile, no_offset)
            top = L.per_column(tops, tile, L.SUMS if tile < L.TILES else L.SUMS_OF_TAIL)
            # Started since these scores: dk of the previous tile, dweight.
            score = warpgroup_mma_wait(2 if tile else 1, (score,))
            weight = gl.exp2(score - top)
            dv = warpgroup_mma(L.as_factor(weight), do, dv, is_async=True)
            if tile < L.TILES:
                mbarrier.wait(came[tile + 1], 1)
                score = L.start_scores(k, L.rows_of(q_tiles, tile + 1, no_offset))
            # Started since dweight: dv, the next scores.
            dweight = warpgroup_mma_wait(2 if tile < L.TILES else 1, (dweight,))
            offset = L.per_column(offsets, tile, L.SUMS if tile < L.TILES else L.SUMS_OF_TAIL)
            ds = weight * (dweight - offset)
            dk = warpgroup_mma(L.as_factor(ds), q, dk, is_async=True)
            if tile < L.TILES:
                dweight = L.start_scores(v, L.rows_of(d_tiles, tile + 1, no_offset))
        dk, dv = warpgroup_mma_wait(0, (dk, dv))
        _store_keys(key_gradient, value_gradient, dk, dv, cosine, sine, first, STRIDE)


# ----------------------------------------------------------------------------------------- tails


@gluon.jit
def _queries_tail(queries, gradients, outs, k_tiles, v_tiles, offsets, log_sum):
    """The gradients of the tail's queries, and their sums over out · its gradient."""
    top = gl.load(
        log_sum + L.TILES * L.SIDE + gl.arange(0, L.TAIL, gl.SliceLayout(1, L.NARROW_SUMS))
    )
    top = gl.expand_dims(top, 1)
    sums = L.row_products(gradients, outs)
    offsets.index(L.TILES).slice(0, L.TAIL).store(sums)
    offset = gl.expand_dims(gl.convert_layout(sums, gl.SliceLayout(1, L.NARROW_SUMS)), 1)
    q, do = queries.load(L.NARROW_FACTOR), gradients.load(L.NARROW_FACTOR)
    dq = gl.zeros((L.TAIL, L.E), gl.float32, L.NARROW_SUMS)
    score = L.narrow_scores(q, L.rows_of(k_tiles, 0, 0))
    dweight = L.narrow_scores(do, L.rows_of(v_tiles, 0, 0))
    for tile in gl.static_range(L.ALL_TILES):
        ds = gl.exp2(score - top) * (dweight - offset)
        if tile < L.TILES:
            score = L.narrow_scores(q, L.rows_of(k_tiles, tile + 1, 0))
            dweight = L.narrow_scores(do, L.rows_of(v_tiles, tile + 1, 0))
        dq = L.narrow_sum(ds, L.rows_of(k_tiles, tile, 0), dq)
    return dq


@gluon.jit
def _keys_tail(keys, values, q_tiles, d_tiles, tops, offsets):
    """The gradients of the tail's keys and values."""
    k, v = keys.load(L.NARROW_FACTOR), values.load(L.NARROW_FACTOR)
    dk = gl.zeros((L.TAIL, L.E), gl.float32, L.NARROW_SUMS)
    dv = gl.zeros((L.TAIL, L.E), gl.float32, L.NARROW_SUMS)
    score = L.narrow_scores(k, L.rows_of(q_tiles, 0, 0))
    dweight = L.narrow_scores(v, L.rows_of(d_tiles, 0, 0))
    for tile in gl.static_range(L.ALL_TILES):
        weight = gl.exp2(score - L.per_column(tops, tile, L.NARROW_SUMS))
        ds = weight * (dweight - L.per_column(offsets, tile, L.NARROW_SUMS))
        if tile < L.TILES:
            score = L.narrow_scores(k, L.rows_of(q_tiles, tile + 1, 0))
            dweight = L.narrow_scores(v, L.rows_of(d_tiles, tile + 1, 0))
        dv = L.narrow_sum(weight, L.rows_of(d_tiles, tile, 0), dv)
        dk = L.narrow_sum(ds, L.rows_of(q_tiles, tile, 0), dk)
    return dk, dv


# ---------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["start", "zero"])
def _backward(
    queries, queries_tail, keys, keys_tail, values, values_tail, gradients, gradients_tail, outs,
    log_sum, query_gradient, key_gradient, value_gradient, cosine, sine, start, scale, zero,
    H: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """All gradients of one head of one row of the batch."""
    row_head = gl.program_id(0)
    row, column = row_head // H * L.LENGTH, row_head % H * L.E
    at_row = row.to(gl.int64) * STRIDE + column
    query_gradient += at_row
    key_gradient += at_row
    value_gradient += at_row
    log_sum += row_head * L.LENGTH
    # Keys and values; then queries and the gradients of their results.
    main = gl.allocate_shared_memory(gl.bfloat16, [L.TILES, L.SIDE, L.E], L.SHARED)
    other_main = gl.allocate_shared_memory(gl.bfloat16, [L.TILES, L.SIDE, L.E], L.SHARED)
    tail = gl.allocate_shared_memory(gl.bfloat16, [L.TAIL, L.E], L.SHARED)
    other_tail = gl.allocate_shared_memory(gl.bfloat16, [L.TAIL, L.E], L.SHARED)
    tiles, other_tiles = (main, tail), (other_main, other_tail)
    # A block of queries, of gradients and of results; then one of keys and two of values.
    blocks = gl.allocate_shared_memory(gl.bfloat16, [3, L.SIDE, L.E], L.SHARED)
    offsets = gl.allocate_shared_memory(gl.float32, [L.ALL_TILES, L.SIDE], L.NUMBERS)
    # Separate allocations: the compiler synchronizes all warps between uses of the same one.
    came = (L.new_barrier(), L.new_barrier(), L.new_barrier(), L.new_barrier(), L.new_barrier())
    block_came = L.new_barrier()

    mbarrier.expect(block_came, 3 * L.SIDE * L.E * 2)
    tma.async_copy_global_to_shared(queries, [row, column], block_came, blocks.index(0))
    tma.async_copy_global_to_shared(gradients, [row, column], block_came, blocks.index(1))
    tma.async_copy_global_to_shared(outs, [row, column], block_came, blocks.index(2))
    L.copy_heads(keys, keys_tail, tiles, values, values_tail, other_tiles, came, row, column)
    tops = L.to_shared(log_sum)
    _queries_pass(
        queries, gradients, outs, tiles, other_tiles, offsets, blocks, came, block_came,
        log_sum, query_gradient, cosine, sine, start, scale, row, column, zero, STRIDE,
    )  # fmt: skip
    mbarrier.wait(block_came, L.TILES & 1)
    dq = _queries_tail(
        blocks.index(0).slice(0, L.TAIL), blocks.index(1).slice(0, L.TAIL),
        blocks.index(2).slice(0, L.TAIL), tiles, other_tiles, offsets, log_sum,
    )  # fmt: skip

    gl.thread_barrier()
    fence_async_shared()
    mbarrier.expect(block_came, 2 * L.SIDE * L.E * 2)
    tma.async_copy_global_to_shared(keys, [row, column], block_came, blocks.index(0))
    tma.async_copy_global_to_shared(values, [row, column], block_came, blocks.index(1))
    L.copy_heads(
        queries, queries_tail, tiles, gradients, gradients_tail, other_tiles, came, row, column
    )
    first: gl.constexpr = L.TILES * L.SIDE
    L.store_rows(
        query_gradient, L.rotated_back(dq * scale, cosine, sine, first, start), first, STRIDE
    )
    _keys_pass(
        keys, values, tiles, other_tiles, tops, offsets, blocks, came, block_came,
        key_gradient, value_gradient, cosine, sine, row, column, zero, STRIDE,
    )  # fmt: skip
    mbarrier.wait(block_came, L.TILES + 1 & 1)
    dk, dv = _keys_tail(
        blocks.index(0).slice(0, L.TAIL), blocks.index(1).slice(0, L.TAIL),
        tiles, other_tiles, tops, offsets,
    )  # fmt: skip
    _store_keys(key_gradient, value_gradient, dk, dv, cosine, sine, first, STRIDE)


def hopper_attention_backward(given: AttentionBackward) -> None:
    """`triton.attention_backward.run_attention_backward`."""
    heads, gradients, out, log_sum, out_gradient, cosine, sine, first, _ = given
    side, tail = L.SIDE.value, L.TAIL.value
    sources = heads.query, heads.key, heads.value, out_gradient
    _backward[heads.rows * heads.heads,](
        *[L.head_descriptor(x, size) for x in sources for size in (side, tail)],
        L.head_descriptor(out, side),
        log_sum, gradients.query, gradients.key, gradients.value, cosine, sine,
        first, score_scale(heads.head_dim), 0,
        H=heads.heads, STRIDE=gradients.key.stride(1), num_warps=4,
    )  # fmt: skip
