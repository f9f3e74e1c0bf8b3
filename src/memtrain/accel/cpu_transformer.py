"""A Transformer block and its gradient, written out in few operations, for `unrolled.py`.

Rows are positions first, (L·B, W): the heads of all sequences are then one axis, and attention is
two batched products. What a step keeps for the gradient lies in buffers of all steps, so that the
gradients of weights are one product each.
"""

from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from memtrain.models import layers as blocks
from memtrain.models.layers import RMS_EPSILON


class Weights(NamedTuple):
    """A block's matrices as right factors; norms' weights and attention's scale are folded in."""

    project_in: Float[Tensor, "3 W I"]
    project_out: Float[Tensor, "I W"]
    up: Float[Tensor, "W F"]
    up_bias: Float[Tensor, " F"]
    down: Float[Tensor, "F W"]
    down_bias: Float[Tensor, " W"]


def fold(block: blocks.Block) -> Weights:
    """The two numbers of a head that turn together are put side by side: a turn is then a product
    of complex numbers. Queries and keys are reordered alike, so their products stay."""
    attention, up, down = block.attention, block.mlp[0], block.mlp[2]
    assert isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    size = attention.head_dim
    query, key, value = (attention.project_in.weight * block.attention_norm.weight).chunk(3)
    query, key = (
        part.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)
        for part in (query / size**0.5, key)
    )
    return Weights(
        torch.stack([query, key, value]).transpose(1, 2),
        attention.project_out.weight.T,
        (up.weight * block.mlp_norm.weight).T,
        up.bias,
        down.weight.T,
        down.bias,
    )


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
    hidden: Float[Tensor, "T Q F"]
    active: Float[Tensor, "T Q F"]


class Block:
    """One block of the unrolled cell. It gets [memory, token] or, the first, the memory's rows;
    the token's queries, keys and values it then finds in `kept.projected`. The last block returns
    the memory's rows alone.

    Every view of a step is made beforehand: made in the loop, views take a third of its time.
    """

    def __init__(
        self,
        shape: Shape,
        phase: Complex[Tensor, "L 1 1 P"],
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
        self.at = [
            Kept(*parts) for parts in zip(*(part.unbind() for part in self.kept), strict=True)
        ]
        self.heads = self._all_heads(self.kept.projected)
        self.width = weights.up.shape[0]
        self.epsilon = weights.up.new_tensor(RMS_EPSILON)

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

    def _all_heads(self, projected: Float[Tensor, "T 3 L B I"]) -> list[tuple[Tensor, ...]]:
        """Of each step: queries, keys and values, (N, L, E), and the pairs to turn."""
        steps, rows = len(projected), self.shape.rows * self.shape.heads
        heads = projected.view(steps, 3, self.positions, rows, -1).transpose(2, 3)
        query, key, value = heads.unbind(1)
        pairs = projected[:, :2, : self.given].unflatten(-1, (self.shape.heads, -1, 2))
        return list(
            zip(
                query[:, :, : self.asking].unbind(),
                key.unbind(),
                value.unbind(),
                torch.view_as_complex(pairs).unbind(),
                strict=True,
            )
        )

    def _rows(self, x: Float[Tensor, "*T Q I"]) -> Float[Tensor, "*T N K E"]:
        """Rows as heads."""
        rows = self.shape.rows * self.shape.heads
        return x.view(*x.shape[:-2], self.asking, rows, -1).transpose(-2, -3)

    def prepare(self) -> None:
        """The views of the forward pass."""
        kept, shape = self.kept, self.shape
        self.normed_thrice = kept.normed[:, None].expand(-1, 3, -1, -1).unbind()
        projected = kept.projected[:, :, : self.given]
        self.projected = projected.view(shape.kept, 3, self.rows_in, -1).unbind()
        self.mixed = self._rows(kept.mixed).unbind()

    def forward(
        self, at: int, x: Float[Tensor, "R W"], token: Float[Tensor, "B W"] | None
    ) -> Float[Tensor, "Q W"]:
        """Step `at`; `token` is the rest of the first block's stream, if anyone will read it."""
        kept, weights = self.at[at], self.weights
        query, key, value, pairs = self.heads[at]
        normalize(x, self.epsilon, kept.normed, kept.scale)
        torch.bmm(self.normed_thrice[at], weights.project_in, out=self.projected[at])
        if self.phase is not None:
            pairs.mul_(self.phase)
        torch.softmax(torch.bmm(query, key.mT), -1, out=kept.attention)
        torch.bmm(kept.attention, value, out=self.mixed[at])
        x = x[: self.rows_out] if token is None else torch.cat([x, token])
        x = torch.addmm(x, kept.mixed, weights.project_out)
        normalize(x, self.epsilon, kept.mlp_normed, kept.mlp_scale)
        torch.addmm(weights.up_bias, kept.mlp_normed, weights.up, out=kept.hidden)
        torch._C._nn.gelu(kept.hidden, out=kept.active)  # pyright: ignore[reportAttributeAccessIssue]
        return x.add_(torch.addmm(weights.down_bias, kept.active, weights.down))

    # ------------------------------------------------------------------------------- gradient

    def prepare_backward(self) -> None:
        """What all steps' gradients need, where they go, and the views of both."""
        kept = self.kept
        slope = torch.ops.aten.gelu_backward(torch.ones_like(kept.hidden), kept.hidden)
        self.slope = slope.unbind()
        self.of_projected = torch.zeros_like(kept.projected)
        self.of_heads = self._all_heads(self.of_projected)
        given = self.of_projected[:, :, : self.given].flatten(2, 3)
        self.of_given = [rows.unbind() for rows in given.unbind()]
        self.of_attended = torch.empty_like(kept.mlp_normed)
        self.of_out = torch.empty_like(kept.mlp_normed)
        self.of_hidden = torch.empty_like(kept.hidden)
        self.of_attended_at, self.of_out_at = self.of_attended.unbind(), self.of_out.unbind()
        self.of_hidden_at = self.of_hidden.unbind()
        weights = self.weights
        self.back_in = weights.project_in.mT.unbind()
        self.back_out, self.back_up = weights.project_out.mT, weights.up.mT
        self.back_down = weights.down.mT
        self.back = self.phase.conj().resolve_conj() if self.phase is not None else None

    def backward(self, at: int, out: Float[Tensor, "R W"]) -> Float[Tensor, "R W"]:
        """From the gradient of what `forward` returned, in `of_out`, to that of its `x`."""
        kept = self.at[at]
        gradient, hidden, attended = (
            self.of_out_at[at],
            self.of_hidden_at[at],
            self.of_attended_at[at],
        )
        torch.mul(gradient @ self.back_down, self.slope[at], out=hidden)
        normed = along(hidden @ self.back_up, kept.mlp_normed)
        torch.addcmul(gradient, normed, kept.mlp_scale, out=attended)
        query, key, value, _ = self.heads[at]
        of_query, of_key, of_value, pairs = self.of_heads[at]
        mixed = self._rows(attended @ self.back_out)
        attention = torch.bmm(mixed, value.mT)
        scores = torch._softmax_backward_data(attention, kept.attention, -1, attention.dtype)
        torch.bmm(scores, key, out=of_query)
        torch.bmm(scores.mT, query, out=of_key)
        torch.bmm(kept.attention.mT, mixed, out=of_value)
        if self.back is not None:
            pairs.mul_(self.back)
        of_query, of_key, of_value = self.of_given[at]
        back_query, back_key, back_value = self.back_in
        normed = of_query @ back_query
        normed = along(normed.addmm_(of_key, back_key).addmm_(of_value, back_value), kept.normed)
        if self.rows_out == self.rows_in:
            return torch.addcmul(attended, normed, kept.scale, out=out)
        # The first block got fewer rows than leave it, the last returns fewer than it got.
        both = min(self.rows_in, self.rows_out)
        torch.mul(normed, kept.scale, out=out)
        out[:both] += attended[:both]
        return out

    def weight_gradients(self) -> Weights:
        """Of all steps together."""
        kept = self.kept
        of_projected = self.of_projected[:, :, : self.given].transpose(0, 1).flatten(1, 3)
        normed = kept.normed.flatten(0, 1).T
        return Weights(
            torch.bmm(normed.expand(3, -1, -1), of_projected),
            total_product(kept.mixed, self.of_attended),
            total_product(kept.mlp_normed, self.of_hidden),
            self.of_hidden.sum((0, 1)),
            total_product(kept.active, self.of_out),
            self.of_out.sum((0, 1)),
        )


def normalize(
    x: Float[Tensor, "*rows W"],
    epsilon: Float[Tensor, ""],
    normed: Float[Tensor, "*rows W"],
    scale: Float[Tensor, "*rows 1"],
) -> None:
    """x over its root mean square, and one over that."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    torch.addcmul(epsilon, length, length, value=1 / x.shape[-1], out=scale).rsqrt_()
    torch.mul(x, scale, out=normed)


def along(
    gradient: Float[Tensor, "*rows W"], normed: Float[Tensor, "*rows W"]
) -> Float[Tensor, "*rows W"]:
    """From the gradient of `normed` to that of x, but for the scale."""
    radial = (gradient * normed).sum(-1, keepdim=True)
    return torch.addcmul(gradient, normed, radial, value=-1 / normed.shape[-1])


def total_product(
    left: Float[Tensor, "T R W"], right: Float[Tensor, "T R D"]
) -> Float[Tensor, "W D"]:
    """Summed over steps and rows."""
    return left.flatten(0, 1).T @ right.flatten(0, 1)
