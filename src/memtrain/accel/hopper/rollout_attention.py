"""Norm, queries, keys and values, and attention of short sequences, on Hopper: what
`many_attend` does, in Gluon.

A program stays on its multiprocessor with the weights of one head. One of its warps has rows
brought, tiles of 64 that hold whole sequences; two warpgroups take every other tile. One begins to
multiply when the other has all but done so: at the same time, products would take twice as long,
and then nothing would run beside the exponentials. A tile lies in registers while it is multiplied,
and the next one takes its place in shared memory.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from memtrain.accel.triton.common import LOG2_E
from memtrain.models.layers import RMS_EPSILON

WIDTH = gl.constexpr(256)
E = gl.constexpr(64)
"""A head's size."""
SIDE = gl.constexpr(64)
"""Rows of a tile."""
GROUPS = gl.constexpr(2)
"""Warpgroups that take products."""
REGISTERS = gl.constexpr(240)
"""Of a thread of theirs."""


@gluon.jit
def _fetch(x, weight, buffers, barriers, H: gl.constexpr, ROWS: gl.constexpr, tiles):
    """Brings in the head's weights, then the program's tiles of ROWS rows that count."""
    taken, weights, _, _, _ = buffers
    ready, free, weights_ready = barriers
    head, first, step = gl.program_id(0) % H, gl.program_id(0) // H, gl.num_programs(0) // H
    mbarrier.expect(weights_ready, 3 * E * WIDTH * 2)
    for part in gl.static_range(3):
        at = [(part * H + head) * E, 0]
        tma.async_copy_global_to_shared(weight, at, weights_ready, weights.index(part))
    for turn in range(gl.cdiv(tiles - first, step)):
        group, came = turn % GROUPS, ready.index(turn % GROUPS)
        mbarrier.wait(free.index(group), ((turn // GROUPS) & 1) ^ 1)
        mbarrier.expect(came, SIDE * WIDTH * 2)
        row = (first + turn * step) * ROWS
        tma.async_copy_global_to_shared(x, [row, 0], came, taken.index(group))


@gluon.jit
def _pairs(x):
    """Columns that rotary turns together."""
    return gl.split(gl.reshape(x, (SIDE, E // 2, 2)))


@gluon.jit
def _turned(x, c, s, sums: gl.constexpr):
    """Rows of a head turned by the angles of their positions."""
    left, right = _pairs(x)
    both = gl.join(left * c - right * s, right * c + left * s)
    return gl.convert_layout(gl.reshape(both, (SIDE, E)), sums, assert_trivial=True)


@gluon.jit
def _squares(parts, row, rows, PARTS: gl.constexpr):
    """The rows' sums of squares, where those are known; none are if PARTS is 0."""
    total = gl.zeros_like(row).to(gl.float32)
    for part in gl.static_range(PARTS):
        total += gl.load(parts + part * rows + row, mask=row < rows, other=0.0)
    return total


@gluon.jit
def _clamped(x, y):
    """x + y, between 0 and 1."""
    return gl.inline_asm_elementwise(
        "add.sat.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _give(own, out, first, rows, H: gl.constexpr, ROWS: gl.constexpr):
    """Writes a tile's results, which lie in shared memory, to where its first row is and on."""
    # a thread writes 16 bytes of a row, 8 threads the row; rows stay within their warp
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
def _mix(
    out,
    tables,
    buffers,
    barriers,
    numbers,
    H: gl.constexpr,
    L: gl.constexpr,
    CAUSAL: gl.constexpr,
    PARTS: gl.constexpr,
    group: gl.constexpr,
):
    """One warpgroup's tiles of the program's.

    `nothing` is 0, kept from the compiler: it would find out before the loop where all factors lie
    and what every row sees, and there are no registers for that.
    """
    squares, cosine, sine = tables
    rows, scale, epsilon, tiles, nothing = numbers
    taken, weights, keys, values, given = buffers
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
    # of a column, what is the same for all threads, so that no register holds it
    common, rest = (column & 57).to(gl.float32), (column & 6).to(gl.float32)
    # a row sees what is at most `reach` columns away from `middle`
    last = local % L if CAUSAL else L - 1 + 0 * local
    reach = last.to(gl.float32) / 2
    middle = (local - local % L).to(gl.float32) + reach
    square = _squares(squares, (start + group * step) * ROWS + local, rows, PARTS)
    own, made = given.index(group), rows  # there are no results yet
    mbarrier.wait(weights_ready, 0)
    for turn in range(group, gl.cdiv(tiles - start, step), GROUPS):
        none = turn * nothing
        key, value = keys.index(group + none), values.index(group + none)
        first = (start + turn * step) * ROWS
        mbarrier.wait(ready.index(group), (turn // GROUPS) & 1)
        x = taken.index(group).load(factor)
        if PARTS == 0:
            wide = x.to(gl.float32)
            square = gl.convert_layout(gl.sum(wide * wide, 1), by_row)
        level = gl.expand_dims(gl.rsqrt(square / WIDTH + epsilon), 1)
        # the other warpgroup's products come first, but for its queries: it lets go of its rows
        mbarrier.wait(free.index(1 - group), (turn // GROUPS + 1 - group) & 1)
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
        key.store(_turned(k * level, c, s, sums).to(kind))
        v = warpgroup_mma_wait(1, (v,))
        value.store((v * level).to(kind))
        fence_async_shared()
        # a product has read the rows: until then they may be on their way to registers, and the
        # next ones, which come another way, would not wait for that
        mbarrier.arrive(free.index(group))
        square = _squares(squares, first + GROUPS * step * ROWS + local, rows, PARTS)
        _give(own, out, made, rows, H, ROWS)  # the last tile's, beside this one's products
        q, x = warpgroup_mma_wait(0, (q, x))
        q = _turned(q, c, s, sums).to(kind)
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
    _give(own, out, made, rows, H, ROWS)


@gluon.jit(do_not_specialize=["rows", "tiles", "nothing"])
def _attend(
    x,
    weight,
    out,
    squares,
    cosine,
    sine,
    rows,
    scale,
    epsilon,
    tiles,
    nothing,
    H: gl.constexpr,
    L: gl.constexpr,
    CAUSAL: gl.constexpr,
    PARTS: gl.constexpr,
):
    layout: gl.constexpr = x.layout
    taken = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, WIDTH], layout)
    weights = gl.allocate_shared_memory(gl.bfloat16, [3, E, WIDTH], layout)
    keys = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, E], layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, E], layout)
    given = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, SIDE, E], layout)
    ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(ready.index(group), count=1)
        mbarrier.init(free.index(group), count=1)
    mbarrier.init(weights_ready, count=1)
    fence_async_shared()
    buffers, barriers = (taken, weights, keys, values, given), (ready, free, weights_ready)
    tables, numbers = (squares, cosine, sine), (rows, scale, epsilon, tiles, nothing)
    gl.warp_specialize(
        [
            (_mix, (out, tables, buffers, barriers, numbers, H, L, CAUSAL, PARTS, 0)),
            (_mix, (out, tables, buffers, barriers, numbers, H, L, CAUSAL, PARTS, 1)),
            (_fetch, (x, weight, buffers, barriers, H, SIDE // L * L, tiles)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


# ----------------------------------------------------------------------------------------- launch


def _described(x: Tensor) -> TensorDescriptor:
    """A matrix, of which SIDE whole rows are fetched at a time."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [SIDE.value, x.shape[1]], layout)


def run_attend(
    x: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    length: int,
    causal: bool,
) -> Tensor:
    """`many_attend.run_attend`."""
    rows = len(x)
    out = torch.empty(rows, heads * E.value, dtype=weight.dtype, device=weight.device)
    tiles = -(-rows // (SIDE.value // length * length))
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    _attend[min(tiles, processors // heads) * heads,](
        _described(x),
        _described(weight),
        out,
        x if squares is None else squares,
        cosine,
        sine,
        rows,
        LOG2_E.value / math.sqrt(E.value),
        RMS_EPSILON,
        tiles,
        0,
        H=heads,
        L=length,
        CAUSAL=causal,
        PARTS=0 if squares is None else len(squares),
        num_warps=4,
        maxnreg=168,  # of each of three warpgroups; the one that fetches gives most of its away
    )
    return out
