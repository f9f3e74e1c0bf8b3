"""An objective on copies of its matrices in half precision, all of them made at once."""

import torch
from torch import Tensor, nn

from memtrain.objectives.objective import Objective
from memtrain.shapes import Batch, Losses


class _Copy(torch.autograd.Function):
    """All weights in another precision in one kernel, and back go their gradients in one."""

    @staticmethod
    def forward(ctx, kind: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kinds = [weight.dtype for weight in weights]
        return tuple(_as(weights, [kind] * len(weights)))

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        there = [index for index, gradient in enumerate(gradients) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        out: list[Tensor | None] = [None] * len(gradients)
        for index, gradient in zip(there, _as(given, [ctx.kinds[i] for i in there]), strict=True):
            out[index] = gradient
        return None, *out


def _as(tensors, kinds: list[torch.dtype]) -> list[Tensor]:
    out = [torch.empty_like(t, dtype=kind) for t, kind in zip(tensors, kinds, strict=True)]
    if out:
        torch._foreach_copy_(out, list(tensors))
    return out


class OnCopies:
    """`objective(batch, generator)`; autocast would cast each weight alone, where it is used.

    The same numbers, as long as every matrix is used once: of several uses the gradients would be
    added up in half precision.
    """

    def __init__(self, objective: Objective, kind: torch.dtype = torch.bfloat16) -> None:
        self.objective = objective
        self.kind = kind
        self.weights = {
            f"{name}.weight": module.weight
            for name, module in objective.named_modules()
            if isinstance(module, nn.Linear) and module.weight.requires_grad
        }

    def __call__(self, batch: Batch, generator: torch.Generator) -> Losses:
        copies = _Copy.apply(self.kind, *self.weights.values())
        named = dict(zip(self.weights, copies, strict=True))
        return torch.func.functional_call(self.objective, named, (batch, generator))
