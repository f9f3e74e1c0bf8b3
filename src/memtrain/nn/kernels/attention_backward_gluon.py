"""The backward pass of attention for Hopper, at the encoder's shape.

`attention_backward` says what is computed, and serves every shape. Here sequences have 4 x 64 + 16
rows, heads have 64 numbers, and no weight is hidden. A program has one head and goes over it twice:
with all keys and values in shared memory while its queries go by, and the other way round. What
goes by does so in blocks of 64 rows. Products are begun ahead of time, so that the matrix units
have work while weights are made.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from memtrain.nn.kernels.functions import LOG2_E
from memtrain.nn.kernels.heads import Heads, score_scale

E = gl.constexpr(64)
"""Numbers in a row of a head."""
SIDE = gl.constexpr(64)
"""Rows of a block and of a tile."""
TILES = gl.constexpr(4)
TAIL = gl.constexpr(16)
LENGTH = gl.constexpr(272)
"""Rows of a sequence: TILES · SIDE + TAIL."""
PARTS = gl.constexpr(5)
"""TILES and the tail."""

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS_OF_TAIL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
FACTOR = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
FACTOR_OF_TAIL = gl.constexpr(gl.DotOperandLayout(0, SUMS_OF_TAIL.value, 2))
NARROW_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
NARROW_FACTOR = gl.constexpr(gl.DotOperandLayout(0, NARROW_SUMS.value, 2))
NARROW_RIGHT = gl.constexpr(gl.DotOperandLayout(1, NARROW_SUMS.value, 2))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# --------------------------------------------------------------------------------------- pieces


@gluon.jit
def _tile(x, tile: gl.constexpr, nothing):
    """The rows of a tile. `nothing` is 0, kept from the compiler: it would find out where all tiles
    lie before the loop, and there are no registers for that."""
    main, tail = x
    if tile < TILES:
        return main.index(tile + nothing)
    else:
        return tail


@gluon.jit
def _barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _bring(rows, rows_of_tail, to, others, others_of_tail, others_to, came, row, column):
    """Have all rows of a head and of another brought to shared memory; `came` tells of each tile of
    both."""
    main, tail = to
    others_main, others_tail = others_to
    for tile in gl.static_range(TILES):
        at = [row + tile * SIDE, column]
        mbarrier.expect(came[tile], 2 * SIDE * E * 2)
        tma.async_copy_global_to_shared(rows, at, came[tile], main.index(tile))
        tma.async_copy_global_to_shared(others, at, came[tile], others_main.index(tile))
    at_tail = [row + TILES * SIDE, column]
    mbarrier.expect(came[TILES], 2 * TAIL * E * 2)
    tma.async_copy_global_to_shared(rows_of_tail, at_tail, came[TILES], tail)
    tma.async_copy_global_to_shared(others_of_tail, at_tail, came[TILES], others_tail)


@gluon.jit
def _scores(factor, rows):
    """Begin a block's product with the rows of a tile, (SIDE, rows)."""
    size: gl.constexpr = rows.shape[0]
    if size == SIDE:
        zero = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
        return warpgroup_mma(factor, rows.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        zero = gl.zeros((SIDE, TAIL), gl.float32, SUMS_OF_TAIL)
        if isinstance(factor, gl.tensor):
            factor = gl.convert_layout(factor, FACTOR_OF_TAIL, assert_trivial=True)
        return warpgroup_mma(factor, rows.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _kept(x):
    """A number for every row of a head, in shared memory."""
    at = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    numbers = gl.load(x + at, mask=at < LENGTH, other=0.0)
    return gl.allocate_shared_memory(gl.float32, [512], NUMBERS, numbers)


@gluon.jit
def _along(x, tile: gl.constexpr, sums: gl.constexpr):
    """What belongs to the columns of a tile; x lies in one piece, or a tile in each."""
    size: gl.constexpr = SIDE if tile < TILES else TAIL
    numbers = x.slice(tile * SIDE, size) if x.rank == 1 else x.index(tile).slice(0, size)
    return gl.expand_dims(numbers.load(gl.SliceLayout(0, sums)), 0)


@gluon.jit
def _beside(x, tile: gl.constexpr):
    """What belongs to the rows of a block, to be used with a tile."""
    sums: gl.constexpr = SUMS if tile < TILES else SUMS_OF_TAIL
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, sums), assert_trivial=True), 1)


@gluon.jit
def _as_factor(x):
    return gl.convert_layout(x.to(gl.bfloat16), FACTOR, assert_trivial=True)


@gluon.jit
def _products(one, other):
    """For every row the sum over one · other."""
    return gl.sum(one.load(ROWS).to(gl.float32) * other.load(ROWS).to(gl.float32), 1)


@gluon.jit
def _turned_back(x, cosine, sine, first, offset):
    """The gradients of rows before they were turned: of `first` and those behind it."""
    size: gl.constexpr = x.shape[0]
    left, right = gl.split(gl.permute(gl.reshape(x, (size, 2, E // 2)), (0, 2, 1)))
    layout: gl.constexpr = left.type.layout
    rows = gl.arange(0, size, gl.SliceLayout(1, layout)) + first
    half = gl.arange(0, E // 2, gl.SliceLayout(0, layout))
    angle = gl.expand_dims(rows + offset, 1) * (E // 2) + gl.expand_dims(half, 0)
    c = gl.load(cosine + angle).to(gl.float32)
    s = gl.load(sine + angle).to(gl.float32)
    both = gl.join(left * c + right * s, right * c - left * s)
    return gl.reshape(gl.permute(both, (0, 2, 1)), (size, E))


@gluon.jit
def _store(x, value, first, stride):
    """Write the rows of a block."""
    size: gl.constexpr = value.shape[0]
    value = gl.convert_layout(value.to(gl.bfloat16), ROWS)
    rows = gl.arange(0, size, gl.SliceLayout(1, ROWS)) + first
    columns = gl.arange(0, E, gl.SliceLayout(0, ROWS))
    at = gl.expand_dims(rows, 1) * stride + gl.expand_dims(columns, 0)
    gl.store(x + at, value)


@gluon.jit
def _store_keys(key_gradient, value_gradient, dk, dv, cosine, sine, first, stride):
    """Queries carried scale · log2(e); the gradient of the keys wants scale alone."""
    _store(key_gradient, _turned_back(dk / LOG2_E, cosine, sine, first, 0), first, stride)
    _store(value_gradient, dv, first, stride)


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
        sums = _products(blocks.index(1), blocks.index(2))
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
        mbarrier.wait(came[0], 0)
        score = _scores(q, _tile(k_tiles, 0, hidden))
        for tile in gl.static_range(PARTS):
            k, v = _tile(k_tiles, tile, hidden), _tile(v_tiles, tile, hidden)
            dweight = _scores(do, v)
            # Begun since these scores: dq of the tile before, dweight.
            score = warpgroup_mma_wait(2 if tile else 1, (score,))
            weight = gl.exp2(score - _beside(top, tile))
            if tile < TILES:
                mbarrier.wait(came[tile + 1], 0)
                score = _scores(q, _tile(k_tiles, tile + 1, hidden))
            # Begun since dweight: the next scores.
            dweight = warpgroup_mma_wait(1 if tile < TILES else 0, (dweight,))
            ds = weight * (dweight - _beside(offset, tile))
            dq = warpgroup_mma(_as_factor(ds), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, (dq,))
        gradient = _turned_back(dq * scale, cosine, sine, first, start)
        _store(query_gradient, gradient, first, STRIDE)


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
        gl.thread_barrier()
        fence_async_shared()
        at = [row + first + SIDE, column]
        mbarrier.expect(block_came, 2 * SIDE * E * 2)
        tma.async_copy_global_to_shared(keys, at, block_came, blocks.index(0))
        tma.async_copy_global_to_shared(values, at, block_came, blocks.index(2 - (block & 1)))
        dk = gl.zeros((SIDE, E), gl.float32, SUMS)
        dv = gl.zeros((SIDE, E), gl.float32, SUMS)
        mbarrier.wait(came[0], 1)
        score = _scores(k, _tile(q_tiles, 0, hidden))
        for tile in gl.static_range(PARTS):
            q, do = _tile(q_tiles, tile, hidden), _tile(d_tiles, tile, hidden)
            dweight = _scores(v, do)
            top = _along(tops, tile, SUMS if tile < TILES else SUMS_OF_TAIL)
            # Begun since these scores: dk of the tile before, dweight.
            score = warpgroup_mma_wait(2 if tile else 1, (score,))
            weight = gl.exp2(score - top)
            dv = warpgroup_mma(_as_factor(weight), do, dv, is_async=True)
            if tile < TILES:
                mbarrier.wait(came[tile + 1], 1)
                score = _scores(k, _tile(q_tiles, tile + 1, hidden))
            # Begun since dweight: dv, the next scores.
            dweight = warpgroup_mma_wait(2 if tile < TILES else 1, (dweight,))
            offset = _along(offsets, tile, SUMS if tile < TILES else SUMS_OF_TAIL)
            ds = weight * (dweight - offset)
            dk = warpgroup_mma(_as_factor(ds), q, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, (dk, dv))
        _store_keys(key_gradient, value_gradient, dk, dv, cosine, sine, first, STRIDE)


# ----------------------------------------------------------------------------------------- tails

# TAIL rows are a quarter of what `warpgroup_mma` takes; the older instruction takes just them.


@gluon.jit
def _narrow_scores(factor, rows):
    """The tail's product with the rows of a tile, (TAIL, rows)."""
    size: gl.constexpr = rows.shape[0]
    zero = gl.zeros((TAIL, size), gl.float32, NARROW_SUMS)
    return mma_v2(factor, rows.permute((1, 0)).load(NARROW_RIGHT), zero)


@gluon.jit
def _narrow_sum(weight, rows, total):
    factor = gl.convert_layout(weight.to(gl.bfloat16), NARROW_FACTOR)
    return mma_v2(factor, rows.load(NARROW_RIGHT), total)


@gluon.jit
def _queries_tail(queries, gradients, outs, k_tiles, v_tiles, offsets, log_sum):
    """The gradients of the tail's queries, and their sums over out · its gradient."""
    top = gl.load(log_sum + TILES * SIDE + gl.arange(0, TAIL, gl.SliceLayout(1, NARROW_SUMS)))
    top = gl.expand_dims(top, 1)
    sums = _products(gradients, outs)
    offsets.index(TILES).slice(0, TAIL).store(sums)
    offset = gl.expand_dims(gl.convert_layout(sums, gl.SliceLayout(1, NARROW_SUMS)), 1)
    q, do = queries.load(NARROW_FACTOR), gradients.load(NARROW_FACTOR)
    dq = gl.zeros((TAIL, E), gl.float32, NARROW_SUMS)
    score = _narrow_scores(q, _tile(k_tiles, 0, 0))
    dweight = _narrow_scores(do, _tile(v_tiles, 0, 0))
    for tile in gl.static_range(PARTS):
        ds = gl.exp2(score - top) * (dweight - offset)
        if tile < TILES:
            score = _narrow_scores(q, _tile(k_tiles, tile + 1, 0))
            dweight = _narrow_scores(do, _tile(v_tiles, tile + 1, 0))
        dq = _narrow_sum(ds, _tile(k_tiles, tile, 0), dq)
    return dq


@gluon.jit
def _keys_tail(keys, values, q_tiles, d_tiles, tops, offsets):
    """The gradients of the tail's keys and values."""
    k, v = keys.load(NARROW_FACTOR), values.load(NARROW_FACTOR)
    dk = gl.zeros((TAIL, E), gl.float32, NARROW_SUMS)
    dv = gl.zeros((TAIL, E), gl.float32, NARROW_SUMS)
    score = _narrow_scores(k, _tile(q_tiles, 0, 0))
    dweight = _narrow_scores(v, _tile(d_tiles, 0, 0))
    for tile in gl.static_range(PARTS):
        weight = gl.exp2(score - _along(tops, tile, NARROW_SUMS))
        ds = weight * (dweight - _along(offsets, tile, NARROW_SUMS))
        if tile < TILES:
            score = _narrow_scores(k, _tile(q_tiles, tile + 1, 0))
            dweight = _narrow_scores(v, _tile(d_tiles, tile + 1, 0))
        dv = _narrow_sum(weight, _tile(d_tiles, tile, 0), dv)
        dk = _narrow_sum(ds, _tile(q_tiles, tile, 0), dk)
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
    came = (_barrier(), _barrier(), _barrier(), _barrier(), _barrier())
    block_came = _barrier()

    mbarrier.expect(block_came, 3 * SIDE * E * 2)
    tma.async_copy_global_to_shared(queries, [row, column], block_came, blocks.index(0))
    tma.async_copy_global_to_shared(gradients, [row, column], block_came, blocks.index(1))
    tma.async_copy_global_to_shared(outs, [row, column], block_came, blocks.index(2))
    _bring(keys, keys_tail, tiles, values, values_tail, other_tiles, came, row, column)
    tops = _kept(log_sum)
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
    _bring(
        queries, queries_tail, tiles, gradients, gradients_tail, other_tiles, came, row, column
    )  # fmt: skip
    first: gl.constexpr = TILES * SIDE
    _store(query_gradient, _turned_back(dq * scale, cosine, sine, first, start), first, STRIDE)
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


def serves(heads: Heads, causal: bool) -> bool:
    """Whether these kernels were written for such heads and such a device."""
    shape = heads.head_dim, heads.queries, heads.keys
    return (
        heads.query.is_cuda
        and not causal
        and shape == (E.value, LENGTH.value, LENGTH.value)
        and heads.query.dtype == torch.bfloat16
        and heads.query.stride(1) == heads.key.stride(1)
        and torch.cuda.get_device_capability(heads.query.device) == (9, 0)
    )


def _rows(x: Tensor, size: int) -> TensorDescriptor:
    """Rows of all sequences of x, (N, L, H · E), to be brought `size` at a time, a head's part."""
    count, length, width = x.shape
    shape, strides = [count * length, width], [x.stride(1), 1]
    return TensorDescriptor(x, shape, strides, [size, E.value], SHARED.value)


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
        *[_rows(x, size) for x in sources for size in (side, tail)], _rows(out, side),
        log_sum, gradients.query, gradients.key, gradients.value, cosine, sine,
        first, score_scale(heads.head_dim), 0,
        H=heads.heads, STRIDE=gradients.key.stride(1), num_warps=4,
    )  # fmt: skip
