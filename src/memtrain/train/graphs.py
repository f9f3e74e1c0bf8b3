"""Graphs of GPU work, captured once and replayed: launched one by one, short kernels leave it idle.

A graph reads the weights where they lie, so it stays right while they train.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

WARMUP = 3
"""Steps taken as usual before one is captured: they compile, allocate and choose kernels."""
CHUNK = 16
"""Steps in one graph."""


class GraphedUnroll:
    """`RNN.unroll` without autograd; one graph for each batch size."""

    def __init__(self, cell: nn.Module, precision: Callable[[], AbstractContextManager]) -> None:
        self.cell = cell
        self.precision = precision
        self.chunks: dict[torch.Size, _Chunk] = {}

    def __call__(
        self, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        chunk = self.chunks.get(memory.shape)
        if chunk is None:
            chunk = self.chunks[memory.shape] = _Chunk(self.cell, memory, self.precision)
        length = inputs.shape[1]
        memories = [
            chunk.run(part, memory if not i else None)
            for i, part in enumerate(inputs.split(CHUNK, dim=1))
        ]
        return torch.cat(memories)[:length].transpose(0, 1)


class _Chunk:
    """CHUNK steps on fixed buffers."""

    def __init__(
        self,
        cell: nn.Module,
        memory: Float[Tensor, "B M D"],
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        self.memory = memory.clone()
        self.tokens = torch.zeros(CHUNK, len(memory), dtype=torch.long, device=memory.device)
        self.out = memory.new_empty(CHUNK, *memory.shape)
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(2):  # compile and warm up outside the capture
                with precision():
                    cell(self.memory, self.tokens[0])
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad(), torch.cuda.graph(self.graph), precision():
            state = self.memory
            for step in range(CHUNK):
                state = cell(state, self.tokens[step]).to(self.out.dtype)
                self.out[step] = state
            self.memory.copy_(state)

    def run(
        self, tokens: Int[Tensor, "B K"], memory: Float[Tensor, "B M D"] | None
    ) -> Float[Tensor, "C B M D"]:
        """CHUNK memories; those after the last token are idle."""
        if memory is not None:
            self.memory.copy_(memory)
        self.tokens[: tokens.shape[1]] = tokens.T
        self.graph.replay()
        return self.out.clone()


@runtime_checkable
class StepOwner(Protocol):
    """What a captured training step needs of its trainer."""

    generator: torch.Generator

    @property
    def capturable(self) -> bool: ...

    def compute(self) -> dict[str, Tensor]: ...


class GraphedStep:
    """A whole training step, drawing of windows and optimizer included, as one graph.

    The first steps run as usual; they count. What is returned is overwritten by the next step.
    """

    def __init__(self, trainer: StepOwner) -> None:
        self.trainer = trainer
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.metrics: dict[str, Tensor] = {}
        self.side = torch.cuda.Stream()

    def __call__(self) -> dict[str, Tensor]:
        if self.taken < WARMUP:
            self.taken += 1
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                metrics = self.trainer.compute()
            torch.cuda.current_stream().wait_stream(self.side)
            return metrics
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.trainer.generator)
            with torch.cuda.graph(self.graph):
                self.metrics = self.trainer.compute()
        self.graph.replay()
        return self.metrics
