"""Attention of 272 queries to 272 keys on Hopper: what `attention.forward` does, in Gluon.

A program stays on its multiprocessor and takes one head after the other. One of its warps fetches
the next head (queries, keys, values) while warpgroups work on this one, each on every so-manieth
tile of 64 queries, so that the products of one run beside the exponentials of another. Of the last
tile only 16 queries are the head's; the rest are rows that follow, and are not written.

Keys are taken as 128, 128 and 16. All scores of a row lie in registers, so there is no running
maximum, and the first 144 weights meet their values while the other 128 are still computed.
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

from memtrain.accel.hopper.layout import LENGTH, TAIL, E, descriptor
from memtrain.accel.triton.attention_heads import Heads

BQ = gl.constexpr(64)
"""Queries of a tile: the rows of one product of a warpgroup."""
TILES = gl.constexpr(5)
BK = gl.constexpr(128)
"""Keys of each of the two main parts."""
GROUPS = gl.constexpr(2)
"""Warpgroups that answer queries."""
REGISTERS = gl.constexpr(240)
"""Of a thread of theirs."""
STAGES = gl.constexpr(2)
"""Heads in shared memory: one worked on, one on its way."""


@gluon.jit
def _fetch(
    queries, keys, keys_tail, values, values_tail, buffers, barriers, H: gl.constexpr, heads
):
    """Brings in the program's heads, each as soon as the last but one is done with."""
    q, k, k_tail, v, v_tail = buffers
    scores_ready, values_ready, free = barriers
    program, programs = gl.program_id(0), gl.num_programs(0)
    for turn in range(gl.cdiv(heads - program, programs)):
        row_head = program + turn * programs
        stage, phase = turn % STAGES, (turn // STAGES) & 1
        row, column = (row_head // H) * LENGTH, (row_head % H) * E
        mbarrier.wait(free.index(stage), phase ^ 1)
        ready = scores_ready.index(stage)
        mbarrier.expect(ready, (TILES * BQ + 2 * BK + TAIL) * E * 2)
        tma.async_copy_global_to_shared(queries, [row, column], ready, q.index(stage * TILES))
        tma.async_copy_global_to_shared(keys, [row, column], ready, k.index(stage * 2))
        tma.async_copy_global_to_shared(keys, [row + BK, column], ready, k.index(stage * 2 + 1))
        tma.async_copy_global_to_shared(
            keys_tail, [row + 2 * BK, column], ready, k_tail.index(stage)
        )
        for tile in gl.static_range(1, TILES):
            tma.async_copy_global_to_shared(
                queries, [row + tile * BQ, column], ready, q.index(stage * TILES + tile)
            )
        ready = values_ready.index(stage)
        mbarrier.expect(ready, (2 * BK + TAIL) * E * 2)
        tma.async_copy_global_to_shared(values, [row, column], ready, v.index(stage * 2))
        tma.async_copy_global_to_shared(values, [row + BK, column], ready, v.index(stage * 2 + 1))
        tma.async_copy_global_to_shared(
            values_tail, [row + 2 * BK, column], ready, v_tail.index(stage)
        )


@gluon.jit
def _answer(
    out,
    log_sum,
    buffers,
    barriers,
    H: gl.constexpr,
    KEEP: gl.constexpr,
    group: gl.constexpr,
    heads,
):
    """One warpgroup's share of the tiles of the program's heads."""
    q, k, k_tail, v, v_tail = buffers
    scores_ready, values_ready, free = barriers
    of_main: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_tail: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    of_mixed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, of_mixed, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, of_mixed)
    # a thread writes 16 bytes of a row, 8 threads the row; rows stay within their warp
    written: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [BQ, E],
    )
    inner: gl.constexpr = H * E
    program, programs = gl.program_id(0), gl.num_programs(0)
    kind: gl.constexpr = out.dtype.element_ty
    mine = gl.cdiv(heads - program, programs)
    empty = gl.zeros([BQ, BK], gl.float32, of_main)
    empty_tail = gl.zeros([BQ, TAIL], gl.float32, of_tail)
    empty_mixed = gl.zeros([BQ, E], gl.float32, of_mixed)

    for turn_tile in range(group, mine * TILES, GROUPS):
        turn, tile = turn_tile // TILES, turn_tile % TILES
        stage, phase = turn % STAGES, (turn // STAGES) & 1
        query = q.index(stage * TILES + tile)
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
        # by way of the tile's queries, which are done with, whole rows come into one thread's hands
        query.store((mixed * (1.0 / total)[:, None]).to(kind))
        mixed = query.load(written)
        fence_async_shared()
        mbarrier.arrive(free.index(stage), pred=tile + GROUPS >= TILES)

        row_head = (program + turn * programs).to(gl.int64)
        row, head = row_head // H, row_head % H
        rows = tile * BQ + gl.arange(0, BQ, gl.SliceLayout(1, written))
        columns = gl.arange(0, E, gl.SliceLayout(0, written))
        at = out + row * LENGTH * inner + head * E + rows[:, None] * inner + columns[None, :]
        gl.store(at, mixed, mask=(rows < LENGTH)[:, None])
        if KEEP:
            rows = tile * BQ + gl.arange(0, BQ, by_row)
            at = log_sum + row_head * LENGTH + rows
            gl.store(at, best + gl.log2(total), mask=rows < LENGTH)


@gluon.jit(do_not_specialize=["heads"])
def _forward(
    queries,
    keys,
    keys_tail,
    values,
    values_tail,
    out,
    log_sum,
    heads,
    H: gl.constexpr,
    KEEP: gl.constexpr,
):
    tile: gl.constexpr = queries.layout
    q = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILES, BQ, E], tile)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, BK, E], tile)
    k_tail = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TAIL, E], tile)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, BK, E], tile)
    v_tail = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TAIL, E], tile)
    scores_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(scores_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    buffers = (q, k, k_tail, v, v_tail)
    barriers = (scores_ready, values_ready, free)
    fetch = (queries, keys, keys_tail, values, values_tail, buffers, barriers, H, heads)
    gl.warp_specialize(
        [
            (_answer, (out, log_sum, buffers, barriers, H, KEEP, 0, heads)),
            (_answer, (out, log_sum, buffers, barriers, H, KEEP, 1, heads)),
            (_fetch, fetch),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def run_forward(heads: Heads, out: Tensor, log_sum: Tensor | None) -> None:
    """Writes the heads' weighted sums and, if there is room for it, log2 of the weights' sums."""
    count = heads.rows * heads.heads
    chip = torch.cuda.get_device_properties(out.device)
    _forward[min(count, chip.multi_processor_count),](
        descriptor(heads.query, BQ.value),
        descriptor(heads.key, BK.value),
        descriptor(heads.key, TAIL.value),
        descriptor(heads.value, BK.value),
        descriptor(heads.value, TAIL.value),
        out,
        out if log_sum is None else log_sum,
        count,
        H=heads.heads,
        KEEP=log_sum is not None,
        num_warps=4,
        maxnreg=168,  # of each of three warpgroups; the one that fetches gives most of its away
    )
