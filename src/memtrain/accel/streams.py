"""Less idle time in a captured step: weights cast in bulk, independent work on its own stream."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memtrain.objectives.base import Objective, Overlap
from memtrain.shapes import Batch, Losses


class StreamOverlap(Overlap):
    """Streams of their own: short kernels fill what long ones leave idle, urgent ones go first."""

    def __init__(self) -> None:
        self.lanes: dict[bool, torch.cuda.Stream] = {}

    @contextmanager
    def __call__(self, urgent: bool = False) -> Iterator[None]:
        if urgent not in self.lanes:
            self.lanes[urgent] = torch.cuda.Stream(priority=-3 if urgent else 0)
        stream = self.lanes[urgent]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        for stream in self.lanes.values():
            torch.cuda.current_stream().wait_stream(stream)


class _Copy(torch.autograd.Function):
    """All weights in other precisions in few kernels, and so go their gradients back."""

    @staticmethod
    def forward(ctx, kinds: list[torch.dtype], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kinds = [weight.dtype for weight in weights]
        return tuple(_as(weights, kinds))

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        there = [index for index, gradient in enumerate(gradients) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        out: list[Tensor | None] = [None] * len(gradients)
        for index, gradient in zip(there, _as(given, [ctx.kinds[i] for i in there]), strict=True):
            out[index] = gradient
        return None, *out


def _as(tensors: Sequence[Tensor], kinds: Sequence[torch.dtype]) -> list[Tensor]:
    """The tensors in those precisions; one that has its own already stays itself.

    Each way of casting has its own call: a list of mixed ones torch copies one by one.
    """
    out = list(tensors)
    ways: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
        if tensor.dtype != kind:
            ways.setdefault((tensor.dtype, kind), []).append(index)
    for (_, kind), indices in ways.items():
        copies = [torch.empty_like(tensors[index], dtype=kind) for index in indices]
        torch._foreach_copy_(copies, [tensors[index] for index in indices])
        for index, copy in zip(indices, copies, strict=True):
            out[index] = copy
    return out


class CastWeights:
    """`objective(batch, generator)`; autocast would cast each weight alone, where it is used.

    The same numbers, as long as every weight is used once: of several uses the gradients would be
    added up in half precision.
    """

    def __init__(self, objective: Objective, kind: torch.dtype = torch.bfloat16) -> None:
        self.objective = objective
        self.weights: dict[str, Tensor] = {}
        self.kinds: list[torch.dtype] = []
        for name, module in objective.named_modules():
            if isinstance(module, nn.Linear | nn.RMSNorm):
                for part, weight in module.named_parameters(recurse=False):
                    if weight.requires_grad:
                        self.weights[f"{name}.{part}"] = weight
                        # Vectors are rounded where they are used; their gradients are not.
                        self.kinds.append(kind if weight.dim() > 1 else weight.dtype)

    def __call__(self, batch: Batch, generator: torch.Generator) -> Losses:
        copies = _Copy.apply(self.kinds, *self.weights.values())
        named = dict(zip(self.weights, copies, strict=True))
        return torch.func.functional_call(self.objective, named, (batch, generator))
