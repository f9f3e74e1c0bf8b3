"""Norm, projection and attention of short sequences, whole ones of which share a tile: all in one
kernel, or attention alone behind a product."""

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
from memtrain.accel.triton_rollout import limits
from memtrain.accel.triton_rollout.dependent_launch import chain
from memtrain.accel.triton_rollout.linear import run_linear, sum_step
from memtrain.accel.triton_rollout.mixing import mix, turn
from memtrain.accel.triton_rollout.rows import Rows, squares_before, sum_of_parts, sums_of_squares
from memtrain.models.layers import RMS_EPSILON


@triton.jit
def attend(
    x,
    weight,
    out,
    squares,
    cosine,
    sine,
    rows,
    scale,
    epsilon,
    INNER: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
):
    """Norm, projection and attention of one head for GROUP whole sequences."""
    local = tl.arange(0, BR)
    row = (tl.program_id(0) // H).to(tl.int64) * (GROUP * L) + local
    there = (local < GROUP * L) & (row < rows)
    head, column = tl.program_id(0) % H, tl.arange(0, E)
    inner = tl.arange(0, BI)
    angle = (local % L)[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    source = tl.where(there, row, 0)  # where no row is, the first: no mask
    x_at = x + source[:, None] * INNER + inner[None, :]
    own = weight + head * (E * INNER) + column[None, :] * INNER + inner[:, None]
    q, k, v = (
        tl.zeros((BR, E), tl.float32),
        tl.zeros((BR, E), tl.float32),
        tl.zeros((BR, E), tl.float32),
    )
    square = tl.zeros((BR,), tl.float32)
    if CHAINED:
        cuda.gdc_launch_dependents()
    if BI >= INNER:  # everything at once; the weights before the kernel in front has ended
        inside = (inner < INNER)[:, None]
        wq = tl.load(own, mask=inside, other=0.0)
        wk = tl.load(own + H * E * INNER, mask=inside, other=0.0)
        wv = tl.load(own + 2 * H * E * INNER, mask=inside, other=0.0)
        c, s = tl.load(cosine + angle), tl.load(sine + angle)
        if CHAINED:
            cuda.gdc_wait()
        part = tl.load(x_at, mask=(inner < INNER)[None, :], other=0.0)
        if PARTS == 0:
            square += sums_of_squares(part)
        part = part.to(wq.dtype)
        q, k, v = tl.dot(part, wq, q), tl.dot(part, wk, k), tl.dot(part, wv, v)
    else:
        if CHAINED:
            cuda.gdc_wait()
        beside: tl.constexpr = x.dtype.element_ty != weight.dtype.element_ty
        if PARTS == 0 and not beside:
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
            if PARTS == 0 and beside:
                square += sums_of_squares(part)
            part = part.to(wq.dtype)
            q, k, v = tl.dot(part, wq, q), tl.dot(part, wk, k), tl.dot(part, wv, v)
    if PARTS > 0:
        square += sum_of_parts(squares, source, rows, PARTS)
    kind = weight.dtype.element_ty
    level = tl.rsqrt(square / INNER + epsilon)[:, None]
    v = (v * level).to(kind)
    if BI < INNER:  # not before: they would take registers from the loop
        c, s = tl.load(cosine + angle), tl.load(sine + angle)
    q = turn(q * (level * (scale * LOG2_E)), c, s, BR, E).to(kind)
    k = turn(k * level, c, s, BR, E).to(kind)
    mixed = mix(q, k, v, local, L, CAUSAL)
    at = out + row[:, None] * (H * E) + head * E + column[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def group_attention(
    qkv,
    out,
    squares,
    cosine,
    sine,
    rows,
    scale,
    epsilon,
    INNER: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
    BR: tl.constexpr,
):
    """One head of GROUP whole sequences whose projections lie in qkv, still to be normed if there
    are parts of squares of what was projected."""
    local = tl.arange(0, BR)
    row = (tl.program_id(0) // H).to(tl.int64) * (GROUP * L) + local
    there = ((local < GROUP * L) & (row < rows))[:, None]
    head, column = tl.program_id(0) % H, tl.arange(0, E)
    at = qkv + row[:, None] * (3 * H * E) + head * E + column[None, :]
    angle = (local % L)[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    c, s = tl.load(cosine + angle), tl.load(sine + angle)
    if CHAINED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    q = tl.load(at, mask=there, other=0.0).to(tl.float32) * (scale * LOG2_E)
    k = tl.load(at + H * E, mask=there, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * H * E, mask=there, other=0.0)
    if PARTS > 0:
        square = sum_of_parts(squares, tl.where(row < rows, row, 0), rows, PARTS)
        level = tl.rsqrt(square / INNER + epsilon)[:, None]
        q, k, v = q * level, k * level, (v * level).to(v.dtype)
    q = turn(q, c, s, BR, E).to(v.dtype)
    k = turn(k, c, s, BR, E).to(v.dtype)
    mixed = mix(q, k, v, local, L, CAUSAL)
    at = out + row[:, None] * (H * E) + head * E + column[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=there)


# ---------------------------------------------------------------------------------------- launch


def attend_tile(rows: int, length: int, inner: int) -> dict[str, int]:
    """Of projection and attention in one: BR rows of whole sequences, in steps of BI."""
    whole = max(16, triton.next_power_of_2(inner))
    if rows <= limits.FEW_ROWS and whole <= 256:
        size = _tile_rows(rows, length, 32)
        warps = 8 if size == 16 else 4
        return {"BR": size, "BI": whole, "num_warps": warps, "num_stages": 1}
    if rows <= 1024 and inner == 256 and length <= 64:
        size = _tile_rows(rows, length, 64)
        return {"BR": size, "BI": inner, "num_warps": 4, "num_stages": 1}
    return {
        "BR": _tile_rows(rows, length, 64),
        "BI": min(64, sum_step(inner)),
        "num_warps": 4 if length <= 64 else 8,
        "num_stages": 3 if length <= 16 else 2,
    }


def attention_tile(rows: int, length: int) -> dict[str, int]:
    """Of attention alone: BR rows of whole sequences."""
    size = _tile_rows(rows, length, 64)
    return {"BR": size, "num_warps": 2 if size < 64 else 4 if size == 64 else 8}


def _tile_rows(rows: int, length: int, wanted: int) -> int:
    """The power of two that holds one sequence, or as many as there are up to `wanted` rows."""
    return max(16, triton.next_power_of_2(length), min(wanted, triton.next_power_of_2(rows)))


@cache
def _is_roomy(device: torch.device) -> bool:
    """Whether the shared memory of a data centre's device is there, which `attend` needs."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 2**17


def run_attend(
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
    """Attention of norm(x) inside each of R / length sequences, (R, I) -> (R, H·E).

    The weight (3·H·E, I) carries the norm's gain, and its heads' pairs stand side by side.
    """
    rows, inner = x.values.shape
    head_dim = len(weight) // 3 // heads
    scale = 1 / math.sqrt(head_dim)
    out = torch.empty(rows, heads * head_dim, dtype=limits.PRODUCTS, device=weight.device)
    fused = rows <= limits.FUSED_ROWS or attend_tile(rows, length, inner)["BR"] % length == 0
    fused = fused and (not weight.is_cuda or _is_roomy(weight.device))
    tile = attend_tile(rows, length, inner) if fused else attention_tile(rows, length)
    group = tile["BR"] // length
    kernel: Any = attend if fused else group_attention
    source, squares = x.values, x.squares
    if not fused and (squares is None or rows <= limits.PLAIN_ROWS):
        source, squares = run_linear(x, weight, norm=True, first=first).values, None
    elif not fused:  # the norm's scale is left to the kernel
        source = F.linear(x.values, weight)
    kernel[triton.cdiv(rows // length, group) * heads,](
        source,
        *([weight] if fused else []),
        out,
        weight if squares is None else squares,
        cosine,
        sine,
        rows,
        scale,
        RMS_EPSILON,
        INNER=inner,
        H=heads,
        L=length,
        E=head_dim,
        GROUP=group,
        CAUSAL=causal,
        PARTS=0 if squares is None else len(squares),
        **chain(weight, rows, first and fused),
        **tile,
    )
    return Rows(out)
