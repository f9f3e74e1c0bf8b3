"""Norm, projection and attention of short sequences for Hopper in Gluon; computes the same as
`triton.rollout_large_batch`.

A program stays on its multiprocessor with the weights of one head. One of its warps fetches rows,
in tiles of 64 that hold whole sequences; two warpgroups take alternate tiles. One starts
multiplying when the other has almost finished: at the same time, products would take twice as long,
and zero would overlap with the exponentials. A tile is in registers while it is multiplied, so
the next one can take its place in shared memory.
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

from memtrain.accel.hopper.layout import GROUPS, REGISTERS, SIDE, WIDTH, E, descriptor
from memtrain.accel.triton.common import LOG2_E
from memtrain.models.layers import RMS_EPSILON


@gluon.jit
def _fetch(x, weight, buffers, barriers, H: gl.constexpr, ROWS: gl.constexpr, tiles):
    """Fetch the head's weights, then the program's tiles, which hold ROWS rows of whole
    sequences."""
    fetched, weights, _, _, _ = buffers
    ready, free, weights_ready = barriers
    head, first, step = gl.program_id(0) % H, gl.program_id(0) // H, gl.num_programs(0) // H
    mbarrier.expect(weights_ready, 3 * E * WIDTH * 2)
    for part in gl.static_range(3):
        at = [(part * H + head) * E, 0]
        tma.async_copy_global_to_shared(weight, at, weights_ready, weights.index(part))
    for index in range(gl.cdiv(tiles - first, step)):
        group, came = index % GROUPS, ready.index(index % GROUPS)
        mbarrier.wait(free.index(group), ((index // GROUPS) & 1) ^ 1)
        mbarrier.expect(came, SIDE * WIDTH * 2)
        row = (first + index * step) * ROWS
        tma.async_copy_global_to_shared(x, [row, 0], came, fetched.index(group))


@gluon.jit
def _pairs(x):
    """The pairs of columns that rotary rotates."""
    return gl.split(gl.reshape(x, (SIDE, E // 2, 2)))


@gluon.jit
def _rotated(x, c, s, sums: gl.constexpr):
    """Rotate rows of a head by the angles of their positions."""
    left, right = _pairs(x)
    both = gl.join(left * c - right * s, right * c + left * s)
    return gl.convert_layout(gl.reshape(both, (SIDE, E)), sums, assert_trivial=True)


@gluon.jit
def _squares(parts, row, rows, PARTS: gl.constexpr):
    """The rows' sums of squares from PARTS partial sums; 0 if there are none."""
    total = gl.zeros_like(row).to(gl.float32)
    for part in gl.static_range(PARTS):
        total += gl.load(parts + part * rows + row, mask=row < rows, other=0.0)
    return total


@gluon.jit
def _clamped(x, y):
    """x + y, clamped to [0, 1]."""
    return gl.inline_asm_elementwise(
        "add.sat.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _write(own, out, first, rows, H: gl.constexpr, ROWS: gl.constexpr):
    """Write a tile's results from shared memory to the rows from `first` on."""
    # A thread writes 16 bytes of a row, 8 threads a row; rows stay within their warp.
    written: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [SIDE, E],
    )
    place = gl.arange(0, SIDE, gl.SliceLayout(1, written))
    along = gl.program_id(0) % H * E + gl.arange(0, E, gl.SliceLayout(0, written))
    at = gl.expand_dims(first + place, 1) * (H * E) + gl.expand_dims(along, 0)
    there = (place < ROWS) & (first + place < rows)
    gl.store(out + at, own.load(written), mask=gl.expand_dims(there, 1))


@gluon.jit
def _attend_tiles(
    out, tables, buffers, barriers, numbers,
    H: gl.constexpr, L: gl.constexpr, CAUSAL: gl.constexpr, PARTS: gl.constexpr,
    group: gl.constexpr,
):  # fmt: skip
    """One warpgroup's tiles.

    `zero` is 0 at run time: the compiler would otherwise compute all addresses and masks before
    the loop, for which there are no registers.
    """
    squares, cosine, sine = tables
    rows, scale, epsilon, tiles, zero = numbers
    fetched, weights, keys, values, results = buffers
    ready, free, weights_ready = barriers
    ROWS: gl.constexpr = SIDE // L * L
    kind: gl.constexpr = out.dtype.element_ty
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, sums)
    start, step = gl.program_id(0) // H, gl.num_programs(0) // H
    empty = gl.zeros([SIDE, E], gl.float32, sums)
    halves: gl.constexpr = _pairs(empty)[0].type.layout
    position = gl.arange(0, SIDE, gl.SliceLayout(1, halves)) % L
    half = gl.arange(0, E // 2, gl.SliceLayout(0, halves))
    angle = gl.expand_dims(position, 1) * (E // 2) + gl.expand_dims(half, 0)
    c, s = gl.load(cosine + angle).to(gl.float32), gl.load(sine + angle).to(gl.float32)

    local = gl.arange(0, SIDE, by_row)
    column = gl.arange(0, SIDE, gl.SliceLayout(0, sums))
    # The part of a column that is the same for all threads needs no register.
    common, rest = (column & 57).to(gl.float32), (column & 6).to(gl.float32)
    # A row attends to columns at most `reach` away from `middle`.
    last = local % L if CAUSAL else L - 1 + 0 * local
    reach = last.to(gl.float32) / 2
    middle = (local - local % L).to(gl.float32) + reach
    square = _squares(squares, (start + group * step) * ROWS + local, rows, PARTS)
    own, made = results.index(group), rows  # no results yet
    mbarrier.wait(weights_ready, 0)
    for index in range(group, gl.cdiv(tiles - start, step), GROUPS):
        none = index * zero
        key, value = keys.index(group + none), values.index(group + none)
        first = (start + index * step) * ROWS
        mbarrier.wait(ready.index(group), (index // GROUPS) & 1)
        x = fetched.index(group).load(factor)
        if PARTS == 0:
            wide = x.to(gl.float32)
            square = gl.convert_layout(gl.sum(wide * wide, 1), by_row)
        level = gl.expand_dims(gl.rsqrt(square / WIDTH + epsilon), 1)
        # Wait for the other warpgroup's products except its queries: then it frees its rows.
        mbarrier.wait(free.index(1 - group), (index // GROUPS + 1 - group) & 1)
        k = warpgroup_mma(
            x, weights.index(1 + none).permute((1, 0)), empty, use_acc=False, is_async=True
        )
        v = warpgroup_mma(
            x, weights.index(2 + none).permute((1, 0)), empty, use_acc=False, is_async=True
        )
        q = warpgroup_mma(
            x, weights.index(none).permute((1, 0)), empty, use_acc=False, is_async=True
        )
        k = warpgroup_mma_wait(2, (k,))
        key.store(_rotated(k * level, c, s, sums).to(kind))
        v = warpgroup_mma_wait(1, (v,))
        value.store((v * level).to(kind))
        fence_async_shared()
        # Only after a product has read the rows: before, they may still be loading to registers,
        # and the copy of the next ones does not wait for that.
        mbarrier.arrive(free.index(group))
        square = _squares(squares, first + GROUPS * step * ROWS + local, rows, PARTS)
        _write(own, out, made, rows, H, ROWS)  # of the previous tile, during this one's products
        q, x = warpgroup_mma_wait(0, (q, x))
        q = _rotated(q, c, s, sums).to(kind)
        q = gl.convert_layout(q, factor, assert_trivial=True)
        score = warpgroup_mma(q, key.permute((1, 0)), empty, use_acc=False)
        there = gl.expand_dims(rest, 0) - gl.expand_dims(middle + none.to(gl.float32), 1)
        away = gl.abs(gl.expand_dims(common, 0) + there)
        score -= 1e30 * _clamped(away, gl.expand_dims(-reach, 1))
        sharp = level * scale
        weight = gl.exp2(score * sharp - gl.expand_dims(gl.max(score, 1), 1) * sharp)
        share = gl.convert_layout(weight.to(kind), factor, assert_trivial=True)
        mixed = warpgroup_mma(share, value, empty, use_acc=False, is_async=True)
        total = gl.sum(weight, 1)
        mixed = warpgroup_mma_wait(0, (mixed,))
        own.store((mixed * gl.expand_dims(1.0 / total, 1)).to(kind))
        made = first
    _write(own, out, made, rows, H, ROWS)


@gluon.jit(do_not_specialize=["rows", "tiles", "zero"])
def _attention(
    x, weight, out, squares, cosine, sine, rows, scale, epsilon, tiles, zero,
    H: gl.constexpr, L: gl.constexpr, CAUSAL: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = x.layout
    fetched = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, WIDTH], layout)
    weights = gl.allocate_shared_memory(gl.bfloat16, [3, E, WIDTH], layout)
    keys = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, E], layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, E], layout)
    results = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, E], layout)
    ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(ready.index(group), count=1)
        mbarrier.init(free.index(group), count=1)
    mbarrier.init(weights_ready, count=1)
    fence_async_shared()
    buffers, barriers = (fetched, weights, keys, values, results), (ready, free, weights_ready)
    tables, numbers = (squares, cosine, sine), (rows, scale, epsilon, tiles, zero)
    gl.warp_specialize(
        [
            (_attend_tiles, (out, tables, buffers, barriers, numbers, H, L, CAUSAL, PARTS, 0)),
            (_attend_tiles, (out, tables, buffers, barriers, numbers, H, L, CAUSAL, PARTS, 1)),
            (_fetch, (x, weight, buffers, barriers, H, SIDE // L * L, tiles)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def hopper_rollout_attention(
    x: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    length: int,
    causal: bool,
) -> Tensor:
    """`triton.rollout_large_batch.run_large_batch_attention`."""
    rows = len(x)
    out = torch.empty(rows, heads * E.value, dtype=weight.dtype, device=weight.device)
    tiles = -(-rows // (SIDE.value // length * length))
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    _attention[min(tiles, processors // heads) * heads,](
        descriptor(x, [SIDE.value, WIDTH.value]), descriptor(weight, [SIDE.value, WIDTH.value]),
        out, x if squares is None else squares, cosine, sine,
        rows, LOG2_E.value / math.sqrt(E.value), RMS_EPSILON, tiles, 0,
        H=heads, L=length, CAUSAL=causal, PARTS=0 if squares is None else len(squares),
        num_warps=4,
        maxnreg=168,  # per thread of three warpgroups; the one that fetches gives most of them away
    )  # fmt: skip
    return out
