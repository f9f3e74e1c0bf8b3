"""The backward pass of attention for Hopper, at the encoder's shape.

`attention_backward` says what is computed and serves every shape. Here are 4 x 64 + 16 rows of
heads of 64 numbers, with no mask. A program has one head and keeps one side of it in shared memory;
the other side goes by in blocks of 64 rows, as factors in registers. So nothing is read twice, and
a matrix unit has products waiting while the weights of the tile before it are made.
"""

import torch
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
BLOCKS = gl.constexpr(5)
"""Blocks of a sequence; of the last one TAIL rows count."""

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS_OF_TAIL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
FACTOR = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
FACTOR_OF_TAIL = gl.constexpr(gl.DotOperandLayout(0, SUMS_OF_TAIL.value, 2))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# --------------------------------------------------------------------------------------- pieces


@gluon.jit
def _tile(main, tail, tile: gl.constexpr):
    """The rows of a tile."""
    if tile < TILES:
        return main.index(tile)
    else:
        return tail


@gluon.jit
def _scores(factor, rows):
    """Begin a block's product with the rows of a tile, (SIDE, rows)."""
    size: gl.constexpr = rows.shape[0]
    if size == SIDE:
        zero = gl.zeros((SIDE, SIDE), gl.float32, SUMS)
        return warpgroup_mma(factor, rows.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        zero = gl.zeros((SIDE, TAIL), gl.float32, SUMS_OF_TAIL)
        narrow = gl.convert_layout(factor, FACTOR_OF_TAIL, assert_trivial=True)
        return warpgroup_mma(narrow, rows.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _along(x, tile: gl.constexpr):
    """What belongs to the columns of a tile."""
    sums: gl.constexpr = SUMS if tile < TILES else SUMS_OF_TAIL
    size: gl.constexpr = SIDE if tile < TILES else TAIL
    columns = tile * SIDE + gl.arange(0, size, gl.SliceLayout(0, sums))
    return gl.expand_dims(gl.load(x + columns), 0)


@gluon.jit
def _beside(x, tile: gl.constexpr):
    """What belongs to the rows of a block, to be used with a tile."""
    sums: gl.constexpr = SUMS if tile < TILES else SUMS_OF_TAIL
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, sums), assert_trivial=True), 1)


@gluon.jit
def _as_factor(x):
    return gl.convert_layout(x.to(gl.bfloat16), FACTOR, assert_trivial=True)


@gluon.jit
def _load_side(one, one_tail, other, other_tail, to, to_tail, other_to, other_to_tail, came, row, column):  # fmt: skip
    """Have both halves of a side brought to shared memory, tile by tile."""
    for tile in gl.static_range(TILES):
        bar = came.index(tile)
        mbarrier.expect(bar, 2 * SIDE * E * 2)
        tma.async_copy_global_to_shared(one, [row + tile * SIDE, column], bar, to.index(tile))
        tma.async_copy_global_to_shared(
            other, [row + tile * SIDE, column], bar, other_to.index(tile)
        )
    bar = came.index(TILES)
    mbarrier.expect(bar, 2 * TAIL * E * 2)
    tma.async_copy_global_to_shared(one_tail, [row + TILES * SIDE, column], bar, to_tail)
    tma.async_copy_global_to_shared(other_tail, [row + TILES * SIDE, column], bar, other_to_tail)


@gluon.jit
def _turned_back(x, cosine, sine, first, offset):
    """The gradient, (SIDE, E), of rows before they were turned: `first` and those behind it."""
    left, right = gl.split(gl.permute(gl.reshape(x, (SIDE, 2, E // 2)), (0, 2, 1)))
    layout: gl.constexpr = left.type.layout
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, layout)) + first
    half = gl.arange(0, E // 2, gl.SliceLayout(0, layout))
    angle = gl.expand_dims(rows + offset, 1) * (E // 2) + gl.expand_dims(half, 0)
    there = gl.expand_dims(rows < LENGTH, 1)
    c = gl.load(cosine + angle, mask=there, other=0.0).to(gl.float32)
    s = gl.load(sine + angle, mask=there, other=0.0).to(gl.float32)
    both = gl.join(left * c + right * s, right * c - left * s)
    return gl.reshape(gl.permute(both, (0, 2, 1)), (SIDE, E))


@gluon.jit
def _store(x, value, first, stride):
    """Write rows of a block that are there."""
    value = gl.convert_layout(value.to(gl.bfloat16), ROWS)
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, ROWS)) + first
    columns = gl.arange(0, E, gl.SliceLayout(0, ROWS))
    at = gl.expand_dims(rows, 1) * stride + gl.expand_dims(columns, 0)
    gl.store(x + at, value, mask=gl.expand_dims(rows < LENGTH, 1))


# --------------------------------------------------------------------------------------- kernels

# Products run one behind the other, in the order they were begun; `warpgroup_mma_wait(n)` waits
# until at most the n last of them run. So the numbers below are how many were begun since.


@gluon.jit
def _backward_keys(
    queries, queries_tail, gradients, gradients_tail, keys, values,
    log_sum, delta, key_gradient, value_gradient, cosine, sine,
    H: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """The gradients of one head's keys and values. Scores lie transposed, keys x queries."""
    row_head = gl.program_id(0)
    row, column = row_head // H * LENGTH, row_head % H * E
    q_main = gl.allocate_shared_memory(gl.bfloat16, [TILES, SIDE, E], SHARED)
    d_main = gl.allocate_shared_memory(gl.bfloat16, [TILES, SIDE, E], SHARED)
    q_tail = gl.allocate_shared_memory(gl.bfloat16, [TAIL, E], SHARED)
    d_tail = gl.allocate_shared_memory(gl.bfloat16, [TAIL, E], SHARED)
    k_block = gl.allocate_shared_memory(gl.bfloat16, [SIDE, E], SHARED)
    v_block = gl.allocate_shared_memory(gl.bfloat16, [SIDE, E], SHARED)
    came = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    block_came = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for tile in gl.static_range(BLOCKS):
        mbarrier.init(came.index(tile), count=1)
    mbarrier.init(block_came, count=1)
    mbarrier.expect(block_came, 2 * SIDE * E * 2)
    tma.async_copy_global_to_shared(keys, [row, column], block_came, k_block)
    tma.async_copy_global_to_shared(values, [row, column], block_came, v_block)
    _load_side(
        queries, queries_tail, gradients, gradients_tail, q_main, q_tail, d_main, d_tail,
        came, row, column,
    )  # fmt: skip
    log_sum += row_head * LENGTH
    delta += row_head * LENGTH
    key_gradient += row.to(gl.int64) * STRIDE + column
    value_gradient += row.to(gl.int64) * STRIDE + column
    for block in range(BLOCKS):
        mbarrier.wait(block_came, block & 1)
        k = k_block.load(FACTOR)
        v = v_block.load(FACTOR)
        gl.thread_barrier()
        fence_async_shared()
        more = block + 1 < BLOCKS
        following = row + (block + 1) * SIDE
        mbarrier.expect(block_came, 2 * SIDE * E * 2, pred=more)
        tma.async_copy_global_to_shared(keys, [following, column], block_came, k_block, pred=more)
        tma.async_copy_global_to_shared(values, [following, column], block_came, v_block, pred=more)
        dk = gl.zeros((SIDE, E), gl.float32, SUMS)
        dv = gl.zeros((SIDE, E), gl.float32, SUMS)
        mbarrier.wait(came.index(0), 0)
        score = _scores(k, q_main.index(0))
        for tile in gl.static_range(BLOCKS):
            q, do = _tile(q_main, q_tail, tile), _tile(d_main, d_tail, tile)
            dweight = _scores(v, do)
            top, offset = _along(log_sum, tile), _along(delta, tile)
            # Begun since these scores: dk of the tile before, dweight.
            score = warpgroup_mma_wait(2 if tile else 1, (score,))
            weight = gl.exp2(score - top)
            dv = warpgroup_mma(_as_factor(weight), do, dv, is_async=True)
            if tile < TILES:
                mbarrier.wait(came.index(tile + 1), 0)
                score = _scores(k, _tile(q_main, q_tail, tile + 1))
            dweight = warpgroup_mma_wait(2 if tile < TILES else 1, (dweight,))
            ds = weight * (dweight - offset)
            dk = warpgroup_mma(_as_factor(ds), q, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, (dk, dv))
        first = block * SIDE
        # Queries carried scale · log2(e); the gradient of the keys wants scale alone.
        _store(key_gradient, _turned_back(dk / LOG2_E, cosine, sine, first, 0), first, STRIDE)
        _store(value_gradient, dv, first, STRIDE)


@gluon.jit
def _backward_queries(
    keys, keys_tail, values, values_tail, queries, gradients, outs,
    log_sum, delta, query_gradient, cosine, sine, offset, scale,
    H: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """The gradients of one head's queries, and for `_backward_keys` the sums over
    out · its gradient (`delta`)."""
    row_head = gl.program_id(0)
    row, column = row_head // H * LENGTH, row_head % H * E
    k_main = gl.allocate_shared_memory(gl.bfloat16, [TILES, SIDE, E], SHARED)
    v_main = gl.allocate_shared_memory(gl.bfloat16, [TILES, SIDE, E], SHARED)
    k_tail = gl.allocate_shared_memory(gl.bfloat16, [TAIL, E], SHARED)
    v_tail = gl.allocate_shared_memory(gl.bfloat16, [TAIL, E], SHARED)
    q_block = gl.allocate_shared_memory(gl.bfloat16, [SIDE, E], SHARED)
    d_block = gl.allocate_shared_memory(gl.bfloat16, [SIDE, E], SHARED)
    o_block = gl.allocate_shared_memory(gl.bfloat16, [SIDE, E], SHARED)
    came = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    block_came = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for tile in gl.static_range(BLOCKS):
        mbarrier.init(came.index(tile), count=1)
    mbarrier.init(block_came, count=1)
    mbarrier.expect(block_came, 3 * SIDE * E * 2)
    tma.async_copy_global_to_shared(queries, [row, column], block_came, q_block)
    tma.async_copy_global_to_shared(gradients, [row, column], block_came, d_block)
    tma.async_copy_global_to_shared(outs, [row, column], block_came, o_block)
    _load_side(
        keys, keys_tail, values, values_tail, k_main, k_tail, v_main, v_tail, came, row, column
    )
    log_sum += row_head * LENGTH
    delta += row_head * LENGTH
    query_gradient += row.to(gl.int64) * STRIDE + column
    for block in range(BLOCKS):
        first = block * SIDE
        rows = gl.arange(0, SIDE, gl.SliceLayout(1, SUMS)) + first
        # Rows that are not there weigh nothing.
        top = gl.load(log_sum + rows, mask=rows < LENGTH, other=1e30)
        mbarrier.wait(block_came, block & 1)
        q = q_block.load(FACTOR)
        do = d_block.load(FACTOR)
        product = o_block.load(ROWS).to(gl.float32) * d_block.load(ROWS).to(gl.float32)
        shares = gl.convert_layout(gl.sum(product, 1), gl.SliceLayout(1, SUMS))
        gl.thread_barrier()
        fence_async_shared()
        more = block + 1 < BLOCKS
        following = row + first + SIDE
        mbarrier.expect(block_came, 3 * SIDE * E * 2, pred=more)
        tma.async_copy_global_to_shared(queries, [following, column], block_came, q_block, pred=more)
        tma.async_copy_global_to_shared(gradients, [following, column], block_came, d_block, pred=more)
        tma.async_copy_global_to_shared(outs, [following, column], block_came, o_block, pred=more)
        gl.store(delta + rows, shares, mask=rows < LENGTH)
        dq = gl.zeros((SIDE, E), gl.float32, SUMS)
        mbarrier.wait(came.index(0), 0)
        score = _scores(q, k_main.index(0))
        for tile in gl.static_range(BLOCKS):
            k, v = _tile(k_main, k_tail, tile), _tile(v_main, v_tail, tile)
            dweight = _scores(do, v)
            # Begun since these scores: dq of the tile before, dweight.
            score = warpgroup_mma_wait(2 if tile else 1, (score,))
            weight = gl.exp2(score - _beside(top, tile))
            if tile < TILES:
                mbarrier.wait(came.index(tile + 1), 0)
                score = _scores(q, _tile(k_main, k_tail, tile + 1))
            dweight = warpgroup_mma_wait(1 if tile < TILES else 0, (dweight,))
            ds = weight * (dweight - _beside(shares, tile))
            dq = warpgroup_mma(_as_factor(ds), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, (dq,))
        _store(query_gradient, _turned_back(dq * scale, cosine, sine, first, offset), first, STRIDE)


# ---------------------------------------------------------------------------------------- launch


def serves(heads: Heads, causal: bool) -> bool:
    """Whether these kernels were written for such heads and such a device."""
    shape = heads.head_dim, heads.queries, heads.keys
    return (
        not causal
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
    query, key, value = (_rows(x, side) for x in (heads.query, heads.key, heads.value))
    query_tail, key_tail, value_tail = (
        _rows(x, tail) for x in (heads.query, heads.key, heads.value)
    )
    given, given_tail = _rows(out_gradient, side), _rows(out_gradient, tail)
    delta = torch.empty_like(log_sum)
    grid = (heads.rows * heads.heads,)
    constants = {"H": heads.heads, "STRIDE": gradients.key.stride(1), "num_warps": 4}
    _backward_queries[grid](
        key, key_tail, value, value_tail, query, given, _rows(out, side),
        log_sum, delta, gradients.query, cosine, sine, first, score_scale(heads.head_dim),
        **constants,
    )  # fmt: skip
    _backward_keys[grid](
        query, query_tail, given, given_tail, key, value,
        log_sum, delta, gradients.key, gradients.value, cosine, sine, **constants,
    )  # fmt: skip
