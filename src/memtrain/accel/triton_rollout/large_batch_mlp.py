"""Everything in a block after its heads in one kernel, for very many rows (see `many_attend`).

The hidden layer never leaves the processor that made it, which keeps rows while the weights pass
by. `hopper.finish` does the same at the paper's size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.accel import hopper
from memtrain.accel.triton.common import gelu
from memtrain.accel.triton.launch import processors
from memtrain.accel.triton_rollout.rows import source_rows
from memtrain.models.layers import RMS_EPSILON

ROWS = 128
"""Of a tile of rows. With fewer, weights are read more often than the second cache can give."""


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
    source = source_rows(row, rows, length, kept, first).to(tl.int32)
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


def fits(width: int, inner: int, hidden: int) -> bool:
    """Whether such a block can be held."""
    return width in (64, 128, 256) and inner % 64 == 0 and hidden % 64 == 0


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


def on_hopper(stream: Tensor, weights: tuple[Tensor, ...], length: int, kept: int) -> bool:
    """Whether `hopper.finish` serves, and then for all rows: it is written for the paper's size."""
    project, rise, _ = weights
    sizes = stream.shape[1], project.shape[1], len(rise)
    return (
        sizes == (256, 512, 1024)
        and (kept == length or kept % 8 == 0)  # rows are fetched in pieces of 8 at least
        and len(stream) // length * kept >= 2**13  # tiles for half of the multiprocessors
        and hopper.serves(stream)
    )


def run_finish(
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
    if on_hopper(stream, weights, length, len(keep)):
        import memtrain.accel.hopper.rollout_mlp as hopper_finish

        hopper_finish.run_finish(mixed, stream, weights, biases, out, measured, length, keep)
        return
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
