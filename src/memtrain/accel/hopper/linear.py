"""The MLP's products with GELU and the projection to queries, keys and values, for Hopper in Gluon.

They compute the same as `triton.mlp` and `triton.qkv` (see `layout` for the product).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

import memtrain.accel.hopper.layout as L
from memtrain.accel.triton.common import gelu, gelu_slope

TILES_OF_X = 2
"""Tiles in shared memory. For g only one fits, next to `before`."""

# ----------------------------------------------------------------------------------------- MLP, up


@gluon.jit
def _finish_up(
    before, after, biases, buffers, panels, group: gl.constexpr, rows,
    OUTER: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """One warpgroup's tiles."""
    column = L.program_column(OUTER)
    first, step = L.program_rows(OUTER)
    phase = 0
    for row in range(first + group * step, rows, L.GROUPS * step):
        total = L.start_product(buffers, 0, L.zero_sums(), group, phase)
        parts = L.in_panels(L.finish_product(buffers, total, group, phase))
        phase ^= 1
        for part in gl.static_range(L.PARTS):
            bias = biases.slice(part * L.PART, L.PART).load(gl.SliceLayout(0, L.SUMS))
            total = parts[part] + gl.expand_dims(bias, 0)
            at = column + part * L.PART
            if KEEP:
                L.store_panel(before, row, at, total, panels, 2 * part)
                L.store_panel(after, row, at, gelu(total), panels, 2 * part + 1)
            else:
                L.store_panel(after, row, at, gelu(total), panels, part)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def _up(
    x, weight, bias, before, after, rows,
    OUTER: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """before = x W^T + b (stored if KEEP) and after = GELU(before), with W (OUTER, WIDTH)."""
    columns = gl.arange(0, L.COLUMNS, gl.BlockedLayout([2], [32], [4], [0]))
    b = gl.load(bias + L.program_column(OUTER) + columns).to(gl.float32)
    biases = gl.allocate_shared_memory(gl.float32, [L.COLUMNS], L.NUMBERS, b)
    buffers = L.new_buffers(weight, STAGES)
    panels = L.new_panels(L.PARTS // STAGES), L.new_panels(L.PARTS // STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_finish_up, (before, after, biases, buffers, panels[0], 0, rows, OUTER, KEEP)),
            (_finish_up, (before, after, biases, buffers, panels[1], 1, rows, OUTER, KEEP)),
            (L.fetch_product, (x, weight, buffers, rows, OUTER, STAGES)),
        ],
        [4, 1],
        [L.REGISTERS, 24],
    )


def hopper_mlp_up(
    x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None, after: Tensor
) -> None:
    """Write x W^T + b to `before`, if given, and its GELU to `after`, (R, O)."""
    outer = len(weight)
    _up[L.lanes(x, outer) * (outer // L.COLUMNS.value),](
        L.tile_descriptor(x),
        L.descriptor(weight, [L.COLUMNS.value, L.PART.value]),
        bias,
        L.tile_descriptor(after if before is None else before),
        L.tile_descriptor(after),
        len(x),
        KEEP=before is not None,
        **L.product_options(outer, TILES_OF_X),
    )


# ------------------------------------------------------------------------------ MLP, down, backward

# `before` arrives in the buffers that `out` is written from, panel by panel: a thread cannot hold
# all of it besides the product's sums and the column sums over all its rows.

LINES = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
"""Each warp has whole rows of a part."""


@gluon.jit
def _thread_sums(x):
    """Sum a panel's rows within each thread: (warps, 8, PART)."""
    one, other = gl.split(gl.permute(gl.reshape(x, (4, 2, 8, L.PART)), (0, 2, 3, 1)))
    return one + other


@gluon.jit
def _inner_sums(part):
    """Sum a part of the fetched rows within each warp: (warps, PART)."""
    sums = gl.sum(gl.reshape(part.load(LINES).to(gl.float32), (16, 4, L.PART)), 0)
    return gl.convert_layout(sums, LINES, assert_trivial=True)


@gluon.jit
def _store_sums(x, sums, first, WIDTH: gl.constexpr):
    """Write the sums of each warp."""
    layout: gl.constexpr = x.type.layout
    warp = gl.arange(0, 4, gl.SliceLayout(1, layout))
    column = gl.arange(0, L.PART, gl.SliceLayout(0, layout)) + first
    gl.store(sums + gl.expand_dims(warp, 1) * WIDTH + gl.expand_dims(column, 0), x)


@gluon.jit
def _fetch_before(before, places, panel: gl.constexpr, row, column, rows):
    """Fetch a panel of `before`."""
    panels, came = places
    at = [row, column + panel * L.PART]
    mbarrier.expect(came[panel], L.SIDE * L.PART * 2, pred=row < rows)
    tma.async_copy_global_to_shared(before, at, came[panel], panels[panel], pred=row < rows)


@gluon.jit
def _finish_panel(total, places, panel: gl.constexpr, phase, out, row, column):
    """Replace a panel of `before` by that of `out`; return its column sums."""
    panels, came = places
    mbarrier.wait(came[panel], phase)
    total *= gelu_slope(panels[panel].load(L.SUMS).to(gl.float32))
    panels[panel].store(total.to(gl.bfloat16))
    L.write_panel(out, row, column + panel * L.PART, panels[panel])
    return _thread_sums(total)


@gluon.jit
def _finish_down(
    before, out, sums, buffers, places, group: gl.constexpr, rows, OUTER: gl.constexpr
):
    """One warpgroup's tiles."""
    _, _, tiles, _, _, _ = buffers
    column = L.program_column(OUTER)
    first, step = L.program_rows(OUTER)
    first += group * step
    step *= L.GROUPS
    for panel in gl.static_range(L.PARTS):
        _fetch_before(before, places, panel, first, column, rows)
    empty = _thread_sums(gl.zeros((L.SIDE, L.PART), gl.float32, L.SUMS))
    sums_0, sums_1, sums_2, sums_3 = empty, empty, empty, empty
    inner_sums = gl.zeros((4, L.PART), gl.float32, LINES)
    phase = 0
    for row in range(first, rows, step):
        total = L.start_product(buffers, 0, L.zero_sums(), group, phase)
        inner_sums += _inner_sums(tiles.index(0))
        total = L.finish_product(buffers, total, group, phase)
        part_0, part_1, part_2, part_3 = L.in_panels(total)
        # As soon as a panel has been written, the next one is fetched into its buffer.
        sums_0 += _finish_panel(part_0, places, 0, phase, out, row, column)
        sums_1 += _finish_panel(part_1, places, 1, phase, out, row, column)
        tma.store_wait(1)
        _fetch_before(before, places, 0, row + step, column, rows)
        sums_2 += _finish_panel(part_2, places, 2, phase, out, row, column)
        tma.store_wait(1)
        _fetch_before(before, places, 1, row + step, column, rows)
        sums_3 += _finish_panel(part_3, places, 3, phase, out, row, column)
        tma.store_wait(1)
        _fetch_before(before, places, 2, row + step, column, rows)
        tma.store_wait(0)
        _fetch_before(before, places, 3, row + step, column, rows)
        phase ^= 1
    width: gl.constexpr = OUTER + L.WIDTH
    sums += (gl.program_id(0) // (OUTER // L.COLUMNS) * L.GROUPS + group) * 4 * width
    _store_sums(gl.sum(sums_0, 1), sums, column, width)
    _store_sums(gl.sum(sums_1, 1), sums, column + L.PART, width)
    _store_sums(gl.sum(sums_2, 1), sums, column + 2 * L.PART, width)
    _store_sums(gl.sum(sums_3, 1), sums, column + 3 * L.PART, width)
    _store_sums(inner_sums, sums, OUTER + L.inner_part(0, OUTER), width)


@gluon.jit(do_not_specialize=["rows"])
def _down_backward(
    gradient, weight, before, out, sums, rows, OUTER: gl.constexpr, STAGES: gl.constexpr
):
    """out = (g W) * GELU'(before), with W (WIDTH, OUTER); and the column sums of out and g.

    Each warp sums its own columns of `out`, and a part of the columns of g.
    """
    buffers = L.new_buffers(weight, STAGES)
    places = (L.new_panels(L.PARTS), L.new_barriers()), (L.new_panels(L.PARTS), L.new_barriers())
    fence_async_shared()
    gl.warp_specialize(
        [
            (_finish_down, (before, out, sums, buffers, places[0], 0, rows, OUTER)),
            (_finish_down, (before, out, sums, buffers, places[1], 1, rows, OUTER)),
            (L.fetch_product, (gradient, weight, buffers, rows, OUTER, STAGES)),
        ],
        [4, 1],
        [L.REGISTERS, 24],
    )


def hopper_mlp_down_backward(
    gradient: Tensor, weight: Tensor, before: Tensor, out: Tensor
) -> Tensor:
    """Write (g W) * GELU'(before), (R, O), to `out`; return partial column sums of it and of g,
    (_, O + I) in fp32, to be added up."""
    outer, count = weight.shape[1], L.lanes(gradient, weight.shape[1])
    shares = count * L.GROUPS.value * 4
    sums = gradient.new_empty(shares, outer + L.WIDTH.value, dtype=torch.float32)
    _down_backward[count * (outer // L.COLUMNS.value),](
        L.tile_descriptor(gradient),
        L.descriptor(weight, [L.PART.value, L.COLUMNS.value]),
        L.tile_descriptor(before),
        L.tile_descriptor(out),
        sums,
        len(gradient),
        **L.product_options(outer, 1),
    )
    return sums


# --------------------------------------------------------------------------- queries, keys, values


@gluon.jit
def _heads(x, E: gl.constexpr):
    """The left and right halves of a tile's heads, (SIDE, heads, E/2), without moving data."""
    halves = gl.reshape(x, (L.SIDE, L.COLUMNS // E, 2, E // 2))
    return gl.split(gl.permute(halves, (0, 1, 3, 2)))


@gluon.jit
def _rotated(x, c, s, E: gl.constexpr):
    """The heads in x, (SIDE, COLUMNS), rotated by angles with these cosines and sines,
    (SIDE, E/2)."""
    left, right = _heads(x, E)
    c, s = gl.expand_dims(c, 1), gl.expand_dims(s, 1)
    both = gl.join(left * c - right * s, right * c + left * s)
    rotated = gl.reshape(gl.permute(both, (0, 1, 3, 2)), (L.SIDE, L.COLUMNS))
    return gl.convert_layout(rotated, L.WIDE_SUMS, assert_trivial=True)


@gluon.jit
def _finish_qkv(
    to, panels, group: gl.constexpr, rows,
    LENGTH: gl.constexpr, OUTER: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    E: gl.constexpr,
):  # fmt: skip
    """One warpgroup's tiles."""
    out, cosine, sine, start, scale, buffers = to
    column = L.program_column(OUTER)
    first, step = L.program_rows(OUTER)
    is_rotated = column < QUERIES + KEYS
    factor = gl.where(column < QUERIES, scale, 1.0)
    left, _ = _heads(L.zero_sums(), E)
    layout: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    lines = gl.arange(0, L.SIDE, gl.SliceLayout(1, layout))
    half = gl.arange(0, E // 2, gl.SliceLayout(0, layout))
    phase = 0
    for row in range(first + group * step, rows, L.GROUPS * step):
        total = L.start_product(buffers, 0, L.zero_sums(), group, phase)
        # Issued here to overlap with the product.
        position = start + (row + lines) % LENGTH
        angle = gl.expand_dims(position, 1) * (E // 2) + gl.expand_dims(half, 0)
        c = gl.load(cosine + angle, mask=is_rotated, other=1.0)
        s = gl.load(sine + angle, mask=is_rotated, other=0.0)
        total = L.finish_product(buffers, total, group, phase)
        phase ^= 1
        if is_rotated:
            total = _rotated(total, c.to(gl.float32) * factor, s.to(gl.float32) * factor, E)
        parts = L.in_panels(total)
        for part in gl.static_range(L.PARTS):
            L.store_panel(out, row, column + part * L.PART, parts[part], panels, part)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["start", "rows"])
def _qkv(
    x, weight, out, cosine, sine, start, scale, rows,
    LENGTH: gl.constexpr, OUTER: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out = x W^T, with the first QUERIES columns rotated and scaled, the next KEYS rotated."""
    buffers = L.new_buffers(weight, STAGES)
    panels = L.new_panels(L.PARTS // STAGES), L.new_panels(L.PARTS // STAGES)
    fence_async_shared()
    to = (out, cosine, sine, start, scale, buffers)
    gl.warp_specialize(
        [
            (_finish_qkv, (to, panels[0], 0, rows, LENGTH, OUTER, QUERIES, KEYS, E)),
            (_finish_qkv, (to, panels[1], 1, rows, LENGTH, OUTER, QUERIES, KEYS, E)),
            (L.fetch_product, (x, weight, buffers, rows, OUTER, STAGES)),
        ],
        [4, 1],
        [L.REGISTERS, 24],
    )


def hopper_qkv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    cosine: Tensor,
    sine: Tensor,
    first: int,
    scale: float,
    constants: dict[str, int],
) -> None:
    """Write `qkv.run_qkv`'s result, (R, O), to `out`."""
    outer = len(weight)
    _qkv[L.lanes(x, outer) * (outer // L.COLUMNS.value),](
        L.tile_descriptor(x), L.descriptor(weight, [L.COLUMNS.value, L.PART.value]),
        L.tile_descriptor(out), cosine, sine, first, scale, len(x),
        **constants, **L.product_options(outer, TILES_OF_X),
    )  # fmt: skip
