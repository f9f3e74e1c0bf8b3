"""Attention of short sequences in a rollout, with several whole sequences per tile: fused with norm
and projection in one kernel, or alone after a product."""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from memtrain.accel.triton.common import LOG2_E
from memtrain.accel.triton.rollout_linear import (
    LIMITS,
    Rows,
    dependent_launch,
    run_linear,
    squares_before,
    sum_of_parts,
    sum_step,
    sums_of_squares,
)
from memtrain.models.layers import RMS_EPSILON


@triton.jit
def rotate(x, c, s, R: tl.constexpr, E: tl.constexpr):
    """Rotate rows of a head, whose pairs are adjacent, by the angles of their positions."""
    left, right = tl.split(tl.reshape(x, (R, E // 2, 2)))
    return tl.reshape(tl.join(left * c - right * s, right * c + left * s), (R, E))


@triton.jit
def mix(q, k, v, local, L: tl.constexpr, CAUSAL: tl.constexpr):
    """Attention of positions to their own sequence; q carries the scale of base-2 scores."""
    seen = (local // L)[:, None] == (local // L)[None, :]
    if CAUSAL:
        seen = seen & (local[None, :] <= local[:, None])
    score = tl.where(seen, tl.dot(q, tl.trans(k)), -1e30)
    weight = tl.exp2(score - tl.max(score, 1)[:, None])
    return tl.dot(weight.to(v.dtype), v) * (1 / tl.sum(weight, 1))[:, None]


@triton.jit
def _fused_attention(
    x, weight, out, squares, cosine, sine, rows, scale, epsilon,
    INNER: tl.constexpr, H: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Norm, projection and attention of one head for GROUP whole sequences."""
    local = tl.arange(0, BR)
    row = (tl.program_id(0) // H).to(tl.int64) * (GROUP * L) + local
    there = (local < GROUP * L) & (row < rows)
    head, column = tl.program_id(0) % H, tl.arange(0, E)
    inner = tl.arange(0, BI)
    angle = (local % L)[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    source = tl.where(there, row, 0)  # the first one for padding, so that loads need no mask
    x_at = x + source[:, None] * INNER + inner[None, :]
    own = weight + head * (E * INNER) + column[None, :] * INNER + inner[:, None]
    q, k, v = (
        tl.zeros((BR, E), tl.float32),
        tl.zeros((BR, E), tl.float32),
        tl.zeros((BR, E), tl.float32),
    )
    square = tl.zeros((BR,), tl.float32)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    if BI >= INNER:  # all at once, the weights before the previous kernel ends
        inside = (inner < INNER)[:, None]
        wq = tl.load(own, mask=inside, other=0.0)
        wk = tl.load(own + H * E * INNER, mask=inside, other=0.0)
        wv = tl.load(own + 2 * H * E * INNER, mask=inside, other=0.0)
        c, s = tl.load(cosine + angle), tl.load(sine + angle)
        if DEPENDENT:
            cuda.gdc_wait()
        part = tl.load(x_at, mask=(inner < INNER)[None, :], other=0.0)
        if PARTS == 0:
            square += sums_of_squares(part)
        part = part.to(wq.dtype)
        q, k, v = tl.dot(part, wq, q), tl.dot(part, wk, k), tl.dot(part, wv, v)
    else:
        if DEPENDENT:
            cuda.gdc_wait()
        needs_cast: tl.constexpr = x.dtype.element_ty != weight.dtype.element_ty
        if PARTS == 0 and not needs_cast:
            square += squares_before(x_at, inner, INNER, BI)
        for start in range(0, INNER, BI):
            at = own + start
            if INNER % BI == 0:
                part, wq = tl.load(x_at + start), tl.load(at)
                wk, wv = tl.load(at + H * E * INNER), tl.load(at + 2 * H * E * INNER)
            else:
                inside = start + inner < INNER
                part = tl.load(x_at + start, mask=inside[None, :], other=0.0)
                wq = tl.load(at, mask=inside[:, None], other=0.0)
                wk = tl.load(at + H * E * INNER, mask=inside[:, None], other=0.0)
                wv = tl.load(at + 2 * H * E * INNER, mask=inside[:, None], other=0.0)
            if PARTS == 0 and needs_cast:
                square += sums_of_squares(part)
            part = part.to(wq.dtype)
            q, k, v = tl.dot(part, wq, q), tl.dot(part, wk, k), tl.dot(part, wv, v)
    if PARTS > 0:
        square += sum_of_parts(squares, source, rows, PARTS)
    kind = weight.dtype.element_ty
    level = tl.rsqrt(square / INNER + epsilon)[:, None]
    v = (v * level).to(kind)
    if BI < INNER:  # only now: before, they would take registers from the loop
        c, s = tl.load(cosine + angle), tl.load(sine + angle)
    q = rotate(q * (level * (scale * LOG2_E)), c, s, BR, E).to(kind)
    k = rotate(k * level, c, s, BR, E).to(kind)
    mixed = mix(q, k, v, local, L, CAUSAL)
    at = out + row[:, None] * (H * E) + head * E + column[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def _plain_attention(
    qkv, out, squares, cosine, sine, rows, scale, epsilon,
    INNER: tl.constexpr, H: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Attention of one head for GROUP whole sequences whose projections are in qkv. If PARTS > 0,
    they still have to be scaled by the norm of their inputs."""
    local = tl.arange(0, BR)
    row = (tl.program_id(0) // H).to(tl.int64) * (GROUP * L) + local
    there = ((local < GROUP * L) & (row < rows))[:, None]
    head, column = tl.program_id(0) % H, tl.arange(0, E)
    at = qkv + row[:, None] * (3 * H * E) + head * E + column[None, :]
    angle = (local % L)[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    c, s = tl.load(cosine + angle), tl.load(sine + angle)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    q = tl.load(at, mask=there, other=0.0).to(tl.float32) * (scale * LOG2_E)
    k = tl.load(at + H * E, mask=there, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * H * E, mask=there, other=0.0)
    if PARTS > 0:
        square = sum_of_parts(squares, tl.where(row < rows, row, 0), rows, PARTS)
        level = tl.rsqrt(square / INNER + epsilon)[:, None]
        q, k, v = q * level, k * level, (v * level).to(v.dtype)
    q = rotate(q, c, s, BR, E).to(v.dtype)
    k = rotate(k, c, s, BR, E).to(v.dtype)
    mixed = mix(q, k, v, local, L, CAUSAL)
    at = out + row[:, None] * (H * E) + head * E + column[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=there)


def fused_tile(rows: int, length: int, inner: int, head_dim: int) -> dict[str, int]:
    """The tile of fused projection and attention: BR rows of whole sequences, in steps of BI.

    At width 256 a sum in one step is for heads of 64 only: with heads of 32 it accessed memory out
    of bounds on an H200 (Triton 3.6).
    """
    whole = max(16, triton.next_power_of_2(inner))
    one_step = whole <= 128 or (whole == 256 and head_dim == 64)
    if rows <= LIMITS.few_rows and one_step:
        size = _tile_rows(rows, length, 32)
        warps = 8 if size == 16 else 4
        return {"BR": size, "BI": whole, "num_warps": warps, "num_stages": 1}
    if rows <= 1024 and inner == 256 and one_step and length <= 64:
        size = _tile_rows(rows, length, 64)
        return {"BR": size, "BI": inner, "num_warps": 4, "num_stages": 1}
    return {
        "BR": _tile_rows(rows, length, 64),
        "BI": min(64, sum_step(inner)),
        "num_warps": 4 if length <= 64 else 8,
        "num_stages": 3 if length <= 16 else 2,
    }


def attention_tile(rows: int, length: int) -> dict[str, int]:
    """The tile of attention alone: BR rows of whole sequences."""
    size = _tile_rows(rows, length, 64)
    return {"BR": size, "num_warps": 2 if size < 64 else 4 if size == 64 else 8}


def _tile_rows(rows: int, length: int, most: int) -> int:
    """The power of two that holds one sequence, or all of them up to `most` rows."""
    return max(16, triton.next_power_of_2(length), min(most, triton.next_power_of_2(rows)))


@cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Whether `_fused_attention` has enough shared memory, as on data-centre GPUs."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 2**17


def run_rollout_attention(
    x: Rows,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    length: int,
    causal: bool,
    *,
    first: bool = False,
) -> Rows:
    """Attention of norm(x) within each of R / length sequences, (R, I) -> (R, H·E).

    The weight, (3·H·E, I), is multiplied by the norm's gain, with adjacent rotary pairs.
    """
    rows, inner = x.values.shape
    head_dim = len(weight) // 3 // heads
    scale = 1 / math.sqrt(head_dim)
    out = torch.empty(rows, heads * head_dim, dtype=LIMITS.precision, device=weight.device)
    tile = fused_tile(rows, length, inner, head_dim)
    fused = rows <= LIMITS.fused_rows or tile["BR"] % length == 0
    fused = fused and (not weight.is_cuda or _has_large_shared_memory(weight.device))
    if not fused:
        tile = attention_tile(rows, length)
    group = tile["BR"] // length
    kernel: Any = _fused_attention if fused else _plain_attention
    source, squares = x.values, x.squares
    if not fused and (squares is None or rows <= LIMITS.plain_rows):
        source, squares = run_linear(x, weight, norm=True, first=first).values, None
    elif not fused:  # the kernel applies the norm's scale
        source = F.linear(x.values, weight)
    kernel[triton.cdiv(rows // length, group) * heads,](
        source,
        *([weight] if fused else []),
        out, weight if squares is None else squares, cosine, sine, rows, scale, RMS_EPSILON,
        INNER=inner, H=heads, L=length, E=head_dim, GROUP=group, CAUSAL=causal,
        PARTS=0 if squares is None else len(squares),
        **dependent_launch(weight, rows, first and fused), **tile,
    )  # fmt: skip
    return Rows(out)
