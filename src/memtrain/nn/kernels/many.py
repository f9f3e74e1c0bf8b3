"""A block without autograd in two kernels, for so many rows that the second cache sets the pace.

Tiles of a product read every row and every weight many times over. Here queries, keys, values and
the hidden layer never leave the processor that made them. `attend` keeps a head's weights in shared
memory while the rows pass by; `finish`, everything after, keeps rows while the weights pass by.
Both stand once more in `hopper`, for the paper's size (see `on_hopper`).

Offsets are 32 bits: `InferenceStack` brings rows in chunks.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.nn.blocks import RMS_EPSILON
from memtrain.nn.kernels import hopper
from memtrain.nn.kernels.functions import HIDE, LOG2_E, gelu
from memtrain.nn.kernels.mlp import processors
from memtrain.nn.kernels.products import _mix, _source, _squares, _sum_of_parts, _turn

ROWS = 128
"""Of a tile of `finish`. With fewer, weights are read more often than the second cache can give."""

LEAST_FILLED = 0.75
"""Share of a tile of `attend` that sequences must take."""


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
    """`products.attend` of one head, for every `step`-th tile of GROUP whole sequences.

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
            square = _sum_of_parts(squares, tl.where(row < rows, row, 0), rows, PARTS)
        x0 = _numbers(part0, kind, PAIRS)
        k = tl.dot(x0, wk0.T)
        x1 = _numbers(part1, kind, PAIRS)
        k = tl.dot(x1, wk1.T, k)
        if PARTS == 0:
            square = _squares(x0) + _squares(x1)
        level = tl.rsqrt(square / INNER + epsilon)[:, None]
        # One after the other: each leaves the registers as 16 bits before the next.
        k = _turn(k * level, c, s, BR, E).to(kind)
        q = tl.dot(x1, wq1.T, tl.dot(x0, wq0.T)) * (level * (scale * LOG2_E))
        q = _turn(q, c, s, BR, E).to(kind)
        v = (tl.dot(x1, wv1.T, tl.dot(x0, wv0.T)) * level).to(kind)
        # The next rows are under way in registers while these are mixed.
        following = row + step * (GROUP * L)
        part0 = _half_of(x, following, rows, 0, SIZE)
        part1 = _half_of(x, following, rows, 1, SIZE)
        mixed = _mix(q, k, v, local, L, CAUSAL)
        there = (local < GROUP * L) & (row < rows)
        at = out + row[:, None] * (H * E) + head * E + column[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=there[:, None])
        row = following


@triton.jit
def _finish(
    mixed,
    project,
    stream,
    rise,
    rise_bias,
    fall,
    fall_bias,
    between,
    out,
    measured,
    rows,
    length,
    kept,
    first,
    epsilon,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of rows from the heads' results to the end of the block, and its sums of squares."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column, hidden = tl.arange(0, WIDTH), tl.arange(0, BH)
    source = _source(row, rows, length, kept, first).to(tl.int32)
    total = tl.zeros((BR, WIDTH), tl.float32)
    at = mixed + source[:, None] * INNER + tl.arange(0, BI)[None, :]
    for start in tl.range(0, INNER, BI, num_stages=STAGES):
        total = tl.dot(tl.load(at + start), project.load([0, start]).T, total)
    total += tl.load(stream + source[:, None] * WIDTH + column[None, :]).to(tl.float32)
    level = tl.rsqrt(tl.sum(total * total, 1) / WIDTH + epsilon)[:, None]
    # Triton would keep these rows in registers, which the sums need: only what was loaded is put
    # into shared memory.
    at = between + row[:, None] * WIDTH + column[None, :]
    tl.store(at, (total * level).to(rise.dtype))
    total += tl.load(fall_bias + column)[None, :]
    tl.debug_barrier()
    held = tl.load(at)
    for start in range(0, HIDDEN, BH):
        shift = tl.load(rise_bias + start + hidden)[None, :]
        h = tl.dot(held, rise.load([start, 0]).T)
        # Not a turn later, beside the next product: Triton 3.6 overwrites what this one reads.
        total = tl.dot(gelu(h + shift).to(fall.dtype), fall.load([0, start]).T, total)
    there = row < rows
    at = out + row[:, None] * WIDTH + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there[:, None])
    tl.store(measured + row, tl.sum(total * total, 1), mask=there)


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


def finish_tile(inner: int, hidden: int) -> dict[str, int]:
    """BR rows; sums are taken in steps of BI and BH, of which there are two at least: Triton 3.6
    reads beyond shared memory in one."""
    return {
        "BR": ROWS,
        "BI": min(64, inner // 2),
        "BH": min(64, hidden // 2),
        "STAGES": 4,
        "num_warps": 8,
        "num_stages": 2,
    }


def fits(length: int, width: int, inner: int, head_dim: int, hidden: int) -> bool:
    """Whether such a block can be held, and whether sequences fill their tile well enough."""
    return (
        _fill(attend_tile(length)["BR"], length) >= LEAST_FILLED
        and width in (64, 128, 256)
        and head_dim in (32, 64)
        and inner % 64 == 0
        and hidden % 64 == 0
    )


def whole_rounds(sequences: int, kept: int, device: torch.device) -> int:
    """Of sequences with so many rows each, those whose tiles keep all processors busy.

    Every tile takes as long as a round of them: a few tiles more are left to smaller kernels.
    """
    there = processors(device)
    tiles = triton.cdiv(sequences * kept, ROWS)
    rest = tiles % there
    if 2 * rest > there:
        return sequences
    return min(sequences, (tiles - rest) * ROWS // kept)


def on_hopper(x: Tensor, head_dim: int) -> bool:
    """Whether the kernels in `hopper` may serve for such rows: they are written for the paper's
    size, and in a language of this Triton."""
    return (x.shape[1], head_dim) == (256, 64) and hopper.serves(x)


def attends_on_hopper(x: Tensor, head_dim: int, length: int) -> bool:
    """Whether `hopper.attend` serves: its tiles are of 64 rows."""
    return on_hopper(x, head_dim) and attend_tile(length)["BR"] == 64


def finishes_on_hopper(stream: Tensor, weights: tuple[Tensor, ...], length: int, kept: int) -> bool:
    """Whether `hopper.finish` serves, and then for all rows."""
    project, rise, _ = weights
    sizes = project.shape[1], len(rise)
    return (
        on_hopper(stream, 64)
        and sizes == (512, 1024)
        and (kept == length or kept % 8 == 0)  # rows are fetched in pieces of 8 at least
        and len(stream) // length * kept >= 2**13  # tiles for half of the multiprocessors
    )


def attend(
    x: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    length: int,
    causal: bool,
) -> Tensor:
    """`inference.attend`: rows (R, I) and parts of their squares to (R, H·E)."""
    rows, inner = x.shape
    head_dim = len(weight) // 3 // heads
    if attends_on_hopper(x, head_dim, length):
        from memtrain.nn.kernels.hopper.attend import run_attend

        return run_attend(x, squares, weight, cosine, sine, heads, length, causal)
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


def finish(
    mixed: Tensor,
    stream: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    out: Tensor,
    measured: Tensor,
    length: int,
    keep: range,
) -> None:
    """From the heads' results (R, H·E) and the stream (R, W) to the block's stream at the kept
    positions, written to `out` (R', W), and its sums of squares, to `measured` (R').

    Weights are those of the projection, the MLP's first and its second; biases the MLP's.
    """
    project, rise, fall = weights
    width, inner = project.shape
    rows, hidden = len(out), len(rise)
    tile = finish_tile(inner, hidden)
    tiles = triton.cdiv(rows, tile["BR"])
    kernel: Any = _finish
    kernel[tiles,](
        mixed,
        TensorDescriptor.from_tensor(project, [width, tile["BI"]]),
        stream,
        TensorDescriptor.from_tensor(rise, [tile["BH"], width]),
        biases[0],
        TensorDescriptor.from_tensor(fall, [width, tile["BH"]]),
        biases[1],
        torch.empty(tiles * tile["BR"], width, dtype=rise.dtype, device=out.device),
        out,
        measured,
        rows,
        length,
        len(keep),
        keep.start,
        RMS_EPSILON,
        INNER=inner,
        WIDTH=width,
        HIDDEN=hidden,
        **tile,
    )
