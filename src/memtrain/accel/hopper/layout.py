"""What Gluon kernels of attention for Hopper share: the encoder's shape, and how its tiles are laid
out, brought to shared memory, multiplied and stored.

A sequence has 4 x 64 + 16 rows: TILES tiles and a tail. A program is one group of four warps.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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

# -------------------------------------------------------------------------------- to shared memory


def descriptor(x: Tensor, size: int) -> TensorDescriptor:
    """Rows of all sequences of x, (N, L, H · E), to be brought `size` at a time, a head's part."""
    count, length, width = x.shape
    shape, strides = [count * length, width], [x.stride(1), 1]
    return TensorDescriptor(x, shape, strides, [size, E.value], SHARED.value)


@gluon.jit
def new_barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def bring(rows, rows_of_tail, to, others, others_of_tail, others_to, came, row, column):
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
def kept(x):
    """A number for every row of a head, in shared memory."""
    at = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    numbers = gl.load(x + at, mask=at < LENGTH, other=0.0)
    return gl.allocate_shared_memory(gl.float32, [512], NUMBERS, numbers)


@gluon.jit
def rows_of(x, tile: gl.constexpr, nothing):
    """The rows of a tile. `nothing` is 0, kept from the compiler: it would find out where all tiles
    lie before the loop, and there are no registers for that."""
    main, tail = x
    if tile < TILES:
        return main.index(tile + nothing)
    else:
        return tail


# ---------------------------------------------------------------------------------------- products


@gluon.jit
def begin_scores(factor, rows):
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
def as_factor(x):
    return gl.convert_layout(x.to(gl.bfloat16), FACTOR, assert_trivial=True)


@gluon.jit
def along(x, tile: gl.constexpr, sums: gl.constexpr):
    """What belongs to the columns of a tile; x lies in one piece, or a tile in each."""
    size: gl.constexpr = SIDE if tile < TILES else TAIL
    numbers = x.slice(tile * SIDE, size) if x.rank == 1 else x.index(tile).slice(0, size)
    return gl.expand_dims(numbers.load(gl.SliceLayout(0, sums)), 0)


@gluon.jit
def beside(x, tile: gl.constexpr):
    """What belongs to the rows of a block, to be used with a tile."""
    sums: gl.constexpr = SUMS if tile < TILES else SUMS_OF_TAIL
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, sums), assert_trivial=True), 1)


@gluon.jit
def products(one, other):
    """For every row the sum over one · other."""
    return gl.sum(one.load(ROWS).to(gl.float32) * other.load(ROWS).to(gl.float32), 1)


# TAIL rows are a quarter of what `warpgroup_mma` takes; the older instruction takes just them.


@gluon.jit
def narrow_scores(factor, rows):
    """The tail's product with the rows of a tile, (TAIL, rows)."""
    size: gl.constexpr = rows.shape[0]
    zero = gl.zeros((TAIL, size), gl.float32, NARROW_SUMS)
    return mma_v2(factor, rows.permute((1, 0)).load(NARROW_RIGHT), zero)


@gluon.jit
def narrow_sum(weight, rows, total):
    factor = gl.convert_layout(weight.to(gl.bfloat16), NARROW_FACTOR)
    return mma_v2(factor, rows.load(NARROW_RIGHT), total)


# ----------------------------------------------------------------------------------------- storing


@gluon.jit
def turned_back(x, cosine, sine, first, offset):
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
def store(x, value, first, stride):
    """Write the rows of a block."""
    size: gl.constexpr = value.shape[0]
    value = gl.convert_layout(value.to(gl.bfloat16), ROWS)
    rows = gl.arange(0, size, gl.SliceLayout(1, ROWS)) + first
    columns = gl.arange(0, E, gl.SliceLayout(0, ROWS))
    at = gl.expand_dims(rows, 1) * stride + gl.expand_dims(columns, 0)
    gl.store(x + at, value)
