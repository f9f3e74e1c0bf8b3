"""Matrix products of a rollout, with norm, bias, GELU and residual fused into them; and the row
counts at which a rollout changes kernels.

Products are computed in the weights' precision and summed in fp32. A norm's gain is part of the
weights (see `InferenceStack`), so that a product reads its rows as they are and scales the result.
The scale needs the rows' sums of squares: the kernel computes them on the way (PARTS 0), or reads
partial sums, (PARTS, R), one for each block of columns, written by the kernel that made the rows
(MEASURE). With many rows the latter is faster, because it saves registers.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from memtrain.accel.triton.common import gelu
from memtrain.models.layers import RMS_EPSILON


@dataclass
class Limits:
    """Row counts at which a rollout changes kernels, and the precision of all of them."""

    precision: torch.dtype = torch.bfloat16
    """Of products and of the activations between them."""
    max_length: int = 128
    """Positions of a sequence that one tile of attention holds."""
    few_rows: int = 64
    """Up to here latency dominates: tiles span the whole sum, in slices that run in parallel."""
    wide_rows: int = 4096
    """Up to here the first block reads fp32: a cast would be one more kernel."""
    fused_rows: int = 1024
    """Up to here projection and attention are one kernel; above, only if sequences fill its
    tile."""
    plain_rows: int = 2**13
    """Up to here a separate projection is `run_linear`; above, torch's."""
    dependent_rows: int = 64
    """Up to here a kernel is launched before the previous one ends (0: never). With more rows,
    waiting programs would take the place of working ones."""
    large_batch_rows: int = 2**14
    """From here on a block is the two kernels of `large_batch`, for sizes that they support."""
    chunk_rows: int = 36_864
    """More rows are processed in chunks of whole sequences."""


LIMITS = Limits()


def dependent_launch(weight: Tensor, rows: int, first: bool = False) -> dict[str, bool]:
    """Options of programmatic dependent launch: the kernel starts early, loads its weights, and
    then waits for the previous kernel.

    The first kernel is launched after all previous ones have ended, since these may have written
    its weights; it only lets the next one start early.
    """
    if rows > LIMITS.dependent_rows or not weight.is_cuda or not _can_overlap(weight.device):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": not first}


@cache
def _can_overlap(device: torch.device) -> bool:
    """Whether the device supports dependent launch: Hopper was the first."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


# ------------------------------------------------------------------------------------------ rows


class Rows(NamedTuple):
    """Rows (R, I) and partial sums of their squares, (P, R), if the kernel that made them wrote
    them."""

    values: Tensor
    squares: Tensor | None = None

    def split(self, size: int) -> list["Rows"]:
        """Split into pieces of `size` rows with their squares, which must be in one part."""
        values = self.values.split(size)
        if self.squares is None:
            return [Rows(piece) for piece in values]
        return [Rows(*both) for both in zip(values, self.squares.split(size, dim=1), strict=True)]


@triton.jit
def source_rows(row, rows, length, kept, first):
    """Where kept rows are among all; for padding the first one, so that loads need no mask."""
    row = tl.where(row < rows, row, 0)
    return ((row // kept) * length + first + row % kept).to(tl.int64)


@triton.jit
def sums_of_squares(part):
    """Sums of squares along the last dimension."""
    wide = part.to(tl.float32)
    return tl.sum(wide * wide, len(part.shape) - 1)


@triton.jit
def squares_before(x_at, inner, INNER: tl.constexpr, BI: tl.constexpr):
    """The rows' sums of squares, in a separate loop.

    For rows that need no cast before the product. If a loop uses a load both for a product and
    otherwise, Triton 3.6 allocates one buffer too few and overwrites it while the product runs.
    """
    first = tl.load(x_at, mask=(inner < INNER)[None, :], other=0.0)
    total = sums_of_squares(first)
    for start in range(BI, INNER, BI):
        inside = (start + inner < INNER)[None, :]
        total += sums_of_squares(tl.load(x_at + start, mask=inside, other=0.0))
    return total


@triton.jit
def sum_of_parts(squares, row, rows, PARTS: tl.constexpr):
    """The rows' sums of squares, from the partial sums of the kernel that made them."""
    total = tl.load(squares + row)
    for part in tl.static_range(1, PARTS):
        total += tl.load(squares + part * rows + row)
    return total


# -------------------------------------------------------------------------------------- products


@triton.jit
def _load_bias(bias, column, OUTER: tl.constexpr):
    return tl.load(bias + column, mask=column < OUTER, other=0.0)[None, :]


@triton.jit
def _load_residual(residual, source, column, OUTER: tl.constexpr):
    at = residual + source[:, None] * OUTER + column[None, :]
    return tl.load(at, mask=(column < OUTER)[None, :], other=0.0)


@triton.jit
def _epilogue(
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
    """Let columns beyond the last one read others, so that loads need no mask."""
    if OUTER % BO == 0:
        return column
    else:
        return column % OUTER


@triton.jit
def _linear(
    x, weight, bias, residual, out, squares, measured, rows, length, kept, first, epsilon,
    INNER: tl.constexpr, OUTER: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr, MEASURE: tl.constexpr,
    DEPENDENT: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """residual + GELU(norm(x) W^T + b), or parts of it, at the kept positions of each sequence."""
    across: tl.constexpr = (OUTER + BO - 1) // BO
    row = tl.program_id(0) // across * BR + tl.arange(0, BR)
    column = tl.program_id(0) % across * BO + tl.arange(0, BO)
    source = source_rows(row, rows, length, kept, first)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    total = tl.zeros((BR, BO), tl.float32)
    square = tl.zeros((BR,), tl.float32)
    inner = tl.arange(0, BI)
    x_at = x + source[:, None] * INNER + inner[None, :]
    w_at = weight + _wrapped(column, OUTER, BO)[None, :] * INNER + inner[:, None]
    needs_cast: tl.constexpr = x.dtype.element_ty != weight.dtype.element_ty
    if NORM and PARTS == 0 and not needs_cast:
        square += squares_before(x_at, inner, INNER, BI)
    for start in range(0, INNER, BI):
        if INNER % BI == 0:
            part = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            inside = start + inner < INNER
            part = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
        if NORM and PARTS == 0 and needs_cast:
            square += sums_of_squares(part)
        total = tl.dot(part.to(w.dtype), w, total)
    if NORM and PARTS > 0:
        square += sum_of_parts(squares, source, rows, PARTS)
    shift = _load_bias(bias, column, OUTER) if BIAS else 0.0
    base = _load_residual(residual, source, column, OUTER).to(tl.float32) if RESIDUAL else 0.0
    _epilogue(
        total, square, shift, base, out, measured, row, column, rows, epsilon,
        INNER, OUTER, NORM, GELU, MEASURE, BO,
    )  # fmt: skip


@triton.jit
def _linear_few(
    x, weight, bias, residual, out, squares, measured, rows, length, kept, first, epsilon,
    INNER: tl.constexpr, OUTER: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr, MEASURE: tl.constexpr,
    DEPENDENT: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """`_linear` for few rows, limited by latency: all loads at once, and each warp has its own part
    of the sum. The weights are loaded before the previous kernel ends, as they do not depend on
    it."""
    across: tl.constexpr = (OUTER + BO - 1) // BO
    row = tl.program_id(0) // across * BR + tl.arange(0, BR)
    column = tl.program_id(0) % across * BO + tl.arange(0, BO)
    source = source_rows(row, rows, length, kept, first)
    slice_of = tl.arange(0, SPLIT)[:, None, None] * BI
    deep = slice_of + tl.arange(0, BI)[None, :, None]  # (S, I, 1)
    flat = slice_of + tl.arange(0, BI)[None, None, :]  # (S, 1, I)
    w_at = weight + _wrapped(column, OUTER, BO)[None, None, :] * INNER + deep
    x_at = x + source[None, :, None] * INNER + flat
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    w = tl.load(w_at, mask=deep < INNER, other=0.0)
    shift = _load_bias(bias, column, OUTER) if BIAS else 0.0
    if DEPENDENT:
        cuda.gdc_wait()
    part = tl.load(x_at, mask=flat < INNER, other=0.0)
    base = _load_residual(residual, source, column, OUTER).to(tl.float32) if RESIDUAL else 0.0
    square = tl.zeros((BR,), tl.float32)
    if NORM and PARTS == 0:
        square += tl.sum(sums_of_squares(part), 0)
    if NORM and PARTS > 0:
        square += sum_of_parts(squares, source, rows, PARTS)
    total = tl.sum(tl.dot(part.to(w.dtype), w), 0)
    _epilogue(
        total, square, shift, base, out, measured, row, column, rows, epsilon,
        INNER, OUTER, NORM, GELU, MEASURE, BO,
    )  # fmt: skip


def few_rows_tile(rows: int, inner: int) -> dict[str, int]:
    """The tile of a product with few rows: BR x BO, summed in SPLIT slices of BI."""
    split = 4 if inner >= 64 else 2
    slice_size = max(16, triton.next_power_of_2(triton.cdiv(inner, split)))
    tile = {"BR": 16 if rows <= 16 else 32, "BO": 16, "BI": slice_size, "SPLIT": split}
    return tile | {"num_warps": split, "num_stages": 1}


def linear_tile(rows: int, inner: int, outer: int) -> dict[str, int]:
    """The tile of a product with many rows: BR x BO, summed in steps of BI."""
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
    """The step of a sum, of which there are at least two: with one, Triton 3.6 reads beyond shared
    memory."""
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
    """residual + GELU(norm(x) W^T + b), or parts of it, at kept positions.

    Args:
        x: The rows of sequences of equal `length`, (R, I).
        weight: (O, I), multiplied by the norm's gain.
        measure: Return the sums of squares of the result's rows too, if there are many.
        keep: The positions of each sequence to compute.
        dtype: The precision of the result, (R', O), if `out` is not given.
        first: Whether the previous kernel may have written the weights (see `dependent_launch`).
    """
    outer, inner = weight.shape
    device, rows = weight.device, len(x.values) // length * len(keep)
    if out is None:
        out = torch.empty(rows, outer, dtype=dtype or LIMITS.precision, device=device)
    few = rows <= LIMITS.few_rows and inner <= 1024
    tile = few_rows_tile(rows, inner) if few else linear_tile(rows, inner, outer)
    kernel: Any = _linear_few if few else _linear
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
        rows, length, len(keep), keep.start, RMS_EPSILON,
        INNER=inner, OUTER=outer, NORM=norm, BIAS=bias is not None, GELU=gelu,
        RESIDUAL=residual is not None, PARTS=0 if x.squares is None else len(x.squares),
        MEASURE=measured is not None, **dependent_launch(weight, rows, first), **tile,
    )  # fmt: skip
    return Rows(out, measured)
