"""A whole stack for rollouts: its weights as the kernels want them, and which kernels run when."""

import torch
import triton
from jaxtyping import Float
from torch import Tensor, nn

from memtrain.accel import hopper
from memtrain.accel.triton_rollout import large_batch_attention as many_attend
from memtrain.accel.triton_rollout import large_batch_mlp as many_finish
from memtrain.accel.triton_rollout import limits
from memtrain.accel.triton_rollout.attention import run_attend
from memtrain.accel.triton_rollout.linear import run_linear
from memtrain.accel.triton_rollout.rows import Rows
from memtrain.models.layers import Block, Stack


class InferenceStack:
    """`Stack.forward` for short sequences, without autograd; its weights are copies in bf16.

    `refresh` copies them anew after the stack has trained. A `head` is a product that some caller
    takes of the result; it is taken together with the last norm.
    """

    def __init__(self, stack: Stack, head: nn.Linear | None = None) -> None:
        self.stack = stack
        self.head = head
        self.blocks = [block for block in stack.blocks if isinstance(block, Block)]
        self.copies = [matrix.to(limits.PRODUCTS) for matrix in self._matrices()]

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
        return x.shape[1] <= limits.LONGEST

    @torch.no_grad()
    def __call__(self, x: Tensor, keep: slice, causal: bool, head: nn.Linear | None) -> Tensor:
        """`Stack.forward` at the kept positions."""
        count, length, width = x.shape
        flat = x.reshape(count * length, width).contiguous()
        # A kernel more costs more than wide rows while they are few.
        rows = Rows(flat if len(flat) <= limits.WIDE_ROWS else flat.to(limits.PRODUCTS))
        y = self.stream(rows, length, keep, causal)
        if head is None or head is not self.head:
            y = self.stack.norm(y)
            y = y if head is None else head(y)
        else:
            y = run_linear(
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
        chunks = triton.cdiv(len(x.values), limits.CHUNK_ROWS)
        pieces = x.split(triton.cdiv(sequences, chunks) * length)
        parts = [self._blocks(piece, length, keep, causal, first) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _blocks(self, stream: Rows, length: int, keep: slice, causal: bool, first: bool) -> Tensor:
        rotary, positions = self.stack.rotary, range(length)
        two_kernels = self._are_many(stream.values, length)
        for index, block in enumerate(self.blocks):
            last = index == len(self.blocks) - 1
            kept = positions[keep] if last else positions
            kind = torch.float32 if last else limits.PRODUCTS
            project_in = self.copies[0][index]
            heads = block.attention.heads
            angles = (rotary.cosine, rotary.sine)
            if two_kernels:
                mixed = Rows(
                    many_attend.run_attend(*stream, project_in, *angles, heads, length, causal)
                )
                stream = self._finish_many(index, mixed, stream, length, kept, kind)
            else:
                begins = first and not index
                mixed = run_attend(stream, project_in, *angles, heads, length, causal, first=begins)
                stream = self._finish(index, mixed, stream, length, kept, kind)
        return stream.values

    def _are_many(self, x: Tensor, length: int) -> bool:
        """Whether there are enough rows for the two kernels of very many, whose shared memory and
        copies only Hopper has, and sizes that they can hold."""
        if len(x) < limits.MANY_ROWS or (x.is_cuda and not hopper.is_hopper(x.device)):
            return False
        _, project_out, rise = self.copies[:3]
        width, inner = project_out.shape[1:]
        head_dim, hidden = self.blocks[0].attention.head_dim, rise.shape[1]
        return many_attend.fits(length, width, head_dim) and many_finish.fits(width, inner, hidden)

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
        stream = run_linear(
            mixed, project_out, residual=stream.values, measure=True, length=length, keep=kept
        )
        hidden = run_linear(stream, rise, norm=True, bias=up.bias, gelu=True)
        return run_linear(
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
        """`_finish` in one kernel, except for a few sequences at the end (`whole_rounds`)."""
        project_out, rise, fall = (matrices[index] for matrices in self.copies[1:4])
        weights = project_out, rise, fall
        up, _, down = self.blocks[index].mlp
        sequences, device = len(mixed.values) // length, rise.device
        rows, whole = sequences * len(kept), sequences
        if not many_finish.on_hopper(stream.values, weights, length, len(kept)):
            whole = many_finish.whole_rounds(sequences, len(kept), device)
        if not whole:
            return self._finish(index, mixed, stream, length, kept, kind)
        cut = whole * len(kept)
        out = torch.empty(rows, len(fall), dtype=kind, device=device)
        squares = torch.empty(1, rows, device=device)
        many_finish.run_finish(
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
