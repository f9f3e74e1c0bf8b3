"""A whole stack for rollouts: its weights in the kernels' layout, and the choice of kernels."""

import torch
import triton
from jaxtyping import Float
from torch import Tensor, nn

from memtrain.accel import hopper
from memtrain.accel.triton.rollout_attention import run_rollout_attention
from memtrain.accel.triton.rollout_large_batch import (
    attention_fits,
    hopper_serves_rollout_mlp,
    mlp_fits,
    run_large_batch_attention,
    run_large_batch_mlp,
    whole_rounds,
)
from memtrain.accel.triton.rollout_linear import LIMITS, Rows, run_linear
from memtrain.models.layers import Block, Stack


class InferenceStack:
    """`Stack.forward` for short sequences, without autograd, on copies of its weights in bf16.

    Call `refresh` after the weights have changed. A caller's linear `head` on the result is fused
    with the last norm.
    """

    def __init__(self, stack: Stack, head: nn.Linear | None = None) -> None:
        self.stack = stack
        self.head = head
        self.blocks = [block for block in stack.blocks if isinstance(block, Block)]
        self.copies = [matrix.to(LIMITS.precision) for matrix in self._matrices()]

    @torch.no_grad()
    def refresh(self) -> None:
        torch._foreach_copy_(self.copies, self._matrices())

    @torch.no_grad()
    def _matrices(self) -> list[Tensor]:
        """The weights in the kernels' layout: four kinds, stacked over blocks to need few
        operations; then the head."""
        attentions = [block.attention for block in self.blocks]
        project_in = torch.stack([attention.project_in.weight for attention in attentions])
        to_hidden = torch.stack([block.mlp[0].weight for block in self.blocks])
        before = torch.stack([block.attention_norm.weight for block in self.blocks])
        between = torch.stack([block.mlp_norm.weight for block in self.blocks])
        matrices = [
            _with_adjacent_pairs(project_in * before[:, None], attentions[0].head_dim),
            torch.stack([attention.project_out.weight for attention in attentions]),
            to_hidden * between[:, None],
            torch.stack([block.mlp[2].weight for block in self.blocks]),
        ]
        if self.head is not None:
            matrices.append(self.head.weight * self.stack.norm.weight)
        return matrices

    def serves(self, x: Tensor) -> bool:
        """Whether the sequences fit into a tile."""
        return x.shape[1] <= LIMITS.max_length

    @torch.no_grad()
    def __call__(self, x: Tensor, queries: slice, causal: bool, head: nn.Linear | None) -> Tensor:
        """`Stack.forward` at the kept positions."""
        count, length, width = x.shape
        flat = x.reshape(count * length, width).contiguous()
        # While rows are few, a cast costs more than reading fp32.
        rows = Rows(flat if len(flat) <= LIMITS.wide_rows else flat.to(LIMITS.precision))
        y = self.stream(rows, length, queries, causal)
        if head is None or head is not self.head:
            y = self.stack.norm(y)
            y = y if head is None else head(y)
        else:
            y = run_linear(
                Rows(y), self.copies[-1], norm=True, bias=head.bias, dtype=torch.float32
            ).values
        return y.unflatten(0, (count, -1))

    def stream(
        self, x: Rows, length: int, queries: slice, causal: bool, *, first: bool = True
    ) -> Float[Tensor, "R W"]:
        """The residual stream after the last block, in fp32, at the kept positions.

        first: Whether the previous kernel may have written the weights (see `dependent_launch`).
        """
        sequences = len(x.values) // length
        chunks = triton.cdiv(len(x.values), LIMITS.chunk_rows)
        pieces = x.split(triton.cdiv(sequences, chunks) * length)
        parts = [self._blocks(piece, length, queries, causal, first) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _blocks(
        self, stream: Rows, length: int, queries: slice, causal: bool, first: bool
    ) -> Tensor:
        rotary, positions = self.stack.rotary, range(length)
        large_batch = self._is_large_batch(stream.values, length)
        for index, block in enumerate(self.blocks):
            last = index == len(self.blocks) - 1
            kept = positions[queries] if last else positions
            kind = torch.float32 if last else LIMITS.precision
            project_in = self.copies[0][index]
            heads = block.attention.heads
            angles = (rotary.cosine, rotary.sine)
            if large_batch:
                mixed = Rows(
                    run_large_batch_attention(*stream, project_in, *angles, heads, length, causal)
                )
                stream = self._large_batch_mlp(index, mixed, stream, length, kept, kind)
            else:
                mixed = run_rollout_attention(
                    stream, project_in, *angles, heads, length, causal, first=first and not index
                )
                stream = self._mlp(index, mixed, stream, length, kept, kind)
        return stream.values

    def _is_large_batch(self, x: Tensor, length: int) -> bool:
        """Whether there are enough rows for the kernels of `large_batch`, which support these sizes
        and need Hopper's shared memory and copies."""
        if len(x) < LIMITS.large_batch_rows or (x.is_cuda and not hopper.is_hopper(x.device)):
            return False
        _, project_out, to_hidden = self.copies[:3]
        width, inner = project_out.shape[1:]
        head_dim, hidden = self.blocks[0].attention.head_dim, to_hidden.shape[1]
        return attention_fits(length, width, head_dim) and mlp_fits(width, inner, hidden)

    def _mlp(
        self,
        index: int,
        mixed: Rows,
        stream: Rows,
        length: int,
        kept: range,
        kind: torch.dtype,
        out: Tensor | None = None,
    ) -> Rows:
        """The block after its heads, at the kept positions; written to `out`, if given."""
        project_out, to_hidden, from_hidden = (matrices[index] for matrices in self.copies[1:4])
        up, _, down = self.blocks[index].mlp
        stream = run_linear(
            mixed, project_out, residual=stream.values, measure=True, length=length, keep=kept
        )
        hidden = run_linear(stream, to_hidden, norm=True, bias=up.bias, gelu=True)
        return run_linear(
            hidden,
            from_hidden,
            bias=down.bias,
            residual=stream.values,
            measure=True,
            dtype=kind,
            out=out,
        )

    def _large_batch_mlp(
        self, index: int, mixed: Rows, stream: Rows, length: int, kept: range, kind: torch.dtype
    ) -> Rows:
        """`_mlp` in one kernel, except for a few sequences at the end (see `whole_rounds`)."""
        project_out, to_hidden, from_hidden = (matrices[index] for matrices in self.copies[1:4])
        weights = project_out, to_hidden, from_hidden
        up, _, down = self.blocks[index].mlp
        sequences, device = len(mixed.values) // length, to_hidden.device
        rows, whole = sequences * len(kept), sequences
        if not hopper_serves_rollout_mlp(stream.values, weights, length, len(kept)):
            whole = whole_rounds(sequences, len(kept), device)
        if not whole:
            return self._mlp(index, mixed, stream, length, kept, kind)
        cut = whole * len(kept)
        out = torch.empty(rows, len(from_hidden), dtype=kind, device=device)
        squares = torch.empty(1, rows, device=device)
        biases = up.bias, down.bias
        run_large_batch_mlp(
            mixed.values, stream.values, weights, biases, out[:cut], squares[0], length, kept
        )
        if cut < rows:
            rest = [Rows(part.values[whole * length :]) for part in (mixed, stream)]
            ended = self._mlp(index, *rest, length, kept, kind, out[cut:])
            if ended.squares is None:  # not measured for few rows
                squares[0, cut:] = ended.values.float().square().sum(1)
            else:
                torch.sum(ended.squares, dim=0, out=squares[0, cut:])
        return Rows(out, squares)


def _with_adjacent_pairs(weight: Float[Tensor, "N O W"], head_dim: int) -> Float[Tensor, "N O W"]:
    """Reorder the queries and keys of each head so that rotary's pairs i and i + E/2 are adjacent.

    This does not change their scores; values keep their order.
    """
    inner = weight.shape[1] // 3
    rotated, values = weight.split([2 * inner, inner], dim=1)
    halves = rotated.unflatten(1, (-1, 2, head_dim // 2))  # (N, 2·H, 2, E/2, W)
    return torch.cat([halves.transpose(2, 3).flatten(1, 3), values], dim=1)
