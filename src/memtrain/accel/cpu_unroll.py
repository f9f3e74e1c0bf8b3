"""Whole-sequence unrolling of a Transformer cell on a CPU.

One step of a small Transformer cell is a hundred short operations, and recording them for
autograd costs more than the arithmetic. Here the unrolled cell is one function with a written-out
gradient. Whatever depends on the tokens alone is computed for all steps before the loop, and the
gradients of the weights for all steps after it; only the memory is passed from step to step. The
mathematics is that of `TransformerCell`.

Rows are positions first, (L·B, W): the heads of all sequences are then one axis, and attention is
two batched products. The activations that the gradient needs are stored in buffers of all steps, so
that the gradient of each weight is one product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm

from memtrain.models.cells import TransformerCell
from memtrain.models.layers import (
    RMS_EPSILON,
    Block,
    ValueEmbedding,
    refuse_second_derivatives,
)
from memtrain.shapes import Inputs


class FusedUnroll:
    """Replaces the loop over a Transformer cell, with or without a gradient."""

    def serves(self, cell: nn.Module, memory: Tensor) -> bool:
        """Whether it is our cell, all in one precision: casts are not written out."""
        return (
            type(cell) is TransformerCell
            and cell.embedding.weight.dtype == memory.dtype
            and not torch.is_autocast_enabled(memory.device.type)
        )

    def __call__(
        self, cell: nn.Module, inputs: Inputs, memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        assert isinstance(cell, TransformerCell)
        rows, steps = inputs.shape[:2]
        blocks = [block for block in cell.stack.blocks if isinstance(block, Block)]
        weights = [_fold(block) for block in blocks]
        stored = steps if torch.is_grad_enabled() else 1
        shape = _Shape(steps, rows, cell.memory_tokens, blocks[0].attention.heads, stored)
        cell.stack.rotary.reserve(cell.memory_tokens + 1)
        read = inputs.transpose(0, 1)
        if isinstance(cell.embedding, ValueEmbedding):
            tokens = cell.embedding(read)  # (T, B, W)
            projected = _project(tokens.flatten(0, 1), weights[0].project_in)
            projected = projected.unflatten(1, read.shape[:2]).transpose(0, 1)
        else:
            tokens = embedding(read, cell.embedding.weight) if len(blocks) > 1 else None
            projected = _projected(cell.embedding.weight, read, weights[0].project_in)
        memories = _Unrolled.apply(
            shape,
            cell.stack.rotary.phase(cell.memory_tokens + 1, memory.dtype),
            memory.transpose(0, 1).flatten(0, 1),  # (M·B, D)
            tokens if len(blocks) > 1 else None,
            projected,
            cell.from_memory.weight.T if isinstance(cell.from_memory, nn.Linear) else None,
            _last_gain(cell),
            *(weight for block in weights for weight in block),
        )
        assert isinstance(memories, Tensor)
        return memories.unflatten(1, (cell.memory_tokens, rows)).permute(2, 0, 1, 3)


def _projected(
    table: Float[Tensor, "V W"], inputs: Int[Tensor, "T B"], project_in: Float[Tensor, "3 W I"]
) -> Float[Tensor, "T 3 B I"]:
    """Queries, keys and values of all steps' tokens in the first block.

    Where there are fewer symbols than tokens, those of all symbols are computed and looked up.
    """
    few = len(table) < inputs.numel()
    rows = table if few else embedding(inputs.flatten(), table)
    projected = _project(rows, project_in)
    if not few:
        return projected.unflatten(1, inputs.shape).transpose(0, 1)
    projected = embedding(inputs, projected.transpose(0, 1).flatten(1))
    return projected.unflatten(-1, (3, -1)).transpose(1, 2)


def _project(
    rows: Float[Tensor, "N W"], project_in: Float[Tensor, "3 W I"]
) -> Float[Tensor, "3 N I"]:
    normed = rms_norm(rows, (rows.shape[-1],), eps=RMS_EPSILON)
    return torch.bmm(normed.expand(3, -1, -1), project_in)


def _last_gain(cell: TransformerCell) -> Float[Tensor, "W D"] | Float[Tensor, " W"]:
    """The last norm's weight, folded into the projection to the memory if there is one."""
    gain, out = cell.stack.norm.weight, cell.to_memory
    return (out.weight * gain).T if isinstance(out, nn.Linear) else gain


class _Unrolled(torch.autograd.Function):
    """The memories of all steps, (T, M·B, D)."""

    @staticmethod
    def forward(
        ctx,
        shape: "_Shape",
        phase: Tensor,
        memory: Float[Tensor, "R D"],
        tokens: Float[Tensor, "T B W"] | None,
        projected: Float[Tensor, "T 3 B I"],
        from_memory: Float[Tensor, "D W"] | None,
        last: Tensor,
        *flat: Tensor,
    ) -> Tensor:
        blocks = _blocks(shape, phase, flat)
        for block in blocks:
            block.prepare()
        pairs = projected[:, :2].unflatten(-1, (shape.heads, -1, 2)).contiguous()
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * phase[-1])
        rotated = torch.cat([rotated.flatten(-3), projected[:, 2:]], dim=1)  # (T, 3, B, I)
        token_qkv = blocks[0].stored.projected[:, :, -1]
        if shape.stored == shape.steps:
            token_qkv.copy_(rotated)
        new, rows = memory.new_empty, len(memory)
        normed, scale = new(shape.stored, rows, len(last)), new(shape.stored, rows, 1)
        memories, memory_scale = new(shape.steps, *memory.shape), new(shape.stored, rows, 1)
        views = [part.unbind() for part in (normed, scale, memory_scale)]
        state, epsilon = memory, memory.new_tensor(RMS_EPSILON)
        for step, after in enumerate(memories.unbind()):
            at = min(step, shape.stored - 1)
            if shape.stored < shape.steps:
                token_qkv[0].copy_(rotated[step])
            x = state if from_memory is None else state @ from_memory
            for block in blocks:
                token = tokens[step] if tokens is not None and block.first else None
                x = block.forward(at, x, token)
            unit, unit_scale, after_scale = (view[at] for view in views)
            _normalize(x, epsilon, unit, unit_scale)
            made = unit * last if last.dim() == 1 else unit @ last
            _normalize(made, epsilon, after, after_scale)
            state = after
        ctx.shape, ctx.phase, ctx.count = shape, phase, len(flat)
        stored = [part for block in blocks for part in block.stored]
        ctx.save_for_backward(
            memory, from_memory, last, memories, normed, scale, memory_scale, *flat, *stored
        )
        return memories

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        refuse_second_derivatives("the fused unroll")
        shape, phase = ctx.shape, ctx.phase
        memory, from_memory, last, memories, normed, scale, memory_scale, *rest = ctx.saved_tensors
        blocks = _blocks(shape, phase, rest[: ctx.count], rest[ctx.count :])
        for block in blocks:
            block.prepare_backward()
        of_made, of_x = torch.empty_like(memories), torch.empty_like(blocks[0].stored.normed)
        views = (gradient, memories, memory_scale, of_made, normed, scale, of_x)
        views = list(zip(*(view.unbind() for view in views), strict=True))
        back = last.mT if last.dim() == 2 else None
        # Each block writes its gradient to the buffer of the block before it.
        below = [of_x.unbind(), *(block.of_out_at for block in blocks)]
        passed = torch.zeros_like(memory)
        for at in reversed(range(shape.steps)):
            given, after, after_scale, made, unit, unit_scale, x = views[at]
            torch.mul(_without_radial(given + passed, after), after_scale, out=made)
            of_unit = made * last if back is None else made @ back
            torch.mul(_without_radial(of_unit, unit), unit_scale, out=below[-1][at])
            for i in reversed(range(len(blocks))):
                blocks[i].backward(at, below[i][at])
            passed = x if from_memory is None else x @ from_memory.mT
        token = blocks[0].of_projected[:, :, -1]  # (T, 3, B, I)
        pairs = torch.view_as_complex(token[:, :2].unflatten(-1, (shape.heads, -1, 2)))
        pairs.mul_(phase[-1].conj())
        of_from_memory = None
        if from_memory is not None:
            of_from_memory = _total_product(torch.cat([memory[None], memories[:-1]]), of_x)
        return (
            None,
            None,
            passed,
            blocks[0].of_attended[:, blocks[0].rows_in :] if len(blocks) > 1 else None,
            token,
            of_from_memory,
            (normed * of_made).sum((0, 1)) if back is None else _total_product(normed, of_made),
            *(weight for block in blocks for weight in block.weight_gradients()),
        )


def _blocks(
    shape: "_Shape", phase: Tensor, flat: Sequence[Tensor], stored: Sequence[Tensor] = ()
) -> list["_UnrolledBlock"]:
    size, kinds = len(_Weights._fields), len(_Stored._fields)
    weights = [_Weights(*flat[i : i + size]) for i in range(0, len(flat), size)]
    buffers = [_Stored(*stored[i : i + kinds]) for i in range(0, len(stored), kinds)]
    ends = [(i == 0, i == len(weights) - 1) for i in range(len(weights))]
    return [
        _UnrolledBlock(shape, phase, weights[i], *ends[i], *buffers[i : i + 1])
        for i in range(len(weights))
    ]


class _Weights(NamedTuple):
    """A block's matrices as right factors; norms' weights and attention's scale are folded in."""

    project_in: Float[Tensor, "3 W I"]
    project_out: Float[Tensor, "I W"]
    up: Float[Tensor, "W F"]
    up_bias: Float[Tensor, " F"]
    down: Float[Tensor, "F W"]
    down_bias: Float[Tensor, " W"]


def _fold(block: Block) -> _Weights:
    """Reorder queries and keys so that the two numbers of a pair that RoPE rotates are neighbours.

    A rotation is then a product of complex numbers; the scores do not change.
    """
    attention, up, down = block.attention, block.mlp[0], block.mlp[2]
    assert isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    size = attention.head_dim
    query, key, value = (attention.project_in.weight * block.attention_norm.weight).chunk(3)
    query, key = (
        part.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)
        for part in (query / size**0.5, key)
    )
    return _Weights(
        torch.stack([query, key, value]).transpose(1, 2),
        attention.project_out.weight.T,
        (up.weight * block.mlp_norm.weight).T,
        up.bias,
        down.weight.T,
        down.bias,
    )


class _Shape(NamedTuple):
    """The sizes of an unrolling, and for how many steps activations are stored."""

    steps: int
    rows: int
    memory_tokens: int
    heads: int
    stored: int


class _Stored(NamedTuple):
    """The activations of each step that the gradient needs."""

    normed: Float[Tensor, "T R W"]
    scale: Float[Tensor, "T R 1"]
    projected: Float[Tensor, "T 3 L B I"]
    attention: Float[Tensor, "T N K L"]
    mixed: Float[Tensor, "T Q I"]
    mlp_normed: Float[Tensor, "T Q W"]
    mlp_scale: Float[Tensor, "T Q 1"]
    hidden: Float[Tensor, "T Q F"]
    active: Float[Tensor, "T Q F"]


class _UnrolledBlock:
    """One block of the unrolled cell. Its input is [memory, token]. The first block gets only the
    memory's rows, and the token's queries, keys and values in `stored.projected`; the last block
    returns only the memory's rows.

    All views of all steps are made before the loop, where they would take a third of the time.
    """

    def __init__(
        self,
        shape: _Shape,
        phase: Complex[Tensor, "L 1 1 P"],
        weights: _Weights,
        first: bool,
        last: bool,
        stored: _Stored | None = None,
    ) -> None:
        self.shape, self.weights, self.first = shape, weights, first
        self.positions = shape.memory_tokens + 1
        self.given = self.positions - first
        self.queries = self.positions - last
        self.rows_in, self.rows_out = self.given * shape.rows, self.queries * shape.rows
        # Position 0 is not rotated.
        self.phase = phase[: self.given] if self.given > 1 else None
        self.stored = stored or self._buffers()
        views = zip(*(part.unbind() for part in self.stored), strict=True)
        self.at = [_Stored(*parts) for parts in views]
        self.heads = self._all_heads(self.stored.projected)
        self.epsilon = weights.up.new_tensor(RMS_EPSILON)

    def _buffers(self) -> _Stored:
        _, width, inner = self.weights.project_in.shape
        hidden, new = self.weights.up.shape[1], self.weights.up.new_empty
        steps, rows = self.shape.stored, self.shape.rows
        return _Stored(
            new(steps, self.rows_in, width),
            new(steps, self.rows_in, 1),
            new(steps, 3, self.positions, rows, inner),
            new(steps, rows * self.shape.heads, self.queries, self.positions),
            new(steps, self.rows_out, inner),
            new(steps, self.rows_out, width),
            new(steps, self.rows_out, 1),
            new(steps, self.rows_out, hidden),
            new(steps, self.rows_out, hidden),
        )

    def _all_heads(self, projected: Float[Tensor, "T 3 L B I"]) -> list[tuple[Tensor, ...]]:
        """Per step: queries, keys and values, (N, L, E), and the pairs to rotate."""
        steps, rows = len(projected), self.shape.rows * self.shape.heads
        heads = projected.view(steps, 3, self.positions, rows, -1).transpose(2, 3)
        query, key, value = heads.unbind(1)
        pairs = projected[:, :2, : self.given].unflatten(-1, (self.shape.heads, -1, 2))
        parts = query[:, :, : self.queries], key, value, torch.view_as_complex(pairs)
        return list(zip(*(part.unbind() for part in parts), strict=True))

    def _rows(self, x: Float[Tensor, "*T Q I"]) -> Float[Tensor, "*T N K E"]:
        """Rows as heads."""
        rows = self.shape.rows * self.shape.heads
        return x.view(*x.shape[:-2], self.queries, rows, -1).transpose(-2, -3)

    def prepare(self) -> None:
        """Make the views of the forward pass."""
        stored = self.stored
        self.normed_thrice = stored.normed[:, None].expand(-1, 3, -1, -1).unbind()
        projected = stored.projected[:, :, : self.given]
        self.projected = projected.view(self.shape.stored, 3, self.rows_in, -1).unbind()
        self.mixed = self._rows(stored.mixed).unbind()

    def forward(
        self, at: int, x: Float[Tensor, "R W"], token: Float[Tensor, "B W"] | None
    ) -> Float[Tensor, "Q W"]:
        """Step `at`; `token` completes the first block's stream if another block follows."""
        stored, weights = self.at[at], self.weights
        query, key, value, pairs = self.heads[at]
        _normalize(x, self.epsilon, stored.normed, stored.scale)
        torch.bmm(self.normed_thrice[at], weights.project_in, out=self.projected[at])
        if self.phase is not None:
            pairs.mul_(self.phase)
        torch.softmax(torch.bmm(query, key.mT), -1, out=stored.attention)
        torch.bmm(stored.attention, value, out=self.mixed[at])
        x = x[: self.rows_out] if token is None else torch.cat([x, token])
        x = torch.addmm(x, stored.mixed, weights.project_out)
        _normalize(x, self.epsilon, stored.mlp_normed, stored.mlp_scale)
        torch.addmm(weights.up_bias, stored.mlp_normed, weights.up, out=stored.hidden)
        torch._C._nn.gelu(stored.hidden, out=stored.active)  # pyright: ignore[reportAttributeAccessIssue]
        return x.add_(torch.addmm(weights.down_bias, stored.active, weights.down))

    def prepare_backward(self) -> None:
        """Make the buffers and views of the backward pass."""
        stored = self.stored
        slope = torch.ops.aten.gelu_backward(torch.ones_like(stored.hidden), stored.hidden)
        self.slope = slope.unbind()
        self.of_projected = torch.zeros_like(stored.projected)
        self.of_heads = self._all_heads(self.of_projected)
        given = self.of_projected[:, :, : self.given].flatten(2, 3)
        self.of_given = [rows.unbind() for rows in given.unbind()]
        self.of_attended, self.of_out = (torch.empty_like(stored.mlp_normed) for _ in range(2))
        self.of_hidden = torch.empty_like(stored.hidden)
        self.of_attended_at, self.of_out_at = self.of_attended.unbind(), self.of_out.unbind()
        self.of_hidden_at, weights = self.of_hidden.unbind(), self.weights
        self.back_in, self.back_out = weights.project_in.mT.unbind(), weights.project_out.mT
        self.back_up, self.back_down = weights.up.mT, weights.down.mT
        self.back = self.phase.conj().resolve_conj() if self.phase is not None else None

    def backward(self, at: int, out: Float[Tensor, "R W"]) -> Float[Tensor, "R W"]:
        """From the gradient of the result of `forward`, in `of_out`, to that of its `x`."""
        stored, attended = self.at[at], self.of_attended_at[at]
        gradient, hidden = self.of_out_at[at], self.of_hidden_at[at]
        torch.mul(gradient @ self.back_down, self.slope[at], out=hidden)
        normed = _without_radial(hidden @ self.back_up, stored.mlp_normed)
        torch.addcmul(gradient, normed, stored.mlp_scale, out=attended)
        query, key, value, _ = self.heads[at]
        of_query, of_key, of_value, pairs = self.of_heads[at]
        mixed = self._rows(attended @ self.back_out)
        attention = torch.bmm(mixed, value.mT)
        scores = torch._softmax_backward_data(attention, stored.attention, -1, attention.dtype)
        torch.bmm(scores, key, out=of_query)
        torch.bmm(scores.mT, query, out=of_key)
        torch.bmm(stored.attention.mT, mixed, out=of_value)
        if self.back is not None:
            pairs.mul_(self.back)
        of_query, of_key, of_value = self.of_given[at]
        back_query, back_key, back_value = self.back_in
        normed = (of_query @ back_query).addmm_(of_key, back_key).addmm_(of_value, back_value)
        normed = _without_radial(normed, stored.normed)
        if self.rows_out == self.rows_in:
            return torch.addcmul(attended, normed, stored.scale, out=out)
        # The first block gets fewer rows than it returns, the last returns fewer than it gets.
        both = min(self.rows_in, self.rows_out)
        torch.mul(normed, stored.scale, out=out)
        out[:both] += attended[:both]
        return out

    def weight_gradients(self) -> _Weights:
        """The sums over all steps."""
        stored = self.stored
        of_projected = self.of_projected[:, :, : self.given].transpose(0, 1).flatten(1, 3)
        normed = stored.normed.flatten(0, 1).T
        return _Weights(
            torch.bmm(normed.expand(3, -1, -1), of_projected),
            _total_product(stored.mixed, self.of_attended),
            _total_product(stored.mlp_normed, self.of_hidden),
            self.of_hidden.sum((0, 1)),
            _total_product(stored.active, self.of_out),
            self.of_out.sum((0, 1)),
        )


def _normalize(x: Tensor, epsilon: Tensor, normed: Tensor, scale: Tensor) -> None:
    """Write x divided by its root mean square, and one over the latter."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    torch.addcmul(epsilon, length, length, value=1 / x.shape[-1], out=scale).rsqrt_()
    torch.mul(x, scale, out=normed)


def _without_radial(gradient: Float[Tensor, "*rows W"], normed: Tensor) -> Tensor:
    """From the gradient of `normed` to that of x, before scaling: without its radial part."""
    radial = (gradient * normed).sum(-1, keepdim=True)
    return torch.addcmul(gradient, normed, radial, value=-1 / normed.shape[-1])


def _total_product(left: Float[Tensor, "T R W"], right: Float[Tensor, "T R D"]) -> Tensor:
    """The sum over steps and rows, (W, D)."""
    return left.flatten(0, 1).T @ right.flatten(0, 1)
