"""The projection to queries, keys and values on Hopper: what `kernels.projection` does, in Gluon
(see `products`)."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from memtrain.accel.hopper.matmul import (
    COLUMNS,
    GROUPS,
    PART,
    PARTS,
    REGISTERS,
    ROWS,
    SUMS,
    begin,
    descriptor,
    fetch,
    finish,
    in_panels,
    lanes,
    new_buffers,
    new_panels,
    no_sums,
    options,
    part_descriptor,
    program_column,
    program_rows,
    put,
)

STAGES = 2
"""Tiles of x at once."""


@gluon.jit
def _heads(x, E: gl.constexpr):
    """The left and the right halves of all heads of a tile, (ROWS, heads, E/2). Nothing moves."""
    halves = gl.reshape(x, (ROWS, COLUMNS // E, 2, E // 2))
    return gl.split(gl.permute(halves, (0, 1, 3, 2)))


@gluon.jit
def _turned(x, c, s, E: gl.constexpr):
    """The heads in x, (ROWS, COLUMNS), turned by the angles whose cosines and sines are
    (ROWS, E/2)."""
    left, right = _heads(x, E)
    c, s = gl.expand_dims(c, 1), gl.expand_dims(s, 1)
    both = gl.join(left * c - right * s, right * c + left * s)
    turned = gl.reshape(gl.permute(both, (0, 1, 3, 2)), (ROWS, COLUMNS))
    return gl.convert_layout(turned, SUMS, assert_trivial=True)


@gluon.jit
def _finish_projection(
    to, panels, group: gl.constexpr, rows,
    LENGTH: gl.constexpr, OUTER: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    E: gl.constexpr,
):  # fmt: skip
    """A warpgroup's turns."""
    out, cosine, sine, start, scale, buffers = to
    column = program_column(OUTER)
    first, step = program_rows(OUTER)
    turned = column < QUERIES + KEYS
    factor = gl.where(column < QUERIES, scale, 1.0)
    left, _ = _heads(no_sums(), E)
    layout: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    lines = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    half = gl.arange(0, E // 2, gl.SliceLayout(0, layout))
    phase = 0
    for row in range(first + group * step, rows, GROUPS * step):
        total = begin(buffers, 0, no_sums(), group, phase)
        # Under way while the product is taken.
        position = start + (row + lines) % LENGTH
        angle = gl.expand_dims(position, 1) * (E // 2) + gl.expand_dims(half, 0)
        c = gl.load(cosine + angle, mask=turned, other=1.0)
        s = gl.load(sine + angle, mask=turned, other=0.0)
        total = finish(buffers, total, group, phase)
        phase ^= 1
        if turned:
            total = _turned(total, c.to(gl.float32) * factor, s.to(gl.float32) * factor, E)
        parts = in_panels(total)
        for part in gl.static_range(PARTS):
            put(out, row, column + part * PART, parts[part], panels, part)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["start", "rows"])
def _project(
    x, weight, out, cosine, sine, start, scale, rows,
    LENGTH: gl.constexpr, OUTER: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out = x W^T, its first QUERIES columns turned and scaled, the KEYS after them turned."""
    buffers = new_buffers(weight, STAGES)
    panels = new_panels(PARTS // STAGES), new_panels(PARTS // STAGES)
    fence_async_shared()
    to = (out, cosine, sine, start, scale, buffers)
    gl.warp_specialize(
        [
            (_finish_projection, (to, panels[0], 0, rows, LENGTH, OUTER, QUERIES, KEYS, E)),
            (_finish_projection, (to, panels[1], 1, rows, LENGTH, OUTER, QUERIES, KEYS, E)),
            (fetch, (x, weight, buffers, rows, OUTER, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def run_projection(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    head_dim: int,
    length: int,
    first: int,
    query_columns: int,
    key_columns: int,
    scale: float,
) -> None:
    """Write x W^T, (R, O), turned (see `kernels.projection.run_projection`)."""
    outer = len(weight)
    _project[lanes(x, outer) * (outer // COLUMNS.value),](
        part_descriptor(x),
        descriptor(weight, [COLUMNS.value, PART.value]),
        part_descriptor(out),
        cosine,
        sine,
        first,
        scale,
        len(x),
        LENGTH=length,
        QUERIES=query_columns,
        KEYS=key_columns,
        E=head_dim,
        **options(outer, STAGES),
    )
