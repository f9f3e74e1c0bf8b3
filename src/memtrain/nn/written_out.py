"""A Transformer block and its gradient, written out in few operations, for `unrolled.py`.

Rows are positions first, (L·B, W): the heads of all sequences are then one axis, and attention is
two batched products. What a step keeps for the gradient lies in buffers of all steps, so that the
gradients of weights are one product each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn.functional import gelu

from memtrain.nn.blocks import RMS_EPSILON


class Weights(NamedTuple):
    """A block's matrices as right factors; norms' weights and attention's scale are folded in."""

    project_in: Float[Tensor, "3 W I"]
    project_out: Float[Tensor, "I W"]
    up: Float[Tensor, "W 4W"]
    up_bias: Float[Tensor, " 4W"]
    down: Float[Tensor, "4W W"]
    down_bias: Float[Tensor, " W"]


class Shape(NamedTuple):
    """The sizes of an unrolling, and how many steps' worth is kept."""

    steps: int
    rows: int
    memory_tokens: int
    heads: int
    kept: int


class Kept(NamedTuple):
    """What the gradient needs of each step's forward pass."""

    normed: Float[Tensor, "T R W"]
    scale: Float[Tensor, "T R 1"]
    projected: Float[Tensor, "T 3 L B I"]
    attention: Float[Tensor, "T N K L"]
    mixed: Float[Tensor, "T Q I"]
    mlp_normed: Float[Tensor, "T Q W"]
    mlp_scale: Float[Tensor, "T Q 1"]
    hidden: Float[Tensor, "T Q 4W"]
    active: Float[Tensor, "T Q 4W"]


class Block:
    """One block of the unrolled cell. It gets [memory, token] or, the first, the memory's rows;
    the token's queries, keys and values it then finds in `kept.projected`. The last block returns
    the memory's rows alone."""

    def __init__(
        self,
        shape: Shape,
        phase: Complex[Tensor, "L 1 1 E/2"],
        weights: Weights,
        *,
        first: bool,
        last: bool,
        kept: Kept | None = None,
    ) -> None:
        self.shape, self.weights, self.first, self.last = shape, weights, first, last
        self.positions = shape.memory_tokens + 1
        self.given = self.positions - first
        self.asking = self.positions - last
        self.rows_in, self.rows_out = self.given * shape.rows, self.asking * shape.rows
        # Position 0 is not turned.
        self.phase = phase[: self.given] if self.given > 1 else None
        self.kept = kept or self._buffers()
        self.at = [Kept(*parts) for parts in zip(*(part.unbind() for part in self.kept), strict=True)]

    def _buffers(self) -> Kept:
        _, width, inner = self.weights.project_in.shape
        hidden, steps, rows = self.weights.up.shape[1], self.shape.kept, self.shape.rows
        new = self.weights.up.new_empty
        return Kept(
            new(steps, self.rows_in, width),
            new(steps, self.rows_in, 1),
            new(steps, 3, self.positions, rows, inner),
            new(steps, rows * self.shape.heads, self.asking, self.positions),
            new(steps, self.rows_out, inner),
            new(steps, self.rows_out, width),
            new(steps, self.rows_out, 1),
            new(steps, self.rows_out, hidden),
            new(steps, self.rows_out, hidden),
        )

    def forward(
        self, at: int, x: Float[Tensor, "R W"], token: Float[Tensor, "B W"] | None
    ) -> Float[Tensor, "Q W"]:
        """Step `at`; `token` is the rest of the first block's stream, if anyone will read it."""
        kept, weights = self.at[at], self.weights
        normalize(x, kept.normed, kept.scale)
        projected = torch.bmm(kept.normed.expand(3, -1, -1), weights.project_in)
        kept.projected[:, : self.given] = projected.view(3, self.given, self.shape.rows, -1)
        if self.phase is not None:
            self._turn(kept.projected[:2, : self.given], self.phase)
        query, key, value = map(self._heads, kept.projected)
        scores = torch.bmm(query[:, : self.asking], key.transpose(1, 2))
        torch.softmax(scores, -1, out=kept.attention)
        mixed = torch.bmm(kept.attention, value)  # (N, K, E)
        self._rows(kept.mixed).copy_(mixed)
        x = x[: self.rows_out] if token is None else torch.cat([x, token])
        x = torch.addmm(x, kept.mixed, weights.project_out)
        normalize(x, kept.mlp_normed, kept.mlp_scale)
        torch.addmm(weights.up_bias, kept.mlp_normed, weights.up, out=kept.hidden)
        torch._C._nn.gelu(kept.hidden, out=kept.active)
        return x.add_(torch.addmm(weights.down_bias, kept.active, weights.down))

    def _heads(self, x: Float[Tensor, "L B I"]) -> Float[Tensor, "N L E"]:
        return x.view(len(x), self.shape.rows * self.shape.heads, -1).transpose(0, 1)

    def _rows(self, x: Float[Tensor, "Q I"]) -> Float[Tensor, "N K E"]:
        return self._heads(x.view(self.asking, self.shape.rows, -1))

    def _turn(self, x: Float[Tensor, "2 L B I"], phase: Complex[Tensor, "L 1 1 E/2"]) -> None:
        """Turn queries and keys, in place."""
        pairs = x.unflatten(-1, (self.shape.heads, -1, 2))
        torch.view_as_complex(pairs).mul_(phase)

    # ------------------------------------------------------------------------------- gradient

    def begin_backward(self) -> None:
        """What all steps' gradients need, and where they go."""
        kept, steps = self.kept, self.shape.steps
        self.slope = torch.ops.aten.gelu_backward(torch.ones_like(kept.hidden), kept.hidden)
        self.of_projected = torch.zeros_like(kept.projected)
        self.of_attended = torch.empty_like(kept.mlp_normed)
        self.of_hidden = torch.empty_like(kept.hidden)
        self.of_out = torch.empty_like(kept.mlp_normed)
        width = kept.mlp_normed.shape[-1]
        self.of_token = kept.mixed.new_empty(steps, self.shape.rows, width)
        self.back = self.phase.conj().resolve_conj() if self.phase is not None else None

    def backward(self, at: int, gradient: Float[Tensor, "Q W"]) -> Float[Tensor, "R W"]:
        """From the gradient of what `forward` returned to that of its `x`."""
        kept, weights = self.at[at], self.weights
        self.of_out[at] = gradient
        hidden = self.of_hidden[at]
        torch.mul(gradient @ weights.down.T, self.slope[at], out=hidden)
        gradient = gradient + normalize_backward(
            hidden @ weights.up.T, kept.mlp_normed, kept.mlp_scale
        )
        self.of_attended[at] = gradient
        mixed = self._rows(gradient @ weights.project_out.T)  # (N, K, E)
        query, key, value = map(self._heads, kept.projected)
        attention = torch.bmm(mixed, value.transpose(1, 2))
        scores = torch._softmax_backward_data(attention, kept.attention, -1, attention.dtype)
        of_projected = self.of_projected[at]
        of_query, of_key, of_value = map(self._heads, of_projected)
        of_query[:, : self.asking] = torch.bmm(scores, key)
        of_key.copy_(torch.bmm(scores.transpose(1, 2), query[:, : self.asking]))
        of_value.copy_(torch.bmm(kept.attention.transpose(1, 2), mixed))
        if self.back is not None:
            self._turn(of_projected[:2, : self.given], self.back)
        of_query, of_key, of_value = of_projected[:, : self.given].flatten(1, 2)
        of_normed = of_query @ weights.project_in[0].T
        of_normed.addmm_(of_key, weights.project_in[1].T)
        of_normed.addmm_(of_value, weights.project_in[2].T)
        passed = normalize_backward(of_normed, kept.normed, kept.scale)
        if self.first and not self.last:
            self.of_token[at] = gradient[self.rows_in :]
            gradient = gradient[: self.rows_in]
        passed[: len(gradient)] += gradient
        return passed

    def weight_gradients(self) -> Weights:
        """Of all steps together."""
        kept = self.kept
        of_projected = self.of_projected[:, :, : self.given].transpose(0, 1).flatten(1, 3)
        normed = kept.normed.flatten(0, 1).T
        return Weights(
            torch.bmm(normed.expand(3, -1, -1), of_projected),
            kept.mixed.flatten(0, 1).T @ self.of_attended.flatten(0, 1),
            kept.mlp_normed.flatten(0, 1).T @ self.of_hidden.flatten(0, 1),
            self.of_hidden.sum((0, 1)),
            kept.active.flatten(0, 1).T @ self.of_out.flatten(0, 1),
            self.of_out.sum((0, 1)),
        )


def normalize(x: Float[Tensor, "R W"], normed: Tensor, scale: Tensor) -> None:
    """x over its root mean square, and one over that."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    torch.mul(length, length, out=scale).mul_(1 / x.shape[-1]).add_(RMS_EPSILON).rsqrt_()
    torch.mul(x, scale, out=normed)


def normalize_backward(
    gradient: Float[Tensor, "R W"], normed: Float[Tensor, "R W"], scale: Float[Tensor, "R 1"]
) -> Float[Tensor, "R W"]:
    """From the gradient of `normed` to that of x."""
    along = (gradient * normed).sum(-1, keepdim=True)
    return torch.addcmul(gradient, normed, along, value=-1 / normed.shape[-1]).mul_(scale)
