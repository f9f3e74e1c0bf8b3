"""CUDA graphs of rollouts and training steps: captured once, then replayed without launch costs.

A graph reads the weights where they are stored, so it stays valid while they train.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.models.cells import TransformerCell
from memtrain.models.layers import Stack
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Choose
from memtrain.objectives.base import Objective, Overlap
from memtrain.shapes import Batch, Losses

WARMUP = 3
"""Training steps run eagerly before one is captured: they compile, allocate and select kernels."""
CHUNK = 16
"""Steps of a rollout in one graph; the remainder uses graphs of one step."""

Precision = Callable[[], AbstractContextManager]


class RolloutKernels:
    """The stacks and cells of an RNN with the kernels that replace them during rollouts."""

    def __init__(self, stacks: Mapping[Stack, Any], cells: Mapping[TransformerCell, Any]) -> None:
        self.stacks = stacks
        self.cells = cells

    def refresh(self) -> None:
        """Copy the current weights."""
        for fast in self.stacks.values():
            fast.refresh()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use them inside only: outside a rollout nothing would refresh their weights."""
        for stack, fast in self.stacks.items():
            stack.fast = fast
        for cell, fast in self.cells.items():
            cell.fast = fast
        try:
            yield
        finally:
            for part in (*self.stacks, *self.cells):
                part.fast = None


class GraphedRollouts:
    """`RNN.unroll` and `RNN.write` without autograd, as graphs of up to CHUNK steps.

    There is one graph per shape of the memory, number of steps and mode of the cell, or way to
    choose tokens.
    """

    def __init__(
        self,
        rnn: RNN,
        precision: Precision,
        kernels: RolloutKernels | None = None,
        fast_choice: Callable[[Choose], Choose] = lambda choose: choose,
    ) -> None:
        self.rnn = rnn
        self.precision = precision
        self.kernels = kernels or RolloutKernels({}, {})
        self.fast_choice = fast_choice
        self.chunks: dict[tuple, _Chunk] = {}
        self.precompiling = False
        """Whether kernels are compiled and not launched: a graph captured now would be empty."""

    def unroll(
        self, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        self.kernels.refresh()
        if self.precompiling:  # every step launches the same kernels
            with self.kernels.active(), self.precision():
                (after,) = self._memories([inputs[:, 0]], memory)
            return after[:, None].expand(-1, inputs.shape[1], -1, -1).contiguous()
        if torch.cuda.is_current_stream_capturing():  # graphs cannot be nested
            with self.kernels.active(), self.precision():
                return torch.stack(self._memories(inputs.T.contiguous().unbind(), memory), dim=1)
        memories = []
        for part in inputs.split(chunk_sizes(inputs.shape[1]), dim=1):
            (after,) = self._unroll_chunk(memory, part.shape[1]).run(part.T, memory)
            memories.append(after)
            memory = after[-1]
        return torch.cat(memories).transpose(0, 1)

    def write(
        self, memory: Float[Tensor, "B M D"], uniforms: Float[Tensor, "T B"], choose: Choose
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B M D"]]:
        """The tokens, and the memory after the last of them."""
        self.kernels.refresh()
        tokens = []
        for part in uniforms.split(chunk_sizes(len(uniforms))):
            written, memory = self._write_chunk(memory, len(part), choose).run(part, memory)
            tokens.append(written)
        return torch.cat(tokens).T, memory

    def _unroll_chunk(self, memory: Float[Tensor, "B M D"], size: int) -> "_Chunk":
        key = (memory.shape, size, self.rnn.cell.training)  # a user's cell may have dropout
        if key not in self.chunks:
            tokens = torch.zeros(size, len(memory), dtype=torch.long, device=memory.device)
            self.chunks[key] = self._capture(self._unroll_steps, tokens, memory)
        return self.chunks[key]

    def _write_chunk(self, memory: Float[Tensor, "B M D"], size: int, choose: Choose) -> "_Chunk":
        key = (memory.shape, size, choose)
        if key not in self.chunks:
            uniforms = torch.rand(size, len(memory), device=memory.device)
            steps = partial(self._write_steps, self.fast_choice(choose))
            self.chunks[key] = self._capture(steps, uniforms, memory)
        return self.chunks[key]

    def _capture(self, steps: "_Steps", inputs: Tensor, memory: Tensor) -> "_Chunk":
        with self.kernels.active(), torch.no_grad():
            return _Chunk(steps, inputs, memory, self.precision)

    def _memories(self, tokens: Iterable[Tensor], memory: Tensor) -> list[Tensor]:
        memories = []
        for token in tokens:
            memory = self.rnn.cell(memory, token).to(memory.dtype)
            memories.append(memory)
        return memories

    def _unroll_steps(self, tokens: Int[Tensor, "K B"], memory: Tensor) -> tuple[Tensor, ...]:
        return (torch.stack(self._memories(tokens.unbind(), memory)),)

    def _write_steps(
        self, choose: Choose, uniforms: Float[Tensor, "K B"], memory: Tensor
    ) -> tuple[Tensor, ...]:
        tokens = []
        for uniform in uniforms.unbind():
            tokens.append(choose(self.rnn.predict(memory), uniform))
            memory = self.rnn.cell(memory, tokens[-1]).to(memory.dtype)
        return torch.stack(tokens), memory


_Steps = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""From K rows of inputs, tokens or uniform numbers, and a memory to the results of K steps."""


def chunk_sizes(length: int) -> list[int]:
    """How many steps each graph of a rollout takes."""
    return [CHUNK] * (length // CHUNK) + [1] * (length % CHUNK)


class _Chunk:
    """A graph of a few steps on fixed buffers."""

    def __init__(self, steps: _Steps, inputs: Tensor, memory: Tensor, precision: Precision) -> None:
        self.inputs, self.memory = inputs, memory.clone()
        self.graph = torch.cuda.CUDAGraph()
        _warm_up(lambda: steps(self.inputs[:1], self.memory), precision)
        with captured(self.graph), precision():
            self.out = steps(self.inputs, self.memory)

    def run(self, inputs: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """Copies of what the steps return."""
        self.memory.copy_(memory)
        self.inputs.copy_(inputs)
        self.graph.replay()
        return tuple(part.clone() for part in self.out)


@contextmanager
def captured(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Capture into `graph` the work launched inside.

    The capture restricts this thread only: another one that fetches a checkpoint at the same time
    (async_checkpoint.py) pins memory and synchronizes, which would otherwise break the capture.
    Freeing an older graph breaks it too, so the garbage collector runs before it and not during it:
    the graphs of an earlier run in the same process lie in cycles that only the collector frees.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


def _warm_up(work: Callable[[], object], precision: Precision) -> None:
    """Compile, allocate and select kernels outside the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            with precision():
                work()
    torch.cuda.current_stream().wait_stream(side)


class GraphedStep:
    """A whole training step as one graph, sampling and optimizer included.

    The first steps run eagerly; they count. The returned tensors are overwritten by the next step.
    """

    def __init__(
        self,
        compute: Callable[[], dict[str, Tensor]],
        generator: torch.Generator,
        warm_up: Callable[[], None] | None = None,
    ) -> None:
        self.compute = compute
        self.generator = generator
        self.warm_up = warm_up
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.metrics: dict[str, Tensor] = {}
        # With priority over the streams of work that nothing waits for (objectives/overlap.py).
        self.stream = torch.cuda.Stream(priority=-1)

    def __call__(self) -> dict[str, Tensor]:
        if self.taken < WARMUP:
            self.taken += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                if self.taken == 1 and self.warm_up is not None:
                    self.warm_up()
                metrics = self.compute()
            torch.cuda.current_stream().wait_stream(self.stream)
            return metrics
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.generator)
            with captured(self.graph, self.stream):
                self.metrics = self.compute()
        self.graph.replay()
        return self.metrics


# ----------------------------------------------------------- less idle time in a captured step


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
