"""Less idle time in a captured step: work on side streams, weights cast by one kernel."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memtrain.objectives.base import Objective, Overlap
from memtrain.shapes import Batch, Losses


class StreamOverlap(Overlap):
    """Runs the marked work on two side streams; the urgent one has priority."""

    def __init__(self) -> None:
        self.streams: dict[bool, torch.cuda.Stream] = {}

    @contextmanager
    def __call__(self, urgent: bool = False) -> Iterator[None]:
        if urgent not in self.streams:
            self.streams[urgent] = torch.cuda.Stream(priority=-3 if urgent else 0)
        stream = self.streams[urgent]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        for stream in self.streams.values():
            torch.cuda.current_stream().wait_stream(stream)


class CastWeights:
    """`objective(batch, generator)` on bf16 copies of its matrices, all made by one kernel.

    Autocast would cast each matrix by a kernel of its own. The numbers are the same if every weight
    is used once; the gradients of several uses would be added up in bf16.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.weights = {
            f"{name}.{part}": weight
            for name, module in objective.named_modules()
            if isinstance(module, nn.Linear)
            for part, weight in module.named_parameters(recurse=False)
            if weight.dim() > 1 and weight.requires_grad and weight.dtype == torch.float32
        }

    def __call__(self, batch: Batch, generator: torch.Generator) -> Losses:
        copies = _Cast.apply(*self.weights.values())
        named = dict(zip(self.weights, copies, strict=True))
        return torch.func.functional_call(self.objective, named, (batch, generator))


class _Cast(torch.autograd.Function):
    """fp32 tensors to bf16, and their gradients back."""

    @staticmethod
    def forward(ctx, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(weights, torch.bfloat16))

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        given = [gradient for gradient in gradients if gradient is not None]
        wide = iter(_cast(given, torch.float32))
        return tuple(None if gradient is None else next(wide) for gradient in gradients)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies
