"""The backward pass of attention for Hopper, at the encoder's shape.

`attention_backward` says what is computed, and serves every shape. Here sequences have 4 x 64 + 16
rows, heads have 64 numbers, and no weight is hidden. A program has one head and goes over it twice:
with all keys and values in shared memory while its queries go by, and the other way round. What
goes by does so in blocks of 64 rows. Products are begun ahead of time, so that the matrix units
have work while weights are made.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from memtrain.accel.hopper.layout import (
    FACTOR,
    LENGTH,
    NARROW_FACTOR,
    NARROW_SUMS,
    NUMBERS,
    PARTS,
    SHARED,
    SIDE,
    SUMS,
    SUMS_OF_TAIL,
    TAIL,
    TILES,
    E,
    along,
    as_factor,
    begin_scores,
    beside,
    bring,
    descriptor,
    kept,
    narrow_scores,
    narrow_sum,
    new_barrier,
    products,
    rows_of,
    store,
    turned_back,
)
from memtrain.accel.triton.attention_heads import Heads, score_scale
from memtrain.accel.triton.common import LOG2_E


@gluon.jit
def _store_keys(key_gradient, value_gradient, dk, dv, cosine, sine, first, stride):
    """Queries carried scale · log2(e); the gradient of the keys wants scale alone."""
    store(key_gradient, turned_back(dk / LOG2_E, cosine, sine, first, 0), first, stride)
    store(value_gradient, dv, first, stride)


# --------------------------------------------------------------------------------------- passes

# Products run one behind the other, in the order they were begun. `warpgroup_mma_wait(n)` waits
# until at most n of them are left: those begun after the one that is wanted.


@gluon.jit
def _queries_pass(
    queries, gradients, outs, k_tiles, v_tiles, offsets, blocks, came, block_came,
    log_sum, query_gradient, cosine, sine, start, scale, row, column, nothing,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """The gradients of the queries but the tail's, and all sums over out · its gradient."""
    for block in range(TILES):
        first = block * SIDE
        hidden = block * nothing
        top = gl.load(log_sum + first + gl.arange(0, SIDE, gl.SliceLayout(1, SUMS)))
        mbarrier.wait(block_came, block & 1)
        q = blocks.index(0).load(FACTOR)
        do = blocks.index(1).load(FACTOR)
        mbarrier.wait(came[0], 0)
        score = begin_scores(q, rows_of(k_tiles, 0, hidden))
        dweight = begin_scores(do, rows_of(v_tiles, 0, hidden))
        sums = products(blocks.index(1), blocks.index(2))
        offset = gl.convert_layout(sums, gl.SliceLayout(1, SUMS))
        offsets.index(block).store(offset)
        gl.thread_barrier()
        fence_async_shared()
        at = [row + first + SIDE, column]
        mbarrier.expect(block_came, 3 * SIDE * E * 2)
        tma.async_copy_global_to_shared(queries, at, block_came, blocks.index(0))
        tma.async_copy_global_to_shared(gradients, at, block_came, blocks.index(1))
        tma.async_copy_global_to_shared(outs, at, block_came, blocks.index(2))
        dq = gl.zeros((SIDE, E), gl.float32, SUMS)
        for tile in gl.static_range(PARTS):
            # Begun since these scores: dq of the tile before, dweight.
            score = warpgroup_mma_wait(2 if tile else 1, (score,))
            weight = gl.exp2(score - beside(top, tile))
            if tile < TILES:
                mbarrier.wait(came[tile + 1], 0)
                score = begin_scores(q, rows_of(k_tiles, tile + 1, hidden))
            # Begun since dweight: the next scores.
            dweight = warpgroup_mma_wait(1 if tile < TILES else 0, (dweight,))
            ds = weight * (dweight - beside(offset, tile))
            dq = warpgroup_mma(as_factor(ds), rows_of(k_tiles, tile, hidden), dq, is_async=True)
            if tile < TILES:
                dweight = begin_scores(do, rows_of(v_tiles, tile + 1, hidden))
        dq = warpgroup_mma_wait(0, (dq,))
        gradient = turned_back(dq * scale, cosine, sine, first, start)
        store(query_gradient, gradient, first, STRIDE)


@gluon.jit
def _keys_pass(
    keys, values, q_tiles, d_tiles, tops, offsets, blocks, came, block_came,
    key_gradient, value_gradient, cosine, sine, row, column, nothing,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """The gradients of keys and values but the tail's. Scores lie transposed, keys x queries."""
    for block in range(TILES):
        first = block * SIDE
        hidden = block * nothing
        # An odd number of blocks came before these.
        mbarrier.wait(block_came, block + 1 & 1)
        k = blocks.index(0).load(FACTOR)
        v = blocks.index(1 + (block & 1))
        mbarrier.wait(came[0], 1)
        score = begin_scores(k, rows_of(q_tiles, 0, hidden))
        dweight = begin_scores(v, rows_of(d_tiles, 0, hidden))
        gl.thread_barrier()
        fence_async_shared()
        at = [row + first + SIDE, column]
        mbarrier.expect(block_came, 2 * SIDE * E * 2)
        tma.async_copy_global_to_shared(keys, at, block_came, blocks.index(0))
        tma.async_copy_global_to_shared(values, at, block_came, blocks.index(2 - (block & 1)))
        dk = gl.zeros((SIDE, E), gl.float32, SUMS)
        dv = gl.zeros((SIDE, E), gl.float32, SUMS)
        for tile in gl.static_range(PARTS):
            q, do = rows_of(q_tiles, tile, hidden), rows_of(d_tiles, tile, hidden)
            top = along(tops, tile, SUMS if tile < TILES else SUMS_OF_TAIL)
            # Begun since these scores: dk of the tile before, dweight.
            score = warpgroup_mma_wait(2 if tile else 1, (score,))
            weight = gl.exp2(score - top)
            dv = warpgroup_mma(as_factor(weight), do, dv, is_async=True)
            if tile < TILES:
                mbarrier.wait(came[tile + 1], 1)
                score = begin_scores(k, rows_of(q_tiles, tile + 1, hidden))
            # Begun since dweight: dv, the next scores.
            dweight = warpgroup_mma_wait(2 if tile < TILES else 1, (dweight,))
            offset = along(offsets, tile, SUMS if tile < TILES else SUMS_OF_TAIL)
            ds = weight * (dweight - offset)
            dk = warpgroup_mma(as_factor(ds), q, dk, is_async=True)
            if tile < TILES:
                dweight = begin_scores(v, rows_of(d_tiles, tile + 1, hidden))
        dk, dv = warpgroup_mma_wait(0, (dk, dv))
        _store_keys(key_gradient, value_gradient, dk, dv, cosine, sine, first, STRIDE)


# ----------------------------------------------------------------------------------------- tails


@gluon.jit
def _queries_tail(queries, gradients, outs, k_tiles, v_tiles, offsets, log_sum):
    """The gradients of the tail's queries, and their sums over out · its gradient."""
    top = gl.load(log_sum + TILES * SIDE + gl.arange(0, TAIL, gl.SliceLayout(1, NARROW_SUMS)))
    top = gl.expand_dims(top, 1)
    sums = products(gradients, outs)
    offsets.index(TILES).slice(0, TAIL).store(sums)
    offset = gl.expand_dims(gl.convert_layout(sums, gl.SliceLayout(1, NARROW_SUMS)), 1)
    q, do = queries.load(NARROW_FACTOR), gradients.load(NARROW_FACTOR)
    dq = gl.zeros((TAIL, E), gl.float32, NARROW_SUMS)
    score = narrow_scores(q, rows_of(k_tiles, 0, 0))
    dweight = narrow_scores(do, rows_of(v_tiles, 0, 0))
    for tile in gl.static_range(PARTS):
        ds = gl.exp2(score - top) * (dweight - offset)
        if tile < TILES:
            score = narrow_scores(q, rows_of(k_tiles, tile + 1, 0))
            dweight = narrow_scores(do, rows_of(v_tiles, tile + 1, 0))
        dq = narrow_sum(ds, rows_of(k_tiles, tile, 0), dq)
    return dq


@gluon.jit
def _keys_tail(keys, values, q_tiles, d_tiles, tops, offsets):
    """The gradients of the tail's keys and values."""
    k, v = keys.load(NARROW_FACTOR), values.load(NARROW_FACTOR)
    dk = gl.zeros((TAIL, E), gl.float32, NARROW_SUMS)
    dv = gl.zeros((TAIL, E), gl.float32, NARROW_SUMS)
    score = narrow_scores(k, rows_of(q_tiles, 0, 0))
    dweight = narrow_scores(v, rows_of(d_tiles, 0, 0))
    for tile in gl.static_range(PARTS):
        weight = gl.exp2(score - along(tops, tile, NARROW_SUMS))
        ds = weight * (dweight - along(offsets, tile, NARROW_SUMS))
        if tile < TILES:
            score = narrow_scores(k, rows_of(q_tiles, tile + 1, 0))
            dweight = narrow_scores(v, rows_of(d_tiles, tile + 1, 0))
        dv = narrow_sum(weight, rows_of(d_tiles, tile, 0), dv)
        dk = narrow_sum(ds, rows_of(q_tiles, tile, 0), dk)
    return dk, dv


# ---------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["start", "nothing"])
def _backward(
    queries, queries_tail, keys, keys_tail, values, values_tail, gradients, gradients_tail, outs,
    log_sum, query_gradient, key_gradient, value_gradient, cosine, sine, start, scale, nothing,
    H: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """All gradients of one head of one row of the batch."""
    row_head = gl.program_id(0)
    row, column = row_head // H * LENGTH, row_head % H * E
    at_row = row.to(gl.int64) * STRIDE + column
    query_gradient += at_row
    key_gradient += at_row
    value_gradient += at_row
    log_sum += row_head * LENGTH
    # Keys and their values; then queries and the gradients of what they got.
    main = gl.allocate_shared_memory(gl.bfloat16, [TILES, SIDE, E], SHARED)
    other_main = gl.allocate_shared_memory(gl.bfloat16, [TILES, SIDE, E], SHARED)
    tail = gl.allocate_shared_memory(gl.bfloat16, [TAIL, E], SHARED)
    other_tail = gl.allocate_shared_memory(gl.bfloat16, [TAIL, E], SHARED)
    tiles, other_tiles = (main, tail), (other_main, other_tail)
    # A block of queries, of gradients and of what they got; then one of keys, and two of values.
    blocks = gl.allocate_shared_memory(gl.bfloat16, [3, SIDE, E], SHARED)
    offsets = gl.allocate_shared_memory(gl.float32, [PARTS, SIDE], NUMBERS)
    # Each in a place of its own: the compiler lets all warps meet between uses of one place.
    came = (new_barrier(), new_barrier(), new_barrier(), new_barrier(), new_barrier())
    block_came = new_barrier()

    mbarrier.expect(block_came, 3 * SIDE * E * 2)
    tma.async_copy_global_to_shared(queries, [row, column], block_came, blocks.index(0))
    tma.async_copy_global_to_shared(gradients, [row, column], block_came, blocks.index(1))
    tma.async_copy_global_to_shared(outs, [row, column], block_came, blocks.index(2))
    bring(keys, keys_tail, tiles, values, values_tail, other_tiles, came, row, column)
    tops = kept(log_sum)
    _queries_pass(
        queries, gradients, outs, tiles, other_tiles, offsets, blocks, came, block_came,
        log_sum, query_gradient, cosine, sine, start, scale, row, column, nothing, STRIDE,
    )  # fmt: skip
    mbarrier.wait(block_came, TILES & 1)
    dq = _queries_tail(
        blocks.index(0).slice(0, TAIL), blocks.index(1).slice(0, TAIL),
        blocks.index(2).slice(0, TAIL), tiles, other_tiles, offsets, log_sum,
    )  # fmt: skip

    gl.thread_barrier()
    fence_async_shared()
    mbarrier.expect(block_came, 2 * SIDE * E * 2)
    tma.async_copy_global_to_shared(keys, [row, column], block_came, blocks.index(0))
    tma.async_copy_global_to_shared(values, [row, column], block_came, blocks.index(1))
    bring(
        queries, queries_tail, tiles, gradients, gradients_tail, other_tiles, came, row, column
    )  # fmt: skip
    first: gl.constexpr = TILES * SIDE
    store(query_gradient, turned_back(dq * scale, cosine, sine, first, start), first, STRIDE)
    _keys_pass(
        keys, values, tiles, other_tiles, tops, offsets, blocks, came, block_came,
        key_gradient, value_gradient, cosine, sine, row, column, nothing, STRIDE,
    )  # fmt: skip
    mbarrier.wait(block_came, TILES + 1 & 1)
    dk, dv = _keys_tail(
        blocks.index(0).slice(0, TAIL), blocks.index(1).slice(0, TAIL),
        tiles, other_tiles, tops, offsets,
    )  # fmt: skip
    _store_keys(key_gradient, value_gradient, dk, dv, cosine, sine, first, STRIDE)


# ---------------------------------------------------------------------------------------- launch


def run_backward(
    heads: Heads,
    gradients: Heads,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
    cosine: Tensor,
    sine: Tensor,
    first: int,
) -> None:
    """Fill the gradients of heads before they were turned, laid out as the heads are."""
    side, tail = SIDE.value, TAIL.value
    sources = heads.query, heads.key, heads.value, out_gradient
    _backward[heads.rows * heads.heads,](
        *[descriptor(x, size) for x in sources for size in (side, tail)], descriptor(out, side),
        log_sum, gradients.query, gradients.key, gradients.value, cosine, sine,
        first, score_scale(heads.head_dim), 0,
        H=heads.heads, STRIDE=gradients.key.stride(1), num_warps=4,
    )  # fmt: skip
