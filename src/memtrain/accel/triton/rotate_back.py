"""Gradients of heads as they are written: those of the projection before it was turned."""

import triton
import triton.language as tl

from memtrain.accel.triton.common import LOG2_E


@triton.jit
def store_turned_back(
    x, gradient, rows, row_stride, there, cosine, sine, positions, R: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """Write the gradient, (R, E), of rows before they were turned."""
    half = tl.arange(0, E // 2)
    mask = there[:, None]
    left, right = tl.split(tl.permute(tl.reshape(gradient, (R, 2, E // 2)), (0, 2, 1)))
    angle = positions[:, None] * (E // 2) + half
    c = tl.load(cosine + angle, mask=mask, other=0.0)
    s = tl.load(sine + angle, mask=mask, other=0.0)
    at = x + rows[:, None] * row_stride + half
    kind = x.dtype.element_ty
    tl.store(at, (left * c + right * s).to(kind), mask=mask)
    tl.store(at + E // 2, (right * c - left * s).to(kind), mask=mask)


@triton.jit
def store_keys(
    key_gradient, value_gradient, dk, dv, keys, stride, there, cosine, sine,
    BK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Queries carried scale · log2(e); the gradient of the keys wants scale alone."""
    store_turned_back(
        key_gradient, dk / LOG2_E, keys, stride, there, cosine, sine, keys, BK, E
    )  # fmt: skip
    at = value_gradient + keys[:, None] * stride + tl.arange(0, E)
    tl.store(at, dv.to(value_gradient.dtype.element_ty), mask=there[:, None])
