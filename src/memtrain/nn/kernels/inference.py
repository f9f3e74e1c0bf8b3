"""A Transformer stack without autograd in two to five kernels a block, for rollouts.

One recurrent step is a chain of small products: what counts is how many kernels stand in the
chain. Norms are folded into the product that reads them, bias and GELU into the one that makes
them, residuals into the one that ends them; many short sequences share a tile of attention.
Products are taken in bf16 and summed in fp32; the residual stream is bf16, as under autocast.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float
from torch import Tensor, nn

from memtrain.nn.blocks import RMS_EPSILON, Block, Stack
from memtrain.nn.kernels import many, products

PRODUCTS = torch.bfloat16
"""The precision in which products are taken and what lies between them is written."""
LONGEST = 128
"""Positions in a sequence that one tile of attention holds."""
FEW_ROWS = 64
"""Up to here latency is all: tiles span the whole sum, in slices that run side by side."""
WIDE_ROWS = 4096
"""Up to here the first block reads fp32: a cast would be one kernel more."""
FUSED_ROWS = 1024
"""Up to here projection and attention are one kernel, as they are where sequences fill its tile."""
PLAIN_ROWS = 2**13
"""Up to here that projection, where it stands alone, is our product; above, torch's."""
CHAINED_ROWS = 64
"""Up to here a kernel is launched before the one in front of it has ended (0: never). With more
rows, those that wait take the place of those that work."""
MANY_ROWS = 2**14
"""From here on a block is the two kernels of `many`, where its sizes are theirs."""
CHUNK_ROWS = 36_864
"""More rows are run in chunks of whole sequences."""

Tile = dict[str, int]


# ----------------------------------------------------------------------------------------- tiles


def few_tile(rows: int, inner: int, outer: int) -> Tile:
    """Of a product with few rows: BR x BO, summed in SPLIT slices of BI."""
    split = 4 if inner >= 64 else 2
    slice_size = max(16, triton.next_power_of_2(triton.cdiv(inner, split)))
    return {"BR": 16 if rows <= 16 else 32, "BO": 16, "BI": slice_size, "SPLIT": split} | {
        "num_warps": split,
        "num_stages": 1,
    }


def linear_tile(rows: int, inner: int, outer: int) -> Tile:
    """Of a product with many rows: BR x BO in steps of BI."""
    if rows <= 1024:
        tile = {"BR": 64, "BO": 64, "BI": 64, "num_warps": 4, "num_stages": 4}
        if outer > 512:
            tile |= {"BI": 128, "num_stages": 3}
    elif outer <= 512 or (rows <= 8192 and outer <= 1024):
        tile = {"BR": 64, "BO": 128, "BI": 64, "num_warps": 4, "num_stages": 3}
    else:
        tile = {"BR": 128, "BO": 128, "BI": 64, "num_warps": 8, "num_stages": 3}
    return tile | {"BI": min(tile["BI"], _step(inner))}


def attend_tile(rows: int, length: int, inner: int) -> Tile:
    """Of projection and attention in one: BR rows of whole sequences, in steps of BI."""
    whole = max(16, triton.next_power_of_2(inner))
    if rows <= FEW_ROWS and whole <= 256:
        size = _tile_rows(rows, length, 32)
        warps = 8 if size == 16 else 4
        return {"BR": size, "BI": whole, "num_warps": warps, "num_stages": 1}
    if rows <= 1024 and inner == 256 and length <= 64:
        size = _tile_rows(rows, length, 64)
        return {"BR": size, "BI": inner, "num_warps": 4, "num_stages": 1}
    return {
        "BR": _tile_rows(rows, length, 64),
        "BI": min(64, _step(inner)),
        "num_warps": 4 if length <= 64 else 8,
        "num_stages": 3 if length <= 16 else 2,
    }


def attention_tile(rows: int, length: int) -> Tile:
    """Of attention alone: BR rows of whole sequences."""
    size = _tile_rows(rows, length, 64)
    return {"BR": size, "num_warps": 2 if size < 64 else 4 if size == 64 else 8}


def _step(inner: int) -> int:
    """A sum is taken in two steps at least: in one, Triton 3.6 reads beyond shared memory."""
    return max(16, triton.next_power_of_2(inner) // 2)


def _tile_rows(rows: int, length: int, wanted: int) -> int:
    """The power of two that holds one sequence, or as many as there are up to `wanted` rows."""
    return max(16, triton.next_power_of_2(length), min(wanted, triton.next_power_of_2(rows)))


# ---------------------------------------------------------------------------------------- launch


class Rows(NamedTuple):
    """Rows (R, I) and, where the product that made them has left them, parts (P, R) of the sums of
    their squares."""

    values: Tensor
    squares: Tensor | None = None

    def split(self, size: int) -> list["Rows"]:
        """Pieces of so many rows; of squares, which must be in one part, each its own."""
        values = self.values.split(size)
        if self.squares is None:
            return [Rows(piece) for piece in values]
        return [Rows(*both) for both in zip(values, self.squares.split(size, dim=1), strict=True)]


def linear(
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
        out = torch.empty(rows, outer, dtype=dtype or PRODUCTS, device=device)
    few = rows <= FEW_ROWS and inner <= 1024
    tile = few_tile(rows, inner, outer) if few else linear_tile(rows, inner, outer)
    kernel: Any = products.linear_few if few else products.linear
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


def attend(
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
    out = torch.empty(rows, heads * head_dim, dtype=PRODUCTS, device=weight.device)
    fused = rows <= FUSED_ROWS or attend_tile(rows, length, inner)["BR"] % length == 0
    fused = fused and (not weight.is_cuda or _is_roomy(weight.device))
    tile = attend_tile(rows, length, inner) if fused else attention_tile(rows, length)
    group = tile["BR"] // length
    kernel: Any = products.attend if fused else products.group_attention
    source, squares = x.values, x.squares
    if not fused and (squares is None or rows <= PLAIN_ROWS):
        source, squares = linear(x, weight, norm=True, first=first).values, None
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


def chain(weight: Tensor, rows: int, first: bool = False) -> dict[str, bool]:
    """Programmatic dependent launch: a kernel waits inside, after it has asked for its weights.

    A first one is launched after all before it have ended, since they may be what made its
    weights, and only lets the next one start early.
    """
    if rows > CHAINED_ROWS or not weight.is_cuda or not _can_chain(weight.device):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": not first}


@cache
def _is_roomy(device: torch.device) -> bool:
    """Whether the shared memory of a data centre's device is there, which `attend` needs."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 2**17


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the shared memory and the copies of `many` are there."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _can_chain(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


# ----------------------------------------------------------------------------------------- stack


class InferenceStack:
    """`Stack.forward` for short sequences, without autograd; its weights are copies in bf16.

    `refresh` copies them anew after the stack has trained. A `head` is a product that some caller
    takes of the result; it is taken together with the last norm.
    """

    def __init__(self, stack: Stack, head: nn.Linear | None = None) -> None:
        self.stack = stack
        self.head = head
        self.blocks = [block for block in stack.blocks if isinstance(block, Block)]
        self.copies = [matrix.to(PRODUCTS) for matrix in self._matrices()]

    @torch.no_grad()
    def refresh(self) -> None:
        torch._foreach_copy_(self.copies, self._matrices())

    @torch.no_grad()
    def _matrices(self) -> list[Tensor]:
        """The weights as the kernels want them: four kinds, all blocks of one together, since few
        operations are fast; then the head."""
        attentions = [block.attention for block in self.blocks]
        project_in = torch.stack([attention.project_in.weight for attention in attentions])
        rise = torch.stack([block.mlp[0].weight for block in self.blocks])
        before = torch.stack([block.attention_norm.weight for block in self.blocks])
        between = torch.stack([block.mlp_norm.weight for block in self.blocks])
        matrices = [
            _pairs_together(project_in * before[:, None], attentions[0].head_dim),
            torch.stack([attention.project_out.weight for attention in attentions]),
            rise * between[:, None],
            torch.stack([block.mlp[2].weight for block in self.blocks]),
        ]
        if self.head is not None:
            matrices.append(self.head.weight * self.stack.norm.weight)
        return matrices

    def serves(self, x: Tensor) -> bool:
        """Whether the sequences are short enough for a tile."""
        return x.shape[1] <= LONGEST

    @torch.no_grad()
    def __call__(self, x: Tensor, keep: slice, causal: bool, head: nn.Linear | None) -> Tensor:
        """`Stack.forward` at the kept positions."""
        count, length, width = x.shape
        flat = x.reshape(count * length, width).contiguous()
        # A kernel more costs more than wide rows while they are few.
        rows = Rows(flat if len(flat) <= WIDE_ROWS else flat.to(PRODUCTS))
        y = self.stream(rows, length, keep, causal)
        if head is None or head is not self.head:
            y = self.stack.norm(y)
            y = y if head is None else head(y)
        else:
            y = linear(
                Rows(y), self.copies[-1], norm=True, bias=head.bias, dtype=torch.float32
            ).values
        return y.unflatten(0, (count, -1))

    def stream(
        self, x: Rows, length: int, keep: slice, causal: bool, *, first: bool = True
    ) -> Float[Tensor, "R W"]:
        """The residual stream after the last block, in fp32, at the kept positions.

        `first` says that what stands before may have made the weights (see `chain`).
        """
        sequences = len(x.values) // length
        chunks = triton.cdiv(len(x.values), CHUNK_ROWS)
        pieces = x.split(triton.cdiv(sequences, chunks) * length)
        parts = [self._blocks(piece, length, keep, causal, first) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _blocks(self, stream: Rows, length: int, keep: slice, causal: bool, first: bool) -> Tensor:
        rotary, positions = self.stack.rotary, range(length)
        two_kernels = self._are_many(stream.values, length)
        for index, block in enumerate(self.blocks):
            last = index == len(self.blocks) - 1
            kept = positions[keep] if last else positions
            kind = torch.float32 if last else PRODUCTS
            project_in = self.copies[0][index]
            heads = block.attention.heads
            angles = (rotary.cosine, rotary.sine)
            if two_kernels:
                mixed = Rows(many.attend(*stream, project_in, *angles, heads, length, causal))
                stream = self._finish_many(index, mixed, stream, length, kept, kind)
            else:
                begins = first and not index
                mixed = attend(stream, project_in, *angles, heads, length, causal, first=begins)
                stream = self._finish(index, mixed, stream, length, kept, kind)
        return stream.values

    def _are_many(self, x: Tensor, length: int) -> bool:
        """Whether there are enough rows for the kernels of `many`, and sizes that they can hold."""
        if len(x) < MANY_ROWS or (x.is_cuda and not _is_hopper(x.device)):
            return False
        _, project_out, rise = self.copies[:3]
        width, inner = project_out.shape[1:]
        return many.fits(length, width, inner, self.blocks[0].attention.head_dim, rise.shape[1])

    def _finish(
        self,
        index: int,
        mixed: Rows,
        stream: Rows,
        length: int,
        kept: range,
        kind: torch.dtype,
        out: Tensor | None = None,
    ) -> Rows:
        """Everything in a block after its heads, at the kept positions; into `out`, if given."""
        project_out, rise, fall = (matrices[index] for matrices in self.copies[1:4])
        up, _, down = self.blocks[index].mlp
        stream = linear(
            mixed, project_out, residual=stream.values, measure=True, length=length, keep=kept
        )
        hidden = linear(stream, rise, norm=True, bias=up.bias, gelu=True)
        return linear(
            hidden,
            fall,
            bias=down.bias,
            residual=stream.values,
            measure=True,
            dtype=kind,
            out=out,
        )

    def _finish_many(
        self, index: int, mixed: Rows, stream: Rows, length: int, kept: range, kind: torch.dtype
    ) -> Rows:
        """`_finish` in one kernel, except for a few sequences at the end (`many.whole_rounds`)."""
        project_out, rise, fall = (matrices[index] for matrices in self.copies[1:4])
        weights = project_out, rise, fall
        up, _, down = self.blocks[index].mlp
        sequences, device = len(mixed.values) // length, rise.device
        rows, finish = sequences * len(kept), many.finish
        if many.finishes_on_hopper(stream.values, weights, length, len(kept)):
            from memtrain.nn.kernels.hopper.finish import run_finish as finish

            whole = sequences
        else:
            whole = many.whole_rounds(sequences, len(kept), device)
        if not whole:
            return self._finish(index, mixed, stream, length, kept, kind)
        cut = whole * len(kept)
        out = torch.empty(rows, len(fall), dtype=kind, device=device)
        squares = torch.empty(1, rows, device=device)
        finish(
            mixed.values,
            stream.values,
            weights,
            (up.bias, down.bias),
            out[:cut],
            squares[0],
            length,
            kept,
        )
        if cut < rows:
            rest = [Rows(part.values[whole * length :]) for part in (mixed, stream)]
            ended = self._finish(index, *rest, length, kept, kind, out[cut:])
            if ended.squares is None:  # so few are not measured
                squares[0, cut:] = ended.values.float().square().sum(1)
            else:
                torch.sum(ended.squares, dim=0, out=squares[0, cut:])
        return Rows(out, squares)


def _pairs_together(weight: Float[Tensor, "N O W"], head_dim: int) -> Float[Tensor, "N O W"]:
    """Queries' and keys' columns i and i + E/2, which rotary turns, side by side in every head.

    Their scores stay what they are; values keep their order.
    """
    inner = weight.shape[1] // 3
    turned, values = weight.split([2 * inner, inner], dim=1)
    halves = turned.unflatten(1, (-1, 2, head_dim // 2))  # (N, 2·H, 2, E/2, W)
    return torch.cat([halves.transpose(2, 3).flatten(1, 3), values], dim=1)
