"""Graphs of GPU work, captured once and replayed: launched one by one, short kernels leave it idle.

A graph reads the weights where they lie, so it stays right while they train.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.models.cells import FastCell, TransformerCell
from memtrain.models.layers import FastStack, Stack
from memtrain.models.rnn import RNN, Choose
from memtrain.objectives.base import Objective

WARMUP = 3
"""Steps taken as usual before one is captured: they compile, allocate and choose kernels."""
CHUNK = 16
"""Steps in one graph; what is left over is taken in graphs of one step."""


class FastParts:
    """The stacks and cells of an RNN and what stands in for them while it is rolled out."""

    def __init__(
        self, stacks: Mapping[Stack, FastStack], cells: Mapping[TransformerCell, FastCell]
    ) -> None:
        self.stacks = stacks
        self.cells = cells

    def refresh(self) -> None:
        """Take over weights that have trained since."""
        for fast in self.stacks.values():
            fast.refresh()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Only rollouts may use them: elsewhere nobody would refresh them."""
        for stack, fast in self.stacks.items():
            stack.fast = fast
        for cell, fast in self.cells.items():
            cell.fast = fast
        try:
            yield
        finally:
            for part in (*self.stacks, *self.cells):
                part.fast = None


class GraphedUnroll:
    """`RNN.unroll` without autograd; a graph for each batch size."""

    def __init__(
        self,
        cell: nn.Module,
        parts: FastParts,
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        self.cell = cell
        self.parts = parts
        self.precision = precision
        self.chunks: dict[tuple[torch.Size, int, bool], _Chunk] = {}
        self.rehearsing = False
        """Whether kernels are compiled and not launched: a graph would stay empty."""

    def __call__(
        self, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        self.parts.refresh()
        if self.rehearsing:  # all steps launch the same kernels
            with self.parts.active(), self.precision():
                (after,) = self._steps([inputs[:, 0]], memory)
            return after[:, None].expand(-1, inputs.shape[1], -1, -1).contiguous()
        if torch.cuda.is_current_stream_capturing():  # a graph holds no graphs
            with self.parts.active(), self.precision():
                return torch.stack(self._steps(inputs.T.contiguous().unbind(), memory), dim=1)
        memories = []
        for part in inputs.split(chunk_sizes(inputs.shape[1]), dim=1):
            memories.append(self._chunk(memory, part.shape[1]).run(part, memory))
            memory = memories[-1][-1]
        return torch.cat(memories).transpose(0, 1)

    def _chunk(self, memory: Float[Tensor, "B M D"], size: int) -> "_Chunk":
        key = (memory.shape, size, self.cell.training)  # a cell of the user's may have dropout
        if key not in self.chunks:
            with self.parts.active(), torch.no_grad():
                self.chunks[key] = _Chunk(self._steps, memory, size, self.precision)
        return self.chunks[key]

    def _steps(
        self, tokens: Sequence[Int[Tensor, " B"]], memory: Float[Tensor, "B M D"]
    ) -> list[Float[Tensor, "B M D"]]:
        memories = []
        for token in tokens:
            memory = self.cell(memory, token).to(memory.dtype)
            memories.append(memory)
        return memories


def chunk_sizes(length: int) -> list[int]:
    """How many steps each graph of a rollout takes."""
    return [CHUNK] * (length // CHUNK) + [1] * (length % CHUNK)


class _Chunk:
    """Some steps on fixed buffers."""

    def __init__(
        self,
        steps: Callable[[Sequence[Tensor], Tensor], list[Tensor]],
        memory: Float[Tensor, "B M D"],
        size: int,
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        self.memory = memory.clone()
        self.tokens = torch.zeros(size, len(memory), dtype=torch.long, device=memory.device)
        self.graph = torch.cuda.CUDAGraph()
        _warm_up(lambda: steps(self.tokens[:1].unbind(), self.memory), precision)
        with captured(self.graph), precision():
            self.out = torch.stack(steps(self.tokens.unbind(), self.memory))

    def run(
        self, tokens: Int[Tensor, "B K"], memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "K B M D"]:
        """The memories after each token."""
        self.memory.copy_(memory)
        self.tokens.copy_(tokens.T)
        self.graph.replay()
        return self.out.clone()


class GraphedWrite:
    """`RNN.write`; a graph for each batch size and way of choosing tokens."""

    def __init__(
        self,
        rnn: RNN,
        parts: FastParts,
        precision: Callable[[], AbstractContextManager],
        fast_choice: Callable[[Choose], Choose],
    ) -> None:
        self.rnn = rnn
        self.parts = parts
        self.precision = precision
        self.fast_choice = fast_choice
        self.chunks: dict[tuple[torch.Size, Choose, int], _WriteChunk] = {}

    def __call__(
        self, memory: Float[Tensor, "B M D"], uniforms: Float[Tensor, "T B"], choose: Choose
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B M D"]]:
        """The tokens, and the memory after the last of them."""
        self.parts.refresh()
        tokens = []
        for part in uniforms.split(chunk_sizes(len(uniforms))):
            written, memory = self._chunk(memory, choose, len(part)).run(part, memory)
            tokens.append(written)
        return torch.cat(tokens).T, memory

    def _chunk(self, memory: Float[Tensor, "B M D"], choose: Choose, size: int) -> "_WriteChunk":
        key = (memory.shape, choose, size)
        if key not in self.chunks:
            fast = self.fast_choice(choose)
            with self.parts.active(), torch.no_grad():
                self.chunks[key] = _WriteChunk(self._step, memory, fast, size, self.precision)
        return self.chunks[key]

    def _step(self, memory: Tensor, chance: Tensor, choose: Choose) -> tuple[Tensor, Tensor]:
        token = choose(self.rnn.predict(memory), chance)
        return token, self.rnn.cell(memory, token).to(memory.dtype)


class _WriteChunk:
    """Some written tokens on fixed buffers."""

    def __init__(
        self,
        step: Callable[[Tensor, Tensor, Choose], tuple[Tensor, Tensor]],
        memory: Float[Tensor, "B M D"],
        choose: Choose,
        size: int,
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        self.memory = memory.clone()
        self.uniforms = torch.rand(size, len(memory), device=memory.device)
        self.graph = torch.cuda.CUDAGraph()
        _warm_up(lambda: step(self.memory, self.uniforms[0], choose), precision)
        with captured(self.graph), precision():
            state, tokens = self.memory, []
            for chance in self.uniforms.unbind():
                token, state = step(state, chance, choose)
                tokens.append(token)
            self.tokens, self.after = torch.stack(tokens), state

    def run(
        self, uniforms: Float[Tensor, "K B"], memory: Float[Tensor, "B M D"]
    ) -> tuple[Int[Tensor, "K B"], Float[Tensor, "B M D"]]:
        """The tokens, and the memory after them."""
        self.memory.copy_(memory)
        self.uniforms.copy_(uniforms)
        self.graph.replay()
        return self.tokens.clone(), self.after.clone()


def captured(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None
) -> AbstractContextManager:
    """What is launched inside becomes the graph.

    Only this thread is held to what a capture allows: a checkpoint that another one fetches at the
    same time (saving.py) pins memory and waits, which would spoil it.
    """
    return torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")


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
    objective: Objective

    @property
    def capturable(self) -> bool: ...

    def compute(self) -> dict[str, Tensor]: ...

    def rehearse(self) -> None: ...


class GraphedStep:
    """A whole training step, drawing of windows and optimizer included, as one graph.

    The first steps run as usual; they count. What is returned is overwritten by the next step.
    """

    def __init__(self, trainer: StepOwner, rehearse: Callable[[StepOwner], None]) -> None:
        self.trainer = trainer
        self.rehearse = rehearse
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
                if self.taken == 1:
                    self.rehearse(self.trainer)
                metrics = self.trainer.compute()
            torch.cuda.current_stream().wait_stream(self.side)
            return metrics
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.trainer.generator)
            with captured(self.graph, self.side):
                self.metrics = self.trainer.compute()
        self.graph.replay()
        return self.metrics
