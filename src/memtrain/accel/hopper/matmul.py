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
def _new_barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def new_barriers():
    return (_new_barrier(), _new_barrier(), _new_barrier(), _new_barrier())


@gluon.jit
def new_panels(COUNT: gl.constexpr):
    """Room for four panels of 64 columns, or for two."""
    # Each in a place of its own: the compiler lets all warps meet between uses of one place.
    size: gl.constexpr = [ROWS, PART]
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
    """Room for the weight, and for a tile of each warpgroup, or one that they share; and barriers
    that tell of every part that it has come, and of every part of a tile that it is done with.

    That rows have come, each group is told for itself: it could not tell a turn of the other's from
    the next. And it is told when to begin: both at once would end at once, and nothing be
    multiplied while both write.
    """
    size: gl.constexpr = weight.block_shape
    weights = gl.allocate_shared_memory(gl.bfloat16, [PARTS, size[0], size[1]], SHARED)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, ROWS, PART], SHARED)
    free = new_barriers()
    frees = (free, free if STAGES == 1 else new_barriers())
    order = (_new_barrier(), _new_barrier())
    return weights, new_barriers(), tiles, (new_barriers(), new_barriers()), frees, order


# ----------------------------------------------------------------------------------------- the work


@gluon.jit
def fetch(x, weight, buffers, rows, OUTER: gl.constexpr, STAGES: gl.constexpr):
    """Brings in the weight, and the program's rows part by part, each as soon as the one before it
    in its place is done with."""
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
                    # Of a new barrier, the turn before the first is over.
                    before = (group if STAGES == 1 else phase) ^ 1
                    mbarrier.wait(free[group][part], before)
                    came = ready[group][part]
                    mbarrier.expect(came, ROWS * PART * 2)
                    at = [row + group * step, inner]
                    tma.async_copy_global_to_shared(
                        x, at, came, tiles.index(group % STAGES * PARTS + part)
                    )
        phase ^= 1


@gluon.jit
def begin(buffers, part: gl.constexpr, total, group: gl.constexpr, phase):
    """Add a part's product to the sums, in the background."""
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
def finish(buffers, total, group: gl.constexpr, phase):
    """The sums of a tile whose first part is begun. Parts are given back one by one, each when the
    next is being multiplied; with the last, it is the other group's turn."""
    _, _, _, _, free, order = buffers
    for part in gl.static_range(1, PARTS):
        total = begin(buffers, part, total, group, phase)
        if part == PARTS - 1:
            mbarrier.arrive(order[1 - group])
        total = warpgroup_mma_wait(1, (total,))
        mbarrier.arrive(free[group][part - 1])
    total = warpgroup_mma_wait(0, (total,))
    mbarrier.arrive(free[group][PARTS - 1])
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
def write(out, row, column, panel):
    """Have a panel written; it may be changed again when `tma.store_wait` has told so."""
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], panel)


@gluon.jit
def put(out, row, column, value, panels, turn: gl.constexpr):
    """Have a panel's numbers written, by way of a group's panels in turn."""
    count: gl.constexpr = len(panels)
    tma.store_wait(count - 1)
    panels[turn % count].store(value.to(gl.bfloat16))
    write(out, row, column, panels[turn % count])


# ------------------------------------------------------------------------------------------- launch


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], block, SHARED.value)


def part_descriptor(x: Tensor) -> TensorDescriptor:
    return descriptor(x, [ROWS.value, PART.value])


def lanes(x: Tensor, outer: int) -> int:
    """Programs that have the same columns: all together fill the device."""
    chip = torch.cuda.get_device_properties(x.device)
    column_tiles = outer // COLUMNS.value
    return min(-(-len(x) // ROWS.value), chip.multi_processor_count // column_tiles)


def options(outer: int, stages: int) -> dict[str, int]:
    """How a kernel is run: `maxnreg` is of each of three warpgroups; the one that fetches gives
    most of its away."""
    return {"OUTER": outer, "STAGES": stages, "num_warps": 4, "maxnreg": 168}
