"""Attention of 272 queries to 272 keys for Hopper in Gluon; computes the same as
`triton.attention`.

A program stays on its multiprocessor and loops over heads. One of its warps fetches the next head
(queries, keys, values) while two warpgroups take the current one's 64-query tiles in round-robin
order, so that the products of one overlap with the exponentials of the other. Only 16 queries of
the last tile belong to the head; the others are the rows that follow, and their results are not
written.

Keys are split into 128, 128 and 16. All scores of a row are in registers, so there is no running
maximum, and the first 144 weights are multiplied with values while the other 128 are computed.
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

from memtrain.accel.hopper.layout import (
    ALL_TILES,
    GROUPS,
    LENGTH,
    REGISTERS,
    SIDE,
    TAIL,
    E,
    head_descriptor,
)
from memtrain.accel.triton.attention import Heads

BK = gl.constexpr(128)
"""Keys of each of the two main parts."""
HEADS_HELD = gl.constexpr(2)
"""Heads in shared memory: the current and the next one."""


@gluon.jit
def _fetch(
    queries, keys, keys_tail, values, values_tail, buffers, barriers, H: gl.constexpr, heads
):
    """Fetch the program's heads, each as soon as the last but one is finished."""
    q, k, k_tail, v, v_tail = buffers
    scores_ready, values_ready, free = barriers
    program, programs = gl.program_id(0), gl.num_programs(0)
    for step in range(gl.cdiv(heads - program, programs)):
        row_head = program + step * programs
        stage, phase = step % HEADS_HELD, (step // HEADS_HELD) & 1
        row, column = (row_head // H) * LENGTH, (row_head % H) * E
        mbarrier.wait(free.index(stage), phase ^ 1)
        ready = scores_ready.index(stage)
        mbarrier.expect(ready, (ALL_TILES * SIDE + 2 * BK + TAIL) * E * 2)
        tma.async_copy_global_to_shared(queries, [row, column], ready, q.index(stage * ALL_TILES))
        tma.async_copy_global_to_shared(keys, [row, column], ready, k.index(stage * 2))
        tma.async_copy_global_to_shared(keys, [row + BK, column], ready, k.index(stage * 2 + 1))
        tma.async_copy_global_to_shared(
            keys_tail, [row + 2 * BK, column], ready, k_tail.index(stage)
        )
        for tile in gl.static_range(1, ALL_TILES):
            tma.async_copy_global_to_shared(
                queries, [row + tile * SIDE, column], ready, q.index(stage * ALL_TILES + tile)
            )
        ready = values_ready.index(stage)
        mbarrier.expect(ready, (2 * BK + TAIL) * E * 2)
        tma.async_copy_global_to_shared(values, [row, column], ready, v.index(stage * 2))
        tma.async_copy_global_to_shared(values, [row + BK, column], ready, v.index(stage * 2 + 1))
        tma.async_copy_global_to_shared(
            values_tail, [row + 2 * BK, column], ready, v_tail.index(stage)
        )


@gluon.jit
def _attend_tiles(
    out, log_sum, buffers, barriers,
    H: gl.constexpr, KEEP: gl.constexpr, group: gl.constexpr, heads,
):  # fmt: skip
    """One warpgroup's tiles of the program's heads."""
    q, k, k_tail, v, v_tail = buffers
    scores_ready, values_ready, free = barriers
    of_main: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_tail: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    of_mixed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, of_mixed, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, of_mixed)
    # A thread writes 16 bytes of a row, 8 threads a row; rows stay within their warp.
    written: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [SIDE, E],
    )
    inner: gl.constexpr = H * E
    program, programs = gl.program_id(0), gl.num_programs(0)
    kind: gl.constexpr = out.dtype.element_ty
    mine = gl.cdiv(heads - program, programs)
    empty = gl.zeros([SIDE, BK], gl.float32, of_main)
    empty_tail = gl.zeros([SIDE, TAIL], gl.float32, of_tail)
    empty_mixed = gl.zeros([SIDE, E], gl.float32, of_mixed)

    for step_tile in range(group, mine * ALL_TILES, GROUPS):
        step, tile = step_tile // ALL_TILES, step_tile % ALL_TILES
        stage, phase = step % HEADS_HELD, (step // HEADS_HELD) & 1
        query = q.index(stage * ALL_TILES + tile)
        mbarrier.wait(scores_ready.index(stage), phase)
        k_0, k_1 = k.index(stage * 2).permute((1, 0)), k.index(stage * 2 + 1).permute((1, 0))
        k_2 = k_tail.index(stage).permute((1, 0))
        score_2 = warpgroup_mma(query, k_2, empty_tail, use_acc=False, is_async=True)
        score_0 = warpgroup_mma(query, k_0, empty, use_acc=False, is_async=True)
        score_1 = warpgroup_mma(query, k_1, empty, use_acc=False, is_async=True)
        score_2, score_0 = warpgroup_mma_wait(1, (score_2, score_0))
        best_2 = gl.convert_layout(gl.max(score_2, 1), by_row)
        best_0 = gl.convert_layout(gl.max(score_0, 1), by_row)
        best = gl.maximum(best_0, best_2)
        score_1 = warpgroup_mma_wait(0, (score_1,))
        best = gl.maximum(best, gl.convert_layout(gl.max(score_1, 1), by_row))

        above = gl.convert_layout(best, gl.SliceLayout(1, of_main))[:, None]
        above_2 = gl.convert_layout(best, gl.SliceLayout(1, of_tail))[:, None]
        weight_2 = gl.exp2(score_2 - above_2)
        weight_0 = gl.exp2(score_0 - above)
        total = gl.convert_layout(gl.sum(weight_2, 1), by_row)
        total += gl.convert_layout(gl.sum(weight_0, 1), by_row)
        mbarrier.wait(values_ready.index(stage), phase)
        operand_2 = gl.convert_layout(weight_2.to(kind), weights)
        operand_0 = gl.convert_layout(weight_0.to(kind), weights)
        mixed = warpgroup_mma(
            operand_2, v_tail.index(stage), empty_mixed, use_acc=False, is_async=True
        )
        mixed = warpgroup_mma(operand_0, v.index(stage * 2), mixed, is_async=True)
        weight_1 = gl.exp2(score_1 - above)
        operand_1 = gl.convert_layout(weight_1.to(kind), weights)
        mixed = warpgroup_mma(operand_1, v.index(stage * 2 + 1), mixed, is_async=True)
        total += gl.convert_layout(gl.sum(weight_1, 1), by_row)
        mixed = warpgroup_mma_wait(0, (mixed,))
        # Through the buffer of the tile's queries, which are no longer needed, threads get whole
        # rows.
        query.store((mixed * (1.0 / total)[:, None]).to(kind))
        mixed = query.load(written)
        fence_async_shared()
        mbarrier.arrive(free.index(stage), pred=tile + GROUPS >= ALL_TILES)

        row_head = (program + step * programs).to(gl.int64)
        row, head = row_head // H, row_head % H
        rows = tile * SIDE + gl.arange(0, SIDE, gl.SliceLayout(1, written))
        columns = gl.arange(0, E, gl.SliceLayout(0, written))
        at = out + row * LENGTH * inner + head * E + rows[:, None] * inner + columns[None, :]
        gl.store(at, mixed, mask=(rows < LENGTH)[:, None])
        if KEEP:
            rows = tile * SIDE + gl.arange(0, SIDE, by_row)
            at = log_sum + row_head * LENGTH + rows
            gl.store(at, best + gl.log2(total), mask=rows < LENGTH)


@gluon.jit(do_not_specialize=["heads"])
def _attention(
    queries, keys, keys_tail, values, values_tail, out, log_sum, heads,
    H: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    tile: gl.constexpr = queries.layout
    q = gl.allocate_shared_memory(gl.bfloat16, [HEADS_HELD * ALL_TILES, SIDE, E], tile)
    k = gl.allocate_shared_memory(gl.bfloat16, [HEADS_HELD * 2, BK, E], tile)
    k_tail = gl.allocate_shared_memory(gl.bfloat16, [HEADS_HELD, TAIL, E], tile)
    v = gl.allocate_shared_memory(gl.bfloat16, [HEADS_HELD * 2, BK, E], tile)
    v_tail = gl.allocate_shared_memory(gl.bfloat16, [HEADS_HELD, TAIL, E], tile)
    scores_ready = gl.allocate_shared_memory(gl.int64, [HEADS_HELD, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [HEADS_HELD, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [HEADS_HELD, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(HEADS_HELD):
        mbarrier.init(scores_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    buffers = (q, k, k_tail, v, v_tail)
    barriers = (scores_ready, values_ready, free)
    fetch = (queries, keys, keys_tail, values, values_tail, buffers, barriers, H, heads)
    gl.warp_specialize(
        [
            (_attend_tiles, (out, log_sum, buffers, barriers, H, KEEP, 0, heads)),
            (_attend_tiles, (out, log_sum, buffers, barriers, H, KEEP, 1, heads)),
            (_fetch, fetch),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def hopper_attention(heads: Heads, out: Tensor, log_sum: Tensor | None) -> None:
    """Write the heads' results to `out` and, if given, log2 of the sums of weights to `log_sum`."""
    count = heads.rows * heads.heads
    chip = torch.cuda.get_device_properties(out.device)
    _attention[min(count, chip.multi_processor_count),](
        head_descriptor(heads.query, SIDE.value),
        head_descriptor(heads.key, BK.value),
        head_descriptor(heads.key, TAIL.value),
        head_descriptor(heads.value, BK.value),
        head_descriptor(heads.value, TAIL.value),
        out, out if log_sum is None else log_sum, count,
        H=heads.heads, KEEP=log_sum is not None, num_warps=4,
        maxnreg=168,  # per thread of three warpgroups; the one that fetches gives most of them away
    )  # fmt: skip
