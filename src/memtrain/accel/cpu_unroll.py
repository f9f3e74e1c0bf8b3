"""A Transformer cell unrolled as one function, its gradient written out.

On a CPU a step of a small cell is a hundred short operations, and autograd's records of them cost
more than the numbers. Here nothing is recorded: what the tokens alone decide is computed for all
steps before the loop, and the gradients of weights, which no step waits for, for all steps after
it. Only the memory goes from step to step. The mathematics is that of `TransformerCell`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, rms_norm

from memtrain.accel import cpu_transformer as written_out
from memtrain.accel.cpu_transformer import (
    Kept,
    Shape,
    Weights,
    along,
    fold,
    normalize,
    total_product,
)
from memtrain.models.cells import TransformerCell
from memtrain.models.layers import RMS_EPSILON, Block


class FusedUnroll:
    """Stands in for the loop over a Transformer cell, with and without autograd."""

    def serves(self, cell: nn.Module, memory: Tensor) -> bool:
        """Whether it is our cell, in one precision throughout: casts are not written out."""
        return (
            type(cell) is TransformerCell
            and cell.embedding.weight.dtype == memory.dtype
            and not torch.is_autocast_enabled(memory.device.type)
        )

    def __call__(
        self, cell: nn.Module, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        assert isinstance(cell, TransformerCell)
        rows, steps = inputs.shape
        blocks = [block for block in cell.stack.blocks if isinstance(block, Block)]
        weights = [fold(block) for block in blocks]
        heads = blocks[0].attention.heads
        kept = steps if torch.is_grad_enabled() else 1
        shape = Shape(steps, rows, cell.memory_tokens, heads, kept)
        cell.stack.rotary.reserve(cell.memory_tokens + 1)
        memories = _Unrolled.apply(
            shape,
            cell.stack.rotary.phase(cell.memory_tokens + 1, memory.dtype),
            memory.transpose(0, 1).flatten(0, 1),  # (M·B, D)
            embedding(inputs.T, cell.embedding.weight) if len(blocks) > 1 else None,
            _projected(cell.embedding.weight, inputs.T, weights[0].project_in),
            cell.from_memory.weight.T if isinstance(cell.from_memory, nn.Linear) else None,
            _last(cell),
            *(weight for block in weights for weight in block),
        )
        assert isinstance(memories, Tensor)
        return memories.unflatten(1, (cell.memory_tokens, rows)).permute(2, 0, 1, 3)


def _projected(
    table: Float[Tensor, "V W"], inputs: Int[Tensor, "T B"], project_in: Float[Tensor, "3 W I"]
) -> Float[Tensor, "T 3 B I"]:
    """Queries, keys and values of all steps' tokens in the first block: those of all symbols,
    looked up, where there are fewer symbols than tokens."""
    few = len(table) < inputs.numel()
    rows = table if few else embedding(inputs.flatten(), table)
    normed = rms_norm(rows, (rows.shape[-1],), eps=RMS_EPSILON)
    projected = torch.bmm(normed.expand(3, -1, -1), project_in)
    if not few:
        return projected.unflatten(1, inputs.shape).transpose(0, 1)
    projected = embedding(inputs, projected.transpose(0, 1).flatten(1))
    return projected.unflatten(-1, (3, -1)).transpose(1, 2)


def _last(cell: TransformerCell) -> Float[Tensor, "W D"] | Float[Tensor, " W"]:
    """The last norm's weight, in the projection to the memory if there is one."""
    gain, out = cell.stack.norm.weight, cell.to_memory
    return (out.weight * gain).T if isinstance(out, nn.Linear) else gain


class _Unrolled(torch.autograd.Function):
    """Memories (T, M·B, D) of all steps."""

    @staticmethod
    def forward(
        ctx,
        shape: Shape,
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
        turned = torch.view_as_real(torch.view_as_complex(pairs) * phase[-1])
        turned = torch.cat([turned.flatten(-3), projected[:, 2:]], dim=1)  # (T, 3, B, I)
        into = blocks[0].kept.projected[:, :, -1]
        if shape.kept == shape.steps:
            into.copy_(turned)
        new, rows = memory.new_empty, len(memory)
        normed, scale = new(shape.kept, rows, len(last)), new(shape.kept, rows, 1)
        memories, memory_scale = new(shape.steps, *memory.shape), new(shape.kept, rows, 1)
        views = [part.unbind() for part in (normed, scale, memory_scale)]
        state, epsilon = memory, memory.new_tensor(RMS_EPSILON)
        for step, after in enumerate(memories.unbind()):
            at = min(step, shape.kept - 1)
            if shape.kept < shape.steps:
                into[0].copy_(turned[step])
            x = state if from_memory is None else state @ from_memory
            for block in blocks:
                token = tokens[step] if tokens is not None and block.first else None
                x = block.forward(at, x, token)
            unit, unit_scale, after_scale = (view[at] for view in views)
            normalize(x, epsilon, unit, unit_scale)
            made = unit * last if last.dim() == 1 else unit @ last
            normalize(made, epsilon, after, after_scale)
            state = after
        ctx.shape, ctx.phase, ctx.count = shape, phase, len(flat)
        everything = [part for block in blocks for part in block.kept]
        ctx.save_for_backward(
            memory, from_memory, last, memories, normed, scale, memory_scale, *flat, *everything
        )
        return memories

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        shape, phase = ctx.shape, ctx.phase
        memory, from_memory, last, memories, normed, scale, memory_scale, *rest = ctx.saved_tensors
        blocks = _blocks(shape, phase, rest[: ctx.count], rest[ctx.count :])
        for block in blocks:
            block.prepare_backward()
        of_made, of_x = torch.empty_like(memories), torch.empty_like(blocks[0].kept.normed)
        views = (gradient, memories, memory_scale, of_made, normed, scale, of_x)
        views = list(zip(*(view.unbind() for view in views), strict=True))
        back = last.mT if last.dim() == 2 else None
        # Where each block's gradient goes: to the block before it.
        below = [of_x.unbind(), *(block.of_out_at for block in blocks)]
        passed = torch.zeros_like(memory)
        for at in reversed(range(shape.steps)):
            given, after, after_scale, made, unit, unit_scale, x = views[at]
            torch.mul(along(given + passed, after), after_scale, out=made)
            of_unit = made * last if back is None else made @ back
            torch.mul(along(of_unit, unit), unit_scale, out=below[-1][at])
            for i in reversed(range(len(blocks))):
                blocks[i].backward(at, below[i][at])
            passed = x if from_memory is None else x @ from_memory.mT
        token = blocks[0].of_projected[:, :, -1]  # (T, 3, B, I)
        pairs = torch.view_as_complex(token[:, :2].unflatten(-1, (shape.heads, -1, 2)))
        pairs.mul_(phase[-1].conj())
        of_from_memory = None
        if from_memory is not None:
            of_from_memory = total_product(torch.cat([memory[None], memories[:-1]]), of_x)
        return (
            None,
            None,
            passed,
            blocks[0].of_attended[:, blocks[0].rows_in :] if len(blocks) > 1 else None,
            token,
            of_from_memory,
            (normed * of_made).sum((0, 1)) if back is None else total_product(normed, of_made),
            *(weight for block in blocks for weight in block.weight_gradients()),
        )


def _blocks(
    shape: Shape,
    phase: Tensor,
    flat: tuple[Tensor, ...] | list[Tensor],
    kept: list[Tensor] | None = None,
) -> list[written_out.Block]:
    count = len(flat) // len(Weights._fields)
    size, held = len(Weights._fields), len(Kept._fields)
    return [
        written_out.Block(
            shape,
            phase,
            Weights(*flat[i * size : (i + 1) * size]),
            first=i == 0,
            last=i == count - 1,
            kept=Kept(*kept[i * held : (i + 1) * held]) if kept else None,
        )
        for i in range(count)
    ]
