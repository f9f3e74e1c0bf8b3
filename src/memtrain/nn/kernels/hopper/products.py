"""Products of very many rows with a weight on Hopper, of which each program keeps 256 columns.

Rows have 256 numbers, so a program holds all that its columns need of the weight, 128 KiB, and it
stays on its multiprocessor while rows go by, 64 at a time. One of its warps fetches them in four
parts. Two warpgroups take turns: while one makes something of its sums and has it written, the
other multiplies. Programs that follow each other have the same rows and other columns, so rows come
from memory once; with 256 columns a program asks half as much of the second cache as with 128.

Whatever lies outside a tensor is read as zero and not written.
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

ROWS = gl.constexpr(64)
"""Rows of a tile, what a warpgroup multiplies at once."""
COLUMNS = gl.constexpr(256)
"""Columns of a program."""
INNER = gl.constexpr(256)
PART = gl.constexpr(64)
"""Of a row's INNER numbers, those that are fetched at once."""
PARTS = gl.constexpr(4)
GROUPS = gl.constexpr(2)
"""Warpgroups that multiply."""
REGISTERS = gl.constexpr(240)
"""Of a thread of theirs."""

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
PANEL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""A quarter of them, PART columns."""
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


# ----------------------------------------------------------------------------------- which program


@gluon.jit
def program_column(OUTER: gl.constexpr):
    """The first of the program's columns."""
    return gl.program_id(0) % (OUTER // COLUMNS) * COLUMNS


@gluon.jit
def program_rows(OUTER: gl.constexpr):
    """The first of the program's rows, and how far it is from there to its next tile."""
    column_tiles: gl.constexpr = OUTER // COLUMNS
    lane, lanes = gl.program_id(0) // column_tiles, gl.num_programs(0) // column_tiles
    return lane * ROWS, lanes * ROWS


@gluon.jit
def inner_part(part: gl.constexpr, OUTER: gl.constexpr):
    """Where a part begins: programs begin at different ones, so that the first is theirs to add up
    (see `mlp`)."""
    return (gl.program_id(0) % (OUTER // COLUMNS) + part) % PARTS * PART


# ------------------------------------------------------------------------------------ shared memory


@gluon.jit
def new_barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _new_barriers():
    """One for each warpgroup: it cannot tell one turn of the other from the next but one."""
    barriers = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(barriers.index(group), count=1)
    return barriers


@gluon.jit
def new_panels():
    """Room for a tile, 64 columns in each panel."""
    # Each in a place of its own: the compiler lets all warps meet between uses of one place.
    size: gl.constexpr = [ROWS, PART]
    return (
        gl.allocate_shared_memory(gl.bfloat16, size, SHARED),
        gl.allocate_shared_memory(gl.bfloat16, size, SHARED),
        gl.allocate_shared_memory(gl.bfloat16, size, SHARED),
        gl.allocate_shared_memory(gl.bfloat16, size, SHARED),
    )


@gluon.jit
def new_buffers(weight):
    """Room for a tile in parts, for the weight, and for a tile of sums of each warpgroup; and for
    each part barriers that tell that it has come, and one that it is done with."""
    tile = new_panels()
    size: gl.constexpr = weight.block_shape
    weights = gl.allocate_shared_memory(gl.bfloat16, [PARTS, size[0], size[1]], SHARED)
    ready = (_new_barriers(), _new_barriers(), _new_barriers(), _new_barriers())
    free = (new_barrier(), new_barrier(), new_barrier(), new_barrier())
    return tile, weights, ready, free


@gluon.jit
def new_tile():
    """Room for a warpgroup's sums on their way out."""
    return gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], SHARED)


# ----------------------------------------------------------------------------------------- the work


@gluon.jit
def fetch(x, weight, buffers, rows, OUTER: gl.constexpr):
    """Brings in the weight, and the program's rows part by part, each as soon as the one before it
    in its place is done with."""
    tile, weights, ready, free = buffers
    column = program_column(OUTER)
    first, step = program_rows(OUTER)
    upright: gl.constexpr = weight.block_shape[0] == COLUMNS
    for part in gl.static_range(PARTS):
        inner = inner_part(part, OUTER)
        came = ready[part].index(0)
        mbarrier.expect(came, (ROWS + COLUMNS) * PART * 2)
        at = [column, inner] if upright else [inner, column]
        tma.async_copy_global_to_shared(weight, at, came, weights.index(part))
        tma.async_copy_global_to_shared(x, [first, inner], came, tile[part])
    turn = 1
    for row in range(first + step, rows, step):
        for part in gl.static_range(PARTS):
            mbarrier.wait(free[part], turn ^ 1)
            came = ready[part].index(turn)
            mbarrier.expect(came, ROWS * PART * 2)
            at = [row, inner_part(part, OUTER)]
            tma.async_copy_global_to_shared(x, at, came, tile[part])
        turn ^= 1


@gluon.jit
def begin(buffers, part: gl.constexpr, total, group: gl.constexpr, phase):
    """Add a part's product to the sums, in the background."""
    tile, weights, ready, _ = buffers
    mbarrier.wait(ready[part].index(group), phase)
    right = weights.index(part)
    if right.shape[0] == COLUMNS:
        right = right.permute((1, 0))
    return warpgroup_mma(tile[part], right, total, use_acc=part > 0, is_async=True)


@gluon.jit
def finish(buffers, total, group: gl.constexpr, phase):
    """The sums of a tile whose first part is begun. Parts are given back one by one, each when the
    next is being multiplied."""
    _, _, _, free = buffers
    for part in gl.static_range(1, PARTS):
        total = begin(buffers, part, total, group, phase)
        total = warpgroup_mma_wait(1, (total,))
        mbarrier.arrive(free[part - 1])
    total = warpgroup_mma_wait(0, (total,))
    mbarrier.arrive(free[PARTS - 1])
    return total


@gluon.jit
def no_sums():
    return gl.zeros((ROWS, COLUMNS), gl.float32, SUMS)


@gluon.jit
def _halves(x):
    """The left and the right columns."""
    half: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, (ROWS, 2, half)), (0, 2, 1)))


@gluon.jit
def in_panels(total):
    """A tile's sums, 64 columns in each panel. Nothing moves."""
    left, right = _halves(total)
    first, second = _halves(left)
    third, fourth = _halves(right)
    return (
        gl.convert_layout(first, PANEL, assert_trivial=True),
        gl.convert_layout(second, PANEL, assert_trivial=True),
        gl.convert_layout(third, PANEL, assert_trivial=True),
        gl.convert_layout(fourth, PANEL, assert_trivial=True),
    )


@gluon.jit
def write(out, row, column, tile):
    """Have a tile written; it may be changed again after `tma.store_wait`."""
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], tile)


# ------------------------------------------------------------------------------------------- launch


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], block, SHARED.value)


def tile_descriptor(x: Tensor) -> TensorDescriptor:
    return descriptor(x, [ROWS.value, COLUMNS.value])


def part_descriptor(x: Tensor) -> TensorDescriptor:
    return descriptor(x, [ROWS.value, PART.value])


def lanes(x: Tensor, outer: int) -> int:
    """Programs that have the same columns: all together fill the device."""
    chip = torch.cuda.get_device_properties(x.device)
    column_tiles = outer // COLUMNS.value
    return min(-(-len(x) // ROWS.value), chip.multi_processor_count // column_tiles)


def options(outer: int) -> dict[str, int]:
    """How a kernel is run: `maxnreg` is of each of three warpgroups; the one that fetches gives
    most of its away."""
    return {"OUTER": outer, "num_warps": 4, "maxnreg": 168}
