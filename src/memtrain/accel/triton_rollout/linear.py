"""Products with what stands around them folded in: norm, bias, GELU, residual.

Taken in the weights' precision and summed in fp32; of a norm, see `rows`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from memtrain.accel.triton.common import gelu
from memtrain.accel.triton_rollout import limits
from memtrain.accel.triton_rollout.dependent_launch import chain
from memtrain.accel.triton_rollout.rows import (
    Rows,
    source_rows,
    squares_before,
    sum_of_parts,
    sums_of_squares,
)
from memtrain.models.layers import RMS_EPSILON


@triton.jit
def _load_bias(bias, column, OUTER: tl.constexpr):
    return tl.load(bias + column, mask=column < OUTER, other=0.0)[None, :]


@triton.jit
def _load_residual(residual, source, column, OUTER: tl.constexpr):
    at = residual + source[:, None] * OUTER + column[None, :]
    return tl.load(at, mask=(column < OUTER)[None, :], other=0.0)


@triton.jit
def _finish(
    total, square, shift, base, out, measured, row, column, rows, epsilon,
    INNER: tl.constexpr, OUTER: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr,
    MEASURE: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Everything after the product, and the store."""
    if NORM:
        total *= tl.rsqrt(square / INNER + epsilon)[:, None]
    total += shift
    if GELU:
        total = gelu(total)
    total += base
    there = (row < rows)[:, None] & (column < OUTER)[None, :]
    at = out + row[:, None].to(tl.int64) * OUTER + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there)
    if MEASURE:
        square = tl.sum(tl.where(there, total * total, 0.0), 1)
        block = tl.program_id(0) % tl.cdiv(OUTER, BO)
        tl.store(measured + block * rows + row, square, mask=row < rows)


@triton.jit
def _wrapped(column, OUTER: tl.constexpr, BO: tl.constexpr):
    """Columns that are not there read others': no mask either."""
    if OUTER % BO == 0:
        return column
    else:
        return column % OUTER


@triton.jit
def linear(
    x, weight, bias, residual, out, squares, measured, rows, length, kept, first, epsilon,
    INNER: tl.constexpr, OUTER: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr, MEASURE: tl.constexpr,
    CHAINED: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """x W^T at the kept positions of every sequence, in tiles."""
    across: tl.constexpr = (OUTER + BO - 1) // BO
    row = tl.program_id(0) // across * BR + tl.arange(0, BR)
    column = tl.program_id(0) % across * BO + tl.arange(0, BO)
    source = source_rows(row, rows, length, kept, first)
    if CHAINED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    total = tl.zeros((BR, BO), tl.float32)
    square = tl.zeros((BR,), tl.float32)
    inner = tl.arange(0, BI)
    x_at = x + source[:, None] * INNER + inner[None, :]
    w_at = weight + _wrapped(column, OUTER, BO)[None, :] * INNER + inner[:, None]
    beside: tl.constexpr = x.dtype.element_ty != weight.dtype.element_ty
    if NORM and PARTS == 0 and not beside:
        square += squares_before(x_at, inner, INNER, BI)
    for start in range(0, INNER, BI):
        if INNER % BI == 0:
            part = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            inside = start + inner < INNER
            part = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
        if NORM and PARTS == 0 and beside:
            square += sums_of_squares(part)
        total = tl.dot(part.to(w.dtype), w, total)
    if NORM and PARTS > 0:
        square += sum_of_parts(squares, source, rows, PARTS)
    shift = _load_bias(bias, column, OUTER) if BIAS else 0.0
    base = _load_residual(residual, source, column, OUTER).to(tl.float32) if RESIDUAL else 0.0
    _finish(
        total, square, shift, base, out, measured, row, column, rows, epsilon,
        INNER, OUTER, NORM, GELU, MEASURE, BO,
    )  # fmt: skip


@triton.jit
def linear_few(
    x, weight, bias, residual, out, squares, measured, rows, length, kept, first, epsilon,
    INNER: tl.constexpr, OUTER: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr, MEASURE: tl.constexpr,
    CHAINED: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """`linear` for few rows, where latency is all: every load at once, each warp its own part of
    the sum. The weights depend on no other kernel, so they are asked for before it has ended."""
    across: tl.constexpr = (OUTER + BO - 1) // BO
    row = tl.program_id(0) // across * BR + tl.arange(0, BR)
    column = tl.program_id(0) % across * BO + tl.arange(0, BO)
    source = source_rows(row, rows, length, kept, first)
    slice_of = tl.arange(0, SPLIT)[:, None, None] * BI
    deep = slice_of + tl.arange(0, BI)[None, :, None]  # (S, I, 1)
    flat = slice_of + tl.arange(0, BI)[None, None, :]  # (S, 1, I)
    w_at = weight + _wrapped(column, OUTER, BO)[None, None, :] * INNER + deep
    x_at = x + source[None, :, None] * INNER + flat
    if CHAINED:
        cuda.gdc_launch_dependents()
    w = tl.load(w_at, mask=deep < INNER, other=0.0)
    shift = _load_bias(bias, column, OUTER) if BIAS else 0.0
    if CHAINED:
        cuda.gdc_wait()
    part = tl.load(x_at, mask=flat < INNER, other=0.0)
    base = _load_residual(residual, source, column, OUTER).to(tl.float32) if RESIDUAL else 0.0
    square = tl.zeros((BR,), tl.float32)
    if NORM and PARTS == 0:
        square += tl.sum(sums_of_squares(part), 0)
    if NORM and PARTS > 0:
        square += sum_of_parts(squares, source, rows, PARTS)
    total = tl.sum(tl.dot(part.to(w.dtype), w), 0)
    _finish(
        total, square, shift, base, out, measured, row, column, rows, epsilon,
        INNER, OUTER, NORM, GELU, MEASURE, BO,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- launch


def few_tile(rows: int, inner: int, outer: int) -> dict[str, int]:
    """Of a product with few rows: BR x BO, summed in SPLIT slices of BI."""
    split = 4 if inner >= 64 else 2
    slice_size = max(16, triton.next_power_of_2(triton.cdiv(inner, split)))
    return {"BR": 16 if rows <= 16 else 32, "BO": 16, "BI": slice_size, "SPLIT": split} | {
        "num_warps": split,
        "num_stages": 1,
    }


def linear_tile(rows: int, inner: int, outer: int) -> dict[str, int]:
    """Of a product with many rows: BR x BO in steps of BI."""
    if rows <= 1024:
        tile = {"BR": 64, "BO": 64, "BI": 64, "num_warps": 4, "num_stages": 4}
        if outer > 512:
            tile |= {"BI": 128, "num_stages": 3}
    elif outer <= 512 or (rows <= 8192 and outer <= 1024):
        tile = {"BR": 64, "BO": 128, "BI": 64, "num_warps": 4, "num_stages": 3}
    else:
        tile = {"BR": 128, "BO": 128, "BI": 64, "num_warps": 8, "num_stages": 3}
    return tile | {"BI": min(tile["BI"], sum_step(inner))}


def sum_step(inner: int) -> int:
    """A sum is taken in two steps at least: in one, Triton 3.6 reads beyond shared memory."""
    return max(16, triton.next_power_of_2(inner) // 2)


def run_linear(
    x: Rows,
    weight: Tensor,
    *,
    norm: bool = False,
    bias: Tensor | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,
    measure: bool = False,
    length: int = 1,
    keep: range = range(1),
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    first: bool = False,
) -> Rows:
    """residual + f(x W^T + b), at the kept positions of sequences of the given length.

    The weight is (O, I) with the norm's gain in it; the result (R', O) is `out`, or new in `dtype`.
    """
    outer, inner = weight.shape
    device, rows = weight.device, len(x.values) // length * len(keep)
    if out is None:
        out = torch.empty(rows, outer, dtype=dtype or limits.PRODUCTS, device=device)
    few = rows <= limits.FEW_ROWS and inner <= 1024
    tile = few_tile(rows, inner, outer) if few else linear_tile(rows, inner, outer)
    kernel: Any = linear_few if few else linear
    across = triton.cdiv(outer, tile["BO"])
    measured = torch.empty(across, rows, device=device) if measure and not few else None
    programs = triton.cdiv(rows, tile["BR"]) * across
    kernel[programs,](
        x.values,
        weight,
        weight if bias is None else bias,
        weight if residual is None else residual,
        out,
        weight if x.squares is None else x.squares,
        weight if measured is None else measured,
        rows,
        length,
        len(keep),
        keep.start,
        RMS_EPSILON,
        INNER=inner,
        OUTER=outer,
        NORM=norm,
        BIAS=bias is not None,
        GELU=gelu,
        RESIDUAL=residual is not None,
        PARTS=0 if x.squares is None else len(x.squares),
        MEASURE=measured is not None,
        **chain(weight, rows, first),
        **tile,
    )
    return Rows(out, measured)
