"""Graphs of GPU work, captured once and replayed: launched one by one, short kernels leave it idle.

A graph reads the weights where they lie, so it stays right while they train.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.nn.blocks import FastStack, Stack
from memtrain.nn.rnn import RNN, Choose

WARMUP = 3
"""Steps taken as usual before one is captured: they compile, allocate and choose kernels."""
CHUNK = 16
"""Steps in one graph."""


class FastStacks:
    """The stacks of an RNN and what stands in for them while it is rolled out."""

    def __init__(self, stacks: dict[Stack, FastStack]) -> None:
        self.stacks = stacks

    def refresh(self) -> None:
        """Take over weights that have trained since."""
        for fast in self.stacks.values():
            fast.refresh()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Only rollouts may use them: elsewhere nobody would refresh them."""
        for stack, fast in self.stacks.items():
            stack.fast = fast
        try:
            yield
        finally:
            for stack in self.stacks:
                stack.fast = None


class GraphedUnroll:
    """`RNN.unroll` without autograd; one graph for each batch size."""

    def __init__(
        self,
        cell: nn.Module,
        stacks: FastStacks,
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        self.cell = cell
        self.stacks = stacks
        self.precision = precision
        self.chunks: dict[torch.Size, _Chunk] = {}

    def __call__(
        self, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        self.stacks.refresh()
        if torch.cuda.is_current_stream_capturing():  # a graph holds no graphs
            with self.stacks.active(), self.precision():
                return torch.stack(self._steps(inputs.T.contiguous().unbind(), memory), dim=1)
        chunk = self.chunks.get(memory.shape)
        if chunk is None:
            with self.stacks.active(), torch.no_grad():
                chunk = self.chunks[memory.shape] = _Chunk(self._steps, memory, self.precision)
        length = inputs.shape[1]
        memories = [
            chunk.run(part, memory if not i else None)
            for i, part in enumerate(inputs.split(CHUNK, dim=1))
        ]
        return torch.cat(memories)[:length].transpose(0, 1)

    def _steps(
        self, tokens: Sequence[Int[Tensor, " B"]], memory: Float[Tensor, "B M D"]
    ) -> list[Float[Tensor, "B M D"]]:
        memories = []
        for token in tokens:
            memory = self.cell(memory, token).to(memory.dtype)
            memories.append(memory)
        return memories


class _Chunk:
    """CHUNK steps on fixed buffers."""

    def __init__(
        self,
        steps: Callable[[Sequence[Tensor], Tensor], list[Tensor]],
        memory: Float[Tensor, "B M D"],
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        self.memory = memory.clone()
        self.tokens = torch.zeros(CHUNK, len(memory), dtype=torch.long, device=memory.device)
        self.graph = torch.cuda.CUDAGraph()
        _warm_up(lambda: steps(self.tokens[:1].unbind(), self.memory), precision)
        with torch.cuda.graph(self.graph), precision():
            self.out = torch.stack(steps(self.tokens.unbind(), self.memory))
            self.memory.copy_(self.out[-1])

    def run(
        self, tokens: Int[Tensor, "B K"], memory: Float[Tensor, "B M D"] | None
    ) -> Float[Tensor, "C B M D"]:
        """CHUNK memories; those after the last token are idle."""
        if memory is not None:
            self.memory.copy_(memory)
        self.tokens[: tokens.shape[1]] = tokens.T
        self.graph.replay()
        return self.out.clone()


class GraphedWrite:
    """`RNN.write`; one graph for each batch size and way of choosing tokens."""

    def __init__(
        self, rnn: RNN, stacks: FastStacks, precision: Callable[[], AbstractContextManager]
    ) -> None:
        self.rnn = rnn
        self.stacks = stacks
        self.precision = precision
        self.chunks: dict[tuple[torch.Size, Choose], _WriteChunk] = {}

    def __call__(
        self, memory: Float[Tensor, "B M D"], chances: Float[Tensor, "T B"], choose: Choose
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B M D"]]:
        """The tokens, and the memory after the last of them."""
        self.stacks.refresh()
        key = (memory.shape, choose)
        chunk = self.chunks.get(key)
        if chunk is None:
            with self.stacks.active(), torch.no_grad():
                chunk = self.chunks[key] = _WriteChunk(self._step, memory, choose, self.precision)
        tokens = []
        for part in chances.split(CHUNK):
            written, memory = chunk.run(part, memory)
            tokens.append(written)
        return torch.cat(tokens).T, memory

    def _step(self, memory: Tensor, chance: Tensor, choose: Choose) -> tuple[Tensor, Tensor]:
        token = choose(self.rnn.predict(memory), chance)
        return token, self.rnn.cell(memory, token).to(memory.dtype)


class _WriteChunk:
    """CHUNK written tokens on fixed buffers."""

    def __init__(
        self,
        step: Callable[[Tensor, Tensor, Choose], tuple[Tensor, Tensor]],
        memory: Float[Tensor, "B M D"],
        choose: Choose,
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        self.memory = memory.clone()
        self.chances = torch.rand(CHUNK, len(memory), device=memory.device)
        self.graph = torch.cuda.CUDAGraph()
        _warm_up(lambda: step(self.memory, self.chances[0], choose), precision)
        with torch.cuda.graph(self.graph), precision():
            state, tokens, memories = self.memory, [], []
            for chance in self.chances.unbind():
                token, state = step(state, chance, choose)
                tokens.append(token)
                memories.append(state)
            self.tokens, self.memories = torch.stack(tokens), memories

    def run(
        self, chances: Float[Tensor, "K B"], memory: Float[Tensor, "B M D"]
    ) -> tuple[Int[Tensor, "K B"], Float[Tensor, "B M D"]]:
        """As many tokens as there are chances; those after them are idle."""
        count = len(chances)
        self.memory.copy_(memory)
        self.chances[:count] = chances
        self.graph.replay()
        return self.tokens[:count].clone(), self.memories[count - 1].clone()


def _warm_up(work: Callable[[], object], precision: Callable[[], AbstractContextManager]) -> None:
    """Compile, allocate and choose kernels outside the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            with precision():
                work()
    torch.cuda.current_stream().wait_stream(side)


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
        # Before others: what is long and not urgent runs beside it (objectives/beside.py).
        self.side = torch.cuda.Stream(priority=-1)

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
            with torch.cuda.graph(self.graph, stream=self.side):
                self.metrics = self.trainer.compute()
        self.graph.replay()
        return self.metrics
