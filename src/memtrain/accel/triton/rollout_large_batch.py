"""A block of a rollout in two kernels, for batches so large that the L2 cache limits the speed.

Tiles of a plain product read every row and every weight many times. Here queries, keys and values
never leave the processor that computes them: it keeps a head's weights in shared memory and loops
over the rows. Nor does the MLP's hidden layer: the processor keeps rows and loops over the weights.
`hopper.rollout_attention` and `hopper.rollout_mlp` compute the same at the paper's size.

Offsets are 32 bits: `InferenceStack` passes rows in chunks.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.accel import hopper
from memtrain.accel.triton.common import HIDE, LOG2_E, gelu, processors
from memtrain.accel.triton.rollout_attention import mix, rotate
from memtrain.accel.triton.rollout_linear import source_rows, sum_of_parts, sums_of_squares
from memtrain.models.layers import RMS_EPSILON

LEAST_FILLED = 0.75
"""The minimum share of a tile that sequences must fill."""
MLP_ROWS = 128
"""Rows per tile of the MLP. With fewer, reading the weights would exceed the L2 bandwidth."""

# -------------------------------------------------------------------- norm, projection, attention


@triton.jit
def _load_half(x, row, rows, HALF: tl.constexpr, SIZE: tl.constexpr):
    """Load one half of each row, SIZE long; for padding of the first one, without a mask."""
    source = tl.where(row < rows, row, 0)
    column = HALF * SIZE + tl.arange(0, SIZE)
    return tl.load(x + source[:, None] * (2 * SIZE) + column[None, :])


@triton.jit
def _numbers(part, kind: tl.constexpr, PAIRS: tl.constexpr):
    """The numbers of a loaded half; PAIRS: two per word."""
    if PAIRS:
        left = (part & 0xFFFF).to(tl.int16).to(kind, bitcast=True)
        right = (part >> 16).to(tl.int16).to(kind, bitcast=True)
        numbers = tl.reshape(tl.join(left, right), (part.shape[0], 2 * part.shape[1]))
    else:
        numbers = part.to(kind)
    return numbers


@triton.jit(do_not_specialize=["step", "iterations"])
def _attention(
    x, weight, out, squares, cosine, sine, rows, scale, epsilon, step, iterations,
    INNER: tl.constexpr, H: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr,
    BR: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """`attention._fused_attention` of one head, for every `step`-th tile of GROUP whole sequences.

    Rows are loaded in halves, which need less shared memory one after the other, and in words of
    two numbers (PAIRS): in registers a 16-bit number takes 32 bits. `iterations` is ITERATIONS (see
    HIDE).
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
    part0, part1 = _load_half(x, row, rows, 0, SIZE), _load_half(x, row, rows, 1, SIZE)
    for _ in range(iterations if HIDE else ITERATIONS):
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
        # One after the other: each is rounded to 16 bits before the next takes registers.
        k = rotate(k * level, c, s, BR, E).to(kind)
        q = tl.dot(x1, wq1.T, tl.dot(x0, wq0.T)) * (level * (scale * LOG2_E))
        q = rotate(q, c, s, BR, E).to(kind)
        v = (tl.dot(x1, wv1.T, tl.dot(x0, wv0.T)) * level).to(kind)
        # The next rows are loaded while attention of these is computed.
        following = row + step * (GROUP * L)
        part0 = _load_half(x, following, rows, 0, SIZE)
        part1 = _load_half(x, following, rows, 1, SIZE)
        mixed = mix(q, k, v, local, L, CAUSAL)
        there = (local < GROUP * L) & (row < rows)
        at = out + row[:, None] * (H * E) + head * E + column[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=there[:, None])
        row = following


def large_attention_tile(length: int) -> dict[str, int]:
    """BR rows of whole sequences, and the number of programs per processor.

    Of two programs, one multiplies while the other computes exponentials.
    """
    if _fill(64, length) >= LEAST_FILLED:
        return {"BR": 64, "per_processor": 2, "num_warps": 4, "num_stages": 1}
    return {"BR": 128, "per_processor": 1, "num_warps": 8, "num_stages": 1}


def _fill(size: int, length: int) -> float:
    """The share of a tile that whole sequences fill."""
    return size // length * length / size


def attention_fits(length: int, width: int, head_dim: int) -> bool:
    """Whether a head's weights fit into shared memory, and sequences fill their tile well
    enough."""
    filled = _fill(large_attention_tile(length)["BR"], length) >= LEAST_FILLED
    return filled and width in (64, 128, 256) and head_dim in (32, 64)


def hopper_serves_rollout_attention(x: Tensor, head_dim: int, length: int) -> bool:
    """Whether `hopper.rollout_attention` can run: it expects the paper's size and tiles of 64
    rows."""
    sizes = x.shape[1], head_dim, large_attention_tile(length)["BR"]
    return sizes == (256, 64, 64) and hopper.serves(x)


def run_large_batch_attention(
    x: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    length: int,
    causal: bool,
) -> Tensor:
    """`run_rollout_attention` of rows (R, I) and partial sums of their squares, to (R, H·E)."""
    rows, inner = x.shape
    head_dim = len(weight) // 3 // heads
    if hopper_serves_rollout_attention(x, head_dim, length):
        from memtrain.accel.hopper.rollout_attention import hopper_rollout_attention as on_hopper

        return on_hopper(x, squares, weight, cosine, sine, heads, length, causal)
    out = torch.empty(rows, heads * head_dim, dtype=weight.dtype, device=weight.device)
    tile = large_attention_tile(length)
    programs = tile.pop("per_processor") * processors(x.device)
    group = tile["BR"] // length
    tiles = triton.cdiv(rows // length, group)
    step = min(tiles, max(1, programs // heads))
    iterations = triton.cdiv(tiles, step)
    pairs = x.element_size() == 2
    kernel: Any = _attention
    kernel[step * heads,](
        x.view(torch.int32) if pairs else x,
        TensorDescriptor.from_tensor(weight, [head_dim, inner // 2]),
        out, x if squares is None else squares, cosine, sine,
        rows, 1 / math.sqrt(head_dim), RMS_EPSILON, step, iterations,
        INNER=inner, H=heads, L=length, E=head_dim, GROUP=group, CAUSAL=causal,
        PARTS=0 if squares is None else len(squares), PAIRS=pairs,
        ITERATIONS=0 if HIDE.value else iterations, **tile,
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------ output projection, MLP


@triton.jit
def _mlp(
    mixed, project, stream, up, up_bias, down, down_bias, between, out, measured,
    rows, length, kept, first, epsilon,
    INNER: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    BR: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of rows, from the heads' results to the end of the block, and its sums of squares."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column, hidden = tl.arange(0, WIDTH), tl.arange(0, BH)
    source = source_rows(row, rows, length, kept, first).to(tl.int32)
    total = tl.zeros((BR, WIDTH), tl.float32)
    at = mixed + source[:, None] * INNER + tl.arange(0, BI)[None, :]
    for start in tl.range(0, INNER, BI, num_stages=STAGES):
        total = tl.dot(tl.load(at + start), project.load([0, start]).T, total)
    total += tl.load(stream + source[:, None] * WIDTH + column[None, :]).to(tl.float32)
    level = tl.rsqrt(tl.sum(total * total, 1) / WIDTH + epsilon)[:, None]
    # Triton puts only loaded values into shared memory; stored and loaded again, these rows take no
    # registers, which the sums need.
    at = between + row[:, None] * WIDTH + column[None, :]
    tl.store(at, (total * level).to(up.dtype))
    total += tl.load(down_bias + column)[None, :]
    tl.debug_barrier()
    held = tl.load(at)
    for start in range(0, HIDDEN, BH):
        shift = tl.load(up_bias + start + hidden)[None, :]
        h = tl.dot(held, up.load([start, 0]).T)
        # Not one iteration later, during the next product: Triton 3.6 would overwrite its inputs.
        total = tl.dot(gelu(h + shift).to(down.dtype), down.load([0, start]).T, total)
    there = row < rows
    at = out + row[:, None] * WIDTH + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there[:, None])
    tl.store(measured + row, tl.sum(total * total, 1), mask=there)


def large_mlp_tile(inner: int, hidden: int) -> dict[str, int]:
    """BR rows; sums are computed in at least two steps of BI and BH: with one, Triton 3.6 reads
    beyond shared memory."""
    return {
        "BR": MLP_ROWS,
        "BI": min(64, inner // 2),
        "BH": min(64, hidden // 2),
        "STAGES": 4,
        "num_warps": 8,
        "num_stages": 2,
    }


def mlp_fits(width: int, inner: int, hidden: int) -> bool:
    """Whether the kernel supports a block of these sizes."""
    return width in (64, 128, 256) and inner % 64 == 0 and hidden % 64 == 0


def whole_rounds(sequences: int, kept: int, device: torch.device) -> int:
    """The number of sequences, of `kept` rows each, whose tiles keep all processors busy.

    A single tile takes as long as one on every processor, so a few remaining tiles are left to
    smaller kernels.
    """
    there = processors(device)
    tiles = triton.cdiv(sequences * kept, MLP_ROWS)
    rest = tiles % there
    if 2 * rest > there:
        return sequences
    return min(sequences, (tiles - rest) * MLP_ROWS // kept)


def hopper_serves_rollout_mlp(
    stream: Tensor, weights: tuple[Tensor, ...], length: int, kept: int
) -> bool:
    """Whether `hopper.rollout_mlp` can process all rows: it expects the paper's size."""
    project, up, _ = weights
    sizes = stream.shape[1], project.shape[1], len(up)
    return (
        sizes == (256, 512, 1024)
        and (kept == length or kept % 8 == 0)  # rows are fetched in pieces of 8 at least
        and len(stream) // length * kept >= 2**13  # tiles for half of the multiprocessors
        and hopper.serves(stream)
    )


def run_large_batch_mlp(
    mixed: Tensor,
    stream: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    out: Tensor,
    measured: Tensor,
    length: int,
    keep: range,
) -> None:
    """The block after its heads, at the kept positions of each sequence.

    Args:
        mixed: The heads' results, (R, H·E).
        stream: The residual stream, (R, W).
        weights: Those of the output projection and of the MLP's two layers.
        biases: Those of the MLP.
        out: Receives the stream, (R', W).
        measured: Receives its sums of squares, (R').
    """
    if hopper_serves_rollout_mlp(stream, weights, length, len(keep)):
        from memtrain.accel.hopper.rollout_mlp import hopper_rollout_mlp

        hopper_rollout_mlp(mixed, stream, weights, biases, out, measured, length, keep)
        return
    project, up, down = weights
    width, inner = project.shape
    rows, hidden = len(out), len(up)
    tile = large_mlp_tile(inner, hidden)
    tiles = triton.cdiv(rows, tile["BR"])
    kernel: Any = _mlp
    kernel[tiles,](
        mixed,
        TensorDescriptor.from_tensor(project, [width, tile["BI"]]),
        stream,
        TensorDescriptor.from_tensor(up, [tile["BH"], width]),
        biases[0],
        TensorDescriptor.from_tensor(down, [width, tile["BH"]]),
        biases[1],
        torch.empty(tiles * tile["BR"], width, dtype=up.dtype, device=out.device),
        out, measured, rows, length, len(keep), keep.start, RMS_EPSILON,
        INNER=inner, WIDTH=width, HIDDEN=hidden, **tile,
    )  # fmt: skip
