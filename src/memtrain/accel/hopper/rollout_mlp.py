"""The block after its heads for Hopper in Gluon; computes the same as `triton.rollout_large_batch`.

A program stays on its multiprocessor and loops over tiles of 128 rows. One of its warps fetches the
weights, in pieces of 32 KB that pass through a ring of five; two warpgroups take 64 rows each. A
warpgroup keeps the sums of its rows in registers from the projection to the end, and the normed
rows in shared memory. It computes 64 numbers per row of the hidden layer at a time, and their GELU
during the product of the previous ones.

If a last round of tiles would leave most multiprocessors idle, its rows are taken 64 at a time, and
both warpgroups share them: each takes every other chunk of the hidden layer.
"""

import math

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

from memtrain.accel.hopper.layout import GROUPS, REGISTERS, SIDE, WIDTH, descriptor
from memtrain.accel.triton.common import gelu
from memtrain.models.layers import RMS_EPSILON

HEADS_WIDTH = gl.constexpr(512)
"""Numbers per row of all heads' results."""
HIDDEN = gl.constexpr(1024)
PIECES = gl.constexpr(5)
"""Pieces in shared memory: WIDTH x SIDE of a weight, or 2 · SIDE columns of the heads' results."""
PIECE_BYTES = gl.constexpr(2 * 256 * 64)


@gluon.jit
def _task(index, whole):
    """The first row of the program's tile `index`, and how many warpgroups share each of its rows:
    one in the first `whole` tiles, both in the others."""
    task = gl.program_id(0) + index * gl.num_programs(0)
    behind = gl.maximum(task - whole, 0)
    workers = gl.where(task < whole, 1, 2)
    return (GROUPS * task - behind) * SIDE, workers


# --------------------------------------------------------------------------------------- fetching


@gluon.jit
def _fetch_rows(x, to, first_buffer, ready, row, column, place, SIZE: gl.constexpr):
    """Fetch SIDE kept rows, SIZE at a time, from their places among all rows."""
    length, kept, first = place
    for part in gl.static_range(SIDE // SIZE):
        at = row + part * SIZE
        source = (at // kept) * length + first + at % kept
        buffer = to.index(first_buffer * (SIDE // SIZE) + part)
        tma.async_copy_global_to_shared(x, [source, column], ready, buffer)


@gluon.jit
def _wait_free(ready, free, step):
    """Wait for a free stage; return it and the barrier for its arrival."""
    stage = step % PIECES
    mbarrier.wait(free.index(stage), ((step // PIECES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), PIECE_BYTES)
    return stage, ready.index(stage)


@gluon.jit
def _fetch_piece(weight, at, ring, ready, free, step):
    """Fetch the next piece of a weight."""
    stage, came = _wait_free(ready, free, step)
    tma.async_copy_global_to_shared(weight, at, came, ring.index(stage))
    return step + 1


@gluon.jit
def _fetch(mixed, stream, project, up, down, buffers, barriers, place, tasks, whole):
    """Fetch rows and weights, tile by tile, in the order in which `_compute` uses them."""
    held, ring = buffers
    ready, free, rows_ready, rows_free, idle, handed = barriers
    SIZE: gl.constexpr = mixed.block_type.shape[0]
    layout: gl.constexpr = project.layout
    held = held._reinterpret(gl.bfloat16, [GROUPS * WIDTH // SIZE, SIZE, SIDE], layout)
    heads = ring._reinterpret(gl.bfloat16, [PIECES * WIDTH // SIZE, SIZE, SIDE], layout)
    wide_ring = ring._reinterpret(gl.bfloat16, [PIECES, SIDE, WIDTH], layout)
    step = 0
    for index in range(gl.cdiv(tasks - gl.program_id(0), gl.num_programs(0))):
        row, workers = _task(index, whole)
        behind = (GROUPS - workers) * SIDE  # the second warpgroup's rows
        for part in range(HEADS_WIDTH // (2 * SIDE)):
            column = part * (2 * SIDE)
            stage, came = _wait_free(ready, free, step)
            for piece in gl.static_range(4):
                at, right = row + (piece // 2) * behind, (piece % 2) * SIDE
                _fetch_rows(mixed, heads, stage * 4 + piece, came, at, column + right, place, SIZE)
            step = _fetch_piece(project, [0, column], ring, ready, free, step + 1)
            step = _fetch_piece(project, [0, column + SIDE], ring, ready, free, step)
            if part == 1:  # early enough, without delaying the first weights of a tile
                mbarrier.wait(rows_free, (index & 1) ^ 1)
                mbarrier.expect(rows_ready, 2 * GROUPS * SIDE * WIDTH)
                for piece in gl.static_range(GROUPS * WIDTH // SIDE):
                    at, right = row + (piece // 4) * behind, (piece % 4) * SIDE
                    _fetch_rows(stream, held, piece, rows_ready, at, right, place, SIZE)
        stride = workers * SIDE
        for start in range(0, HIDDEN, stride):
            for at in range(start, start + stride, SIDE):
                step = _fetch_piece(up, [at, 0], wide_ring, ready, free, step)
            # A chunk of the hidden layer is multiplied after the next one has been computed.
            for at in range(gl.maximum(start - stride, 0), start, SIDE):
                step = _fetch_piece(down, [0, at], ring, ready, free, step)
        for at in range(HIDDEN - stride, HIDDEN, SIDE):
            step = _fetch_piece(down, [0, at], ring, ready, free, step)


# ---------------------------------------------------------------------------------------- products


@gluon.jit
def _wait_ready(ready, step):
    """Wait for a piece to arrive; return its stage."""
    stage = step % PIECES
    mbarrier.wait(ready.index(stage), (step // PIECES) & 1)
    return stage


@gluon.jit
def _wait_own(ready, free, step, workers, group: gl.constexpr):
    """Wait for a piece of the MLP's weights; return its stage. If both warpgroups work on the same
    rows, each uses one of two consecutive pieces."""
    own = group * (workers - 1)
    stage = _wait_ready(ready, step + own)
    if workers == 2:
        mbarrier.arrive(free.index(_wait_ready(ready, step + 1 - own)))
    return stage


@gluon.jit
def _activated(hidden, shift, sums: gl.constexpr):
    """GELU of a chunk of the hidden layer, in the layout of a factor."""
    hidden = gelu(hidden + gl.expand_dims(shift, 0))
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    return gl.convert_layout(hidden.to(gl.bfloat16), factor, assert_trivial=True)


@gluon.jit
def _compute(
    out, measured, biases, buffers, barriers, rows, epsilon, tasks, whole, group: gl.constexpr
):
    """One warpgroup's rows of the program's tiles."""
    up_bias, down_bias = biases
    held, ring = buffers
    ready, free, rows_ready, rows_free, idle, handed = barriers
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    # A thread writes 16 bytes of a row, a warp a row of 512; rows stay within their warp.
    written: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [0, 64], [0, 128]],
        [[16, 0], [32, 0]],
        [],
        [SIDE, WIDTH],
    )
    kind: gl.constexpr = out.dtype.element_ty
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, sums))
    of_hidden = up_bias + gl.arange(0, SIDE, gl.SliceLayout(0, of_chunk))
    heads = ring._reinterpret(gl.bfloat16, [PIECES * 4, SIDE, SIDE], ring.layout)
    wide_ring = ring._reinterpret(gl.bfloat16, [PIECES, SIDE, WIDTH], ring.layout)
    mine = held.index(group)
    nothing = gl.zeros([SIDE, SIDE], gl.float32, of_chunk)
    # where the second warpgroup hands its sums over
    between: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    others = ring._reinterpret(gl.float32, [SIDE, WIDTH], between)
    step = 0
    for index in range(gl.cdiv(tasks - gl.program_id(0), gl.num_programs(0))):
        first, workers = _task(index, whole)
        total = gl.zeros([SIDE, WIDTH], gl.float32, sums)
        for _ in range(HEADS_WIDTH // (2 * SIDE)):
            stage = _wait_ready(ready, step)
            left, right = heads.index(stage * 4 + 2 * group), heads.index(stage * 4 + 2 * group + 1)
            left_stage = _wait_ready(ready, step + 1)
            total = warpgroup_mma(
                left, ring.index(left_stage).permute((1, 0)), total, is_async=True
            )
            right_stage = _wait_ready(ready, step + 2)
            total = warpgroup_mma(
                right, ring.index(right_stage).permute((1, 0)), total, is_async=True
            )
            total = warpgroup_mma_wait(1, (total,))
            mbarrier.arrive(free.index(left_stage))
            total = warpgroup_mma_wait(0, (total,))
            mbarrier.arrive(free.index(stage))
            mbarrier.arrive(free.index(right_stage))
            step += 3

        mbarrier.wait(rows_ready, index & 1)
        total += mine.load(sums).to(gl.float32)
        level = gl.rsqrt(gl.sum(total * total, 1) / WIDTH + epsilon)
        mine.store((total * gl.expand_dims(level, 1)).to(gl.bfloat16))
        fence_async_shared()
        total += gl.expand_dims(gl.load(down_bias + column), 0)

        if group == 1:  # if both work on the same rows, only the first starts from them
            total *= (2 - workers).to(gl.float32)

        own = group * (workers - 1)
        shift = gl.load(of_hidden + own * SIDE)
        stage = _wait_own(ready, free, step, workers, group)
        hidden = warpgroup_mma(mine, wide_ring.index(stage).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(free.index(stage))
        factor = _activated(hidden, shift, sums)
        step += workers
        for start in range(workers * SIDE, HIDDEN, workers * SIDE):
            shift = gl.load(of_hidden + start + own * SIDE)
            stage = _wait_own(ready, free, step, workers, group)
            hidden = warpgroup_mma(
                mine, wide_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            down_stage = _wait_own(ready, free, step + workers, workers, group)
            total = warpgroup_mma(
                factor, ring.index(down_stage).permute((1, 0)), total, is_async=True
            )
            hidden = warpgroup_mma_wait(1, (hidden,))
            mbarrier.arrive(free.index(stage))
            following = _activated(hidden, shift, sums)
            total, factor = warpgroup_mma_wait(0, (total, factor))
            mbarrier.arrive(free.index(down_stage))
            factor = following
            step += 2 * workers
        stage = _wait_own(ready, free, step, workers, group)
        total = warpgroup_mma(factor, ring.index(stage).permute((1, 0)), total)
        mbarrier.arrive(free.index(stage))
        step += workers

        if workers == 2:  # the program's last task: the ring is free when both arrive
            mbarrier.arrive(idle)
            if group == 1:
                mbarrier.wait(idle, 0)
                others.store(total)
                mbarrier.arrive(handed)
            else:
                mbarrier.wait(handed, 0)
                total += others.load(sums)
        else:
            first += group * SIDE
        last = gl.where((workers == 2) & (group == 1), 0, rows)  # rows from here on are not written
        row = first + gl.arange(0, SIDE, gl.SliceLayout(1, sums))
        gl.store(measured + row, gl.sum(total * total, 1), mask=row < last)
        if kind == gl.bfloat16:
            # Through the buffer of normed rows, which are no longer needed, warps get whole rows.
            mine.store(total.to(kind))
            values = mine.load(written)
            fence_async_shared()
            mbarrier.arrive(rows_free)
            row_of_warp = first + gl.arange(0, SIDE, gl.SliceLayout(1, written))
            along = gl.arange(0, WIDTH, gl.SliceLayout(0, written))
            at = gl.expand_dims(row_of_warp, 1) * WIDTH + gl.expand_dims(along, 0)
            gl.store(out + at, values, mask=gl.expand_dims(row_of_warp < last, 1))
        else:
            mbarrier.arrive(rows_free)
            at = gl.expand_dims(row, 1) * WIDTH + gl.expand_dims(column, 0)
            gl.store(out + at, total.to(kind), mask=gl.expand_dims(row < last, 1))


@gluon.jit(do_not_specialize=["rows", "length", "kept", "first", "tasks", "whole"])
def _mlp(
    mixed, stream, project, up, down, up_bias, down_bias, out, measured,
    rows, length, kept, first, epsilon, tasks, whole,
):  # fmt: skip
    layout: gl.constexpr = project.layout
    held = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, WIDTH], layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [PIECES, WIDTH, SIDE], layout)
    ready = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    rows_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rows_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    idle = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(PIECES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    mbarrier.init(rows_ready, count=1)
    mbarrier.init(rows_free, count=GROUPS)
    mbarrier.init(idle, count=GROUPS)
    mbarrier.init(handed, count=1)
    fence_async_shared()
    buffers, barriers = (held, ring), (ready, free, rows_ready, rows_free, idle, handed)
    biases, place = (up_bias, down_bias), (length, kept, first)
    fetch = (mixed, stream, project, up, down, buffers, barriers, place, tasks, whole)
    gl.warp_specialize(
        [
            (_compute, (out, measured, biases, buffers, barriers, rows, epsilon, tasks, whole, 0)),
            (_compute, (out, measured, biases, buffers, barriers, rows, epsilon, tasks, whole, 1)),
            (_fetch, fetch),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


# ----------------------------------------------------------------------------------------- launch


def tasks_of(rows: int, processors: int) -> tuple[int, int]:
    """The number of tasks, and of those that are whole tiles (see `_task`)."""
    tile = GROUPS.value * SIDE.value
    tiles = -(-rows // tile)
    rest = tiles % processors
    if 2 * rest > processors:
        return tiles, tiles
    whole = tiles - rest
    return whole + -(-(rows - whole * tile) // SIDE.value), whole


def contiguous_rows(length: int, kept: int) -> int:
    """How many of a warpgroup's rows are contiguous, starting at multiples of that number."""
    return SIDE.value if kept == length else math.gcd(SIDE.value, kept)


def hopper_rollout_mlp(
    mixed: Tensor,
    stream: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    out: Tensor,
    measured: Tensor,
    length: int,
    keep: range,
) -> None:
    """`triton.rollout_large_batch.run_large_batch_mlp`, for any number of rows."""
    project, up, down = weights
    rows, side = len(out), SIDE.value
    size = contiguous_rows(length, len(keep))
    processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    tasks, whole = tasks_of(rows, processors)
    _mlp[min(tasks, processors),](
        descriptor(mixed, [size, side]),
        descriptor(stream, [size, side]),
        descriptor(project, [WIDTH.value, side]),
        descriptor(up, [side, WIDTH.value]),
        descriptor(down, [WIDTH.value, side]),
        *biases, out, measured,
        rows, length, len(keep), keep.start, RMS_EPSILON, tasks, whole,
        num_warps=4,
        maxnreg=168,  # per thread of three warpgroups; the one that fetches gives most of them away
    )  # fmt: skip
