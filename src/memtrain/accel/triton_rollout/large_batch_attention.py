"""Norm, projection and attention where so many rows pass that the second cache sets the pace.

Tiles of a product read every row and every weight many times over. Here queries, keys and values
never leave the processor that made them: it keeps a head's weights in shared memory while the rows
pass by. `hopper.attend` does the same at the paper's size.

Offsets are 32 bits: `InferenceStack` brings rows in chunks.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.accel import hopper
from memtrain.accel.triton.common import HIDE, LOG2_E
from memtrain.accel.triton.launch import processors
from memtrain.accel.triton_rollout.mixing import mix, turn
from memtrain.accel.triton_rollout.rows import sum_of_parts, sums_of_squares
from memtrain.models.layers import RMS_EPSILON

LEAST_FILLED = 0.75
"""Share of a tile that sequences must take."""


@triton.jit
def _half_of(x, row, rows, HALF: tl.constexpr, SIZE: tl.constexpr):
    """One half of each row, SIZE long; where no row is, of the first: no mask."""
    source = tl.where(row < rows, row, 0)
    column = HALF * SIZE + tl.arange(0, SIZE)
    return tl.load(x + source[:, None] * (2 * SIZE) + column[None, :])


@triton.jit
def _numbers(part, kind: tl.constexpr, PAIRS: tl.constexpr):
    """What `_half_of` has loaded, as numbers to multiply; PAIRS: they are two in a word."""
    if PAIRS:
        left = (part & 0xFFFF).to(tl.int16).to(kind, bitcast=True)
        right = (part >> 16).to(tl.int16).to(kind, bitcast=True)
        numbers = tl.reshape(tl.join(left, right), (part.shape[0], 2 * part.shape[1]))
    else:
        numbers = part.to(kind)
    return numbers


@triton.jit(do_not_specialize=["step", "turns"])
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
    step,
    turns,
    INNER: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BR: tl.constexpr,
    TURNS: tl.constexpr,
):
    """`attend.attend` of one head, for every `step`-th tile of GROUP whole sequences.

    Rows come in halves, as two need less shared memory one after the other, and in words of two
    numbers (PAIRS): in registers a number of 16 bits takes 32.
    """
    head, first = tl.program_id(0) % H, tl.program_id(0) // H
    local, column = tl.arange(0, BR), tl.arange(0, E)
    kind: tl.constexpr = weight.dtype
    HALF: tl.constexpr = INNER // 2
    SIZE: tl.constexpr = HALF // 2 if PAIRS else HALF
    key, value = (H + head) * E, (2 * H + head) * E
    wq0, wq1 = weight.load([head * E, 0]), weight.load([head * E, HALF])
    wk0, wk1 = weight.load([key, 0]), weight.load([key, HALF])
    wv0, wv1 = weight.load([value, 0]), weight.load([value, HALF])
    angle = (local % L)[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    row = first * (GROUP * L) + local
    part0, part1 = _half_of(x, row, rows, 0, SIZE), _half_of(x, row, rows, 1, SIZE)
    for _ in range(turns if HIDE else TURNS):
        c, s = tl.load(cosine + angle), tl.load(sine + angle)
        if PARTS > 0:
            square = sum_of_parts(squares, tl.where(row < rows, row, 0), rows, PARTS)
        x0 = _numbers(part0, kind, PAIRS)
        k = tl.dot(x0, wk0.T)
        x1 = _numbers(part1, kind, PAIRS)
        k = tl.dot(x1, wk1.T, k)
        if PARTS == 0:
            square = sums_of_squares(x0) + sums_of_squares(x1)
        level = tl.rsqrt(square / INNER + epsilon)[:, None]
        # One after the other: each leaves the registers as 16 bits before the next.
        k = turn(k * level, c, s, BR, E).to(kind)
        q = tl.dot(x1, wq1.T, tl.dot(x0, wq0.T)) * (level * (scale * LOG2_E))
        q = turn(q, c, s, BR, E).to(kind)
        v = (tl.dot(x1, wv1.T, tl.dot(x0, wv0.T)) * level).to(kind)
        # The next rows are under way in registers while these are mixed.
        following = row + step * (GROUP * L)
        part0 = _half_of(x, following, rows, 0, SIZE)
        part1 = _half_of(x, following, rows, 1, SIZE)
        mixed = mix(q, k, v, local, L, CAUSAL)
        there = (local < GROUP * L) & (row < rows)
        at = out + row[:, None] * (H * E) + head * E + column[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=there[:, None])
        row = following


# ---------------------------------------------------------------------------------------- launch


def attend_tile(length: int) -> dict[str, int]:
    """BR rows of whole sequences, and how many programs of them a processor holds.

    Of two, one multiplies while the other takes exponentials.
    """
    if _fill(64, length) >= LEAST_FILLED:
        return {"BR": 64, "per_processor": 2, "num_warps": 4, "num_stages": 1}
    return {"BR": 128, "per_processor": 1, "num_warps": 8, "num_stages": 1}


def _fill(size: int, length: int) -> float:
    """The share of a tile that whole sequences take."""
    return size // length * length / size


def fits(length: int, width: int, head_dim: int) -> bool:
    """Whether such a head can be held, and whether sequences fill their tile well enough."""
    filled = _fill(attend_tile(length)["BR"], length) >= LEAST_FILLED
    return filled and width in (64, 128, 256) and head_dim in (32, 64)


def on_hopper(x: Tensor, head_dim: int, length: int) -> bool:
    """Whether `hopper.attend` serves: it is written for the paper's size and tiles of 64 rows."""
    sizes = x.shape[1], head_dim, attend_tile(length)["BR"]
    return sizes == (256, 64, 64) and hopper.serves(x)


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
    """`attend.run_attend`: rows (R, I) and parts of their squares to (R, H·E)."""
    rows, inner = x.shape
    head_dim = len(weight) // 3 // heads
    if on_hopper(x, head_dim, length):
        import memtrain.accel.hopper.rollout_attention as hopper_attend

        return hopper_attend.run_attend(x, squares, weight, cosine, sine, heads, length, causal)
    out = torch.empty(rows, heads * head_dim, dtype=weight.dtype, device=weight.device)
    tile = attend_tile(length)
    programs = tile.pop("per_processor") * processors(x.device)
    group = tile["BR"] // length
    tiles = triton.cdiv(rows // length, group)
    step = min(tiles, max(1, programs // heads))
    turns = triton.cdiv(tiles, step)
    pairs = x.element_size() == 2
    kernel: Any = _attend
    kernel[step * heads,](
        x.view(torch.int32) if pairs else x,
        TensorDescriptor.from_tensor(weight, [head_dim, inner // 2]),
        out,
        x if squares is None else squares,
        cosine,
        sine,
        rows,
        1 / math.sqrt(head_dim),
        RMS_EPSILON,
        step,
        turns,
        INNER=inner,
        H=heads,
        L=length,
        E=head_dim,
        GROUP=group,
        CAUSAL=causal,
        PARTS=0 if squares is None else len(squares),
        PAIRS=pairs,
        TURNS=0 if HIDE.value else turns,
        **tile,
    )
    return out
