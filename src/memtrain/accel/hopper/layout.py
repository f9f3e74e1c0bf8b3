"""Shared by the Gluon kernels for Hopper: tile sizes and layouts, attention tiles, and a matrix
product that keeps its weights in shared memory.

A product's tile is 64 rows, the rows that one warpgroup multiplies at once. Elements outside a
tensor are read as zero and not written.
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

E = gl.constexpr(64)
"""The size of a head."""
SIDE = gl.constexpr(64)
"""Rows per tile."""
WIDTH = gl.constexpr(256)
"""The model's width."""
GROUPS = gl.constexpr(2)
"""Warpgroups that multiply, where another warp fetches."""
REGISTERS = gl.constexpr(240)
"""Registers per thread of these warpgroups."""

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
FACTOR = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A matrix, to be copied in blocks of this shape."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], block, SHARED.value)


@gluon.jit
def new_barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


# -------------------------------------------------------------------------------- attention tiles

# The encoder's sequence has 4 x 64 + 16 rows: TILES tiles and a tail.

TILES = gl.constexpr(4)
TAIL = gl.constexpr(16)
LENGTH = gl.constexpr(272)
"""Rows of a sequence: TILES · SIDE + TAIL."""
ALL_TILES = gl.constexpr(5)
"""TILES and the tail."""

SUMS_OF_TAIL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
FACTOR_OF_TAIL = gl.constexpr(gl.DotOperandLayout(0, SUMS_OF_TAIL.value, 2))
NARROW_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
NARROW_FACTOR = gl.constexpr(gl.DotOperandLayout(0, NARROW_SUMS.value, 2))
NARROW_RIGHT = gl.constexpr(gl.DotOperandLayout(1, NARROW_SUMS.value, 2))
BY_ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


def head_descriptor(x: Tensor, size: int) -> TensorDescriptor:
    """The rows of all sequences of x, (N, L, H·E), to be copied `size` at a time for one head."""
    count, length, width = x.shape
    shape, strides = [count * length, width], [x.stride(1), 1]
    return TensorDescriptor(x, shape, strides, [size, E.value], SHARED.value)


@gluon.jit
def copy_heads(rows, rows_of_tail, to, others, others_of_tail, others_to, came, row, column):
    """Copy all rows of two heads to shared memory; barrier `came[i]` completes with tile i of
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
def to_shared(x):
    """Copy one number per row of a head to shared memory."""
    at = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    numbers = gl.load(x + at, mask=at < LENGTH, other=0.0)
    return gl.allocate_shared_memory(gl.float32, [512], NUMBERS, numbers)


@gluon.jit
def rows_of(x, tile: gl.constexpr, zero):
    """The rows of a tile. `zero` is 0 at run time: the compiler would otherwise compute all tiles'
    addresses before the loop, for which there are no registers."""
    main, tail = x
    if tile < TILES:
        return main.index(tile + zero)
    else:
        return tail


@gluon.jit
def start_scores(factor, rows):
    """Start the product of SIDE rows with the rows of a tile, (SIDE, rows)."""
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
def per_column(x, tile: gl.constexpr, sums: gl.constexpr):
    """The numbers of a tile's columns; x is one array, or one array per tile."""
    size: gl.constexpr = SIDE if tile < TILES else TAIL
    numbers = x.slice(tile * SIDE, size) if x.rank == 1 else x.index(tile).slice(0, size)
    return gl.expand_dims(numbers.load(gl.SliceLayout(0, sums)), 0)


@gluon.jit
def per_row(x, tile: gl.constexpr):
    """The numbers of SIDE rows, in the layout of their product with a tile."""
    sums: gl.constexpr = SUMS if tile < TILES else SUMS_OF_TAIL
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, sums), assert_trivial=True), 1)


@gluon.jit
def row_products(one, other):
    """The sum over one · other for each row."""
    return gl.sum(one.load(BY_ROW).to(gl.float32) * other.load(BY_ROW).to(gl.float32), 1)


# TAIL rows are a quarter of a `warpgroup_mma`; the older instruction takes exactly 16.


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


@gluon.jit
def rotated_back(x, cosine, sine, first, offset):
    """The gradients of rows from `first` on, rotated back; `offset` is the position of row 0."""
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
def store_rows(x, value, first, stride):
    size: gl.constexpr = value.shape[0]
    value = gl.convert_layout(value.to(gl.bfloat16), BY_ROW)
    rows = gl.arange(0, size, gl.SliceLayout(1, BY_ROW)) + first
    columns = gl.arange(0, E, gl.SliceLayout(0, BY_ROW))
    at = gl.expand_dims(rows, 1) * stride + gl.expand_dims(columns, 0)
    gl.store(x + at, value)


# ---------------------------------------------------------------------------------------- products

# Products of very many rows with a weight. Rows have 256 numbers, so a program can hold everything
# that 256 columns need of the weight, 128 KiB; it stays on its multiprocessor and loops over tiles
# of rows, which one of its warps fetches in four parts. Two warpgroups alternate: while one
# processes its sums and writes the results, the other multiplies. Consecutive programs share their
# rows, which are then read from memory once; 256 columns need half as much L2 bandwidth as 128.

COLUMNS = gl.constexpr(256)
"""Columns per program."""
PART = gl.constexpr(64)
"""Of a row's WIDTH numbers, those that are fetched at once."""
PARTS = gl.constexpr(4)
WIDE_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def program_column(OUTER: gl.constexpr):
    """The first of the program's columns."""
    return gl.program_id(0) % (OUTER // COLUMNS) * COLUMNS


@gluon.jit
def program_rows(OUTER: gl.constexpr):
    """The first of the program's rows, and the step to its next tile."""
    column_tiles: gl.constexpr = OUTER // COLUMNS
    lane, lanes = gl.program_id(0) // column_tiles, gl.num_programs(0) // column_tiles
    return lane * SIDE, lanes * SIDE


@gluon.jit
def inner_part(part: gl.constexpr, OUTER: gl.constexpr):
    """The first number of a part. Each program starts with another one, whose column sums are its
    share (see `hopper_mlp_down_backward`)."""
    return (gl.program_id(0) % (OUTER // COLUMNS) + part) % PARTS * PART


@gluon.jit
def new_barriers():
    return (new_barrier(), new_barrier(), new_barrier(), new_barrier())


@gluon.jit
def new_panels(COUNT: gl.constexpr):
    """Shared memory for four panels of 64 columns, or for two."""
    # Separate allocations: the compiler synchronizes all warps between uses of the same one.
    size: gl.constexpr = [SIDE, PART]
    one = gl.allocate_shared_memory(gl.bfloat16, size, SHARED)
    two = gl.allocate_shared_memory(gl.bfloat16, size, SHARED)
    if COUNT == 2:
        return (one, two)
    else:
        three = gl.allocate_shared_memory(gl.bfloat16, size, SHARED)
        four = gl.allocate_shared_memory(gl.bfloat16, size, SHARED)
        return (one, two, three, four)


@gluon.jit
def new_buffers(weight, STAGES: gl.constexpr):
    """Shared memory for the weight and for STAGES tiles, one per warpgroup or one for both; and
    barriers for each part: of the weight and of tiles that it has arrived, of tiles that it may be
    overwritten.

    Each group has its own barriers for arriving rows, to not confuse the other's phase with its
    next one. `order` makes the groups alternate: if both started at once, both would write at
    once while nothing is multiplied.
    """
    size: gl.constexpr = weight.block_shape
    weights = gl.allocate_shared_memory(gl.bfloat16, [PARTS, size[0], size[1]], SHARED)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, SIDE, PART], SHARED)
    free = new_barriers()
    frees = (free, free if STAGES == 1 else new_barriers())
    order = (new_barrier(), new_barrier())
    return weights, new_barriers(), tiles, (new_barriers(), new_barriers()), frees, order


@gluon.jit
def fetch_product(x, weight, buffers, rows, OUTER: gl.constexpr, STAGES: gl.constexpr):
    """Fetch the weight, and the program's rows part by part, each as soon as its buffer is free."""
    weights, weights_ready, tiles, ready, free, _ = buffers
    column = program_column(OUTER)
    first, step = program_rows(OUTER)
    upright: gl.constexpr = weight.block_shape[0] == COLUMNS
    phase = 0
    for row in range(first, rows, GROUPS * step):
        for group in gl.static_range(GROUPS):
            if row + group * step < rows:
                for part in gl.static_range(PARTS):
                    inner = inner_part(part, OUTER)
                    if group == 0:
                        there = row == first
                        at = [column, inner] if upright else [inner, column]
                        mbarrier.expect(weights_ready[part], COLUMNS * PART * 2, pred=there)
                        tma.async_copy_global_to_shared(
                            weight, at, weights_ready[part], weights.index(part), pred=there
                        )
                    # The phase before the first one of a new barrier counts as complete.
                    before = (group if STAGES == 1 else phase) ^ 1
                    mbarrier.wait(free[group][part], before)
                    came = ready[group][part]
                    mbarrier.expect(came, SIDE * PART * 2)
                    at = [row + group * step, inner]
                    tma.async_copy_global_to_shared(
                        x, at, came, tiles.index(group % STAGES * PARTS + part)
                    )
        phase ^= 1


@gluon.jit
def start_product(buffers, part: gl.constexpr, total, group: gl.constexpr, phase):
    """Add the product of one part to the sums, asynchronously."""
    weights, weights_ready, tiles, ready, _, order = buffers
    if part == 0:
        mbarrier.wait(order[group], phase ^ (1 - group))
    mbarrier.wait(weights_ready[part], 0)
    mbarrier.wait(ready[group][part], phase)
    stages: gl.constexpr = tiles.shape[0] // PARTS
    left = tiles.index(group % stages * PARTS + part)
    right = weights.index(part)
    if right.shape[0] == COLUMNS:
        right = right.permute((1, 0))
    return warpgroup_mma(left, right, total, use_acc=part > 0, is_async=True)


@gluon.jit
def finish_product(buffers, total, group: gl.constexpr, phase):
    """The sums of a tile whose first part was started. Each part is freed while the next one is
    multiplied; the last one lets the other group start."""
    _, _, _, _, free, order = buffers
    for part in gl.static_range(1, PARTS):
        total = start_product(buffers, part, total, group, phase)
        if part == PARTS - 1:
            mbarrier.arrive(order[1 - group])
        total = warpgroup_mma_wait(1, (total,))
        mbarrier.arrive(free[group][part - 1])
    total = warpgroup_mma_wait(0, (total,))
    mbarrier.arrive(free[group][PARTS - 1])
    return total


@gluon.jit
def zero_sums():
    return gl.zeros((SIDE, COLUMNS), gl.float32, WIDE_SUMS)


@gluon.jit
def _halves(x):
    """The left and the right half of the columns."""
    half: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, (SIDE, 2, half)), (0, 2, 1)))


@gluon.jit
def in_panels(total):
    """Split a tile's sums into panels of 64 columns, without moving data."""
    left, right = _halves(total)
    first, second = _halves(left)
    third, fourth = _halves(right)
    return (
        gl.convert_layout(first, SUMS, assert_trivial=True),
        gl.convert_layout(second, SUMS, assert_trivial=True),
        gl.convert_layout(third, SUMS, assert_trivial=True),
        gl.convert_layout(fourth, SUMS, assert_trivial=True),
    )


@gluon.jit
def write_panel(out, row, column, panel):
    """Write a panel asynchronously; it may be changed after `tma.store_wait`."""
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], panel)


@gluon.jit
def store_panel(out, row, column, value, panels, index: gl.constexpr):
    """Write a panel's numbers through the group's panels in rotation."""
    count: gl.constexpr = len(panels)
    tma.store_wait(count - 1)
    panels[index % count].store(value.to(gl.bfloat16))
    write_panel(out, row, column, panels[index % count])


def tile_descriptor(x: Tensor) -> TensorDescriptor:
    return descriptor(x, [SIDE.value, PART.value])


def lanes(x: Tensor, outer: int) -> int:
    """The number of programs per group of columns that fills the device."""
    chip = torch.cuda.get_device_properties(x.device)
    column_tiles = outer // COLUMNS.value
    return min(-(-len(x) // SIDE.value), chip.multi_processor_count // column_tiles)


def product_options(outer: int, stages: int) -> dict[str, int]:
    """Launch options: `maxnreg` holds for three warpgroups; the one that fetches gives most of its
    registers away."""
    return {"OUTER": outer, "STAGES": stages, "num_warps": 4, "maxnreg": 168}
