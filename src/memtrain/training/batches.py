"""The batches of a stage: sampled inside the step, or by a background thread, ahead of it.

Both give the same batches. The thread samples with a copy of the stage's generator, set to the
state that the generator has before the next step. So the generator itself, which checkpoints save,
is always that of the batch about to be trained, and never of one that was fetched ahead.

A step has drawn all its random numbers when its forward pass is done, or when its CUDA graph is
launched: then `prefetch` starts on the next batch, during the backward pass or while the GPU
computes. A GPU's generator is a counter, and replays of one graph advance it by the same number:
there the states before later steps are known too, and several batches are fetched ahead. `load`
waits for the next one and copies it into tensors that stay where they are, from which a CUDA graph
reads every batch.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from memtrain.data.task import Task
from memtrain.shapes import Batch

AHEAD = 3
"""Batches that are fetched ahead where the generator's states before them are known."""
SLOTS = AHEAD + 2
"""Buffers on the host: those batches, and two that a GPU may still be reading."""


class SampledBatches:
    """Batches that the step samples itself; a CUDA graph of the step samples too."""

    def __init__(self, task: Task, count: int, generator: torch.Generator) -> None:
        self.task, self.count, self.generator = task, count, generator

    def load(self) -> None:
        """Get the next batch ready, before the step."""

    def batch(self) -> Batch:
        """The batch of this step; called inside it."""
        return self.task.sample(self.count, self.generator)

    def prefetch(self) -> None:
        """Start on the batch after, once the step has drawn its random numbers."""


class _Slot:
    """A buffer on the host for one batch, page-locked for a GPU."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.batch: Batch | None = None
        self._read: torch.cuda.Event | None = None

    def fill(self, batch: Batch) -> None:
        """Copy a batch here, after the copy of the one before to the GPU is done."""
        if self._read is not None:
            self._read.synchronize()
        if self.batch is None:
            self.batch = batch.map(
                lambda one: torch.empty(one.shape, dtype=one.dtype, pin_memory=self.gpu)
            )
        _copy(batch, self.batch)

    def copy_to(self, batch: Batch) -> None:
        """Copy the batch to the device, in order with the work launched there."""
        assert self.batch is not None
        _copy(self.batch, batch)
        if self.gpu:
            self._read = torch.cuda.Event()
            self._read.record(torch.cuda.current_stream(batch.inputs.device))


@dataclass(frozen=True, slots=True)
class _Fetched:
    slot: _Slot
    after: Tensor
    """The generator's state after the batch was sampled."""


class FetchedBatches(SampledBatches):
    """Batches that a background thread samples, one or several ahead of the step.

    Args:
        task: its `sample` is called in the thread.
        count: sequences per batch.
        generator: the stage's; it may be on a GPU.
        device: where the step reads the batch.
    """

    def __init__(
        self, task: Task, count: int, generator: torch.Generator, device: torch.device
    ) -> None:
        super().__init__(task, count, generator)
        self.device = device
        self._copy = torch.Generator(generator.device)
        self._thread = ThreadPoolExecutor(1, "memtrain-batches")
        gpu = device.type == "cuda"
        # Random numbers are drawn on the GPU, next to the step that runs there.
        self._stream = torch.cuda.Stream(device, priority=-1) if gpu else None
        self._slots: Iterator[_Slot] = cycle([_Slot(gpu) for _ in range(SLOTS)])
        self._static: Batch | None = None
        self._ahead: deque[tuple[Tensor, Future[_Fetched]]] = deque()
        self._before: deque[Tensor] = deque(maxlen=3)
        """The generator's states before the last steps."""

    def load(self) -> None:
        """Wait for the batch that the generator's state gives, and copy it to the device.

        Raises:
            MemtrainError: its data cannot be read.
        """
        self._before.append(self.generator.get_state())
        self.prefetch()  # the first batch, or the state was set: a run was resumed
        fetched = self._ahead.popleft()[1].result()
        assert fetched.slot.batch is not None
        if self._static is None:
            self._static = fetched.slot.batch.map(
                lambda one: torch.empty_like(one, device=self.device)
            )
        fetched.slot.copy_to(self._static)
        self.generator.set_state(fetched.after)

    def batch(self) -> Batch:
        """The tensors that hold the loaded batch, always the same ones."""
        assert self._static is not None
        return self._static

    def prefetch(self) -> None:
        state = self.generator.get_state()
        while self._ahead and not torch.equal(self._ahead[0][0], state):
            self._ahead.popleft()
        if not self._ahead:
            self._submit(state)
        if (drawn := numbers_per_step(self._before)) is not None:
            while len(self._ahead) < AHEAD:
                self._submit(advanced(self._ahead[-1][0], drawn))

    def _submit(self, state: Tensor) -> None:
        self._ahead.append((state, self._thread.submit(self._fetch, state, next(self._slots))))

    def _fetch(self, state: Tensor, slot: _Slot) -> _Fetched:
        self._copy.set_state(state)
        with self._own_stream():
            slot.fill(self.task.sample(self.count, self._copy))
        return _Fetched(slot, self._copy.get_state())

    def _own_stream(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def numbers_per_step(before: Sequence[Tensor]) -> int | None:
    """By how much every step advances a GPU's generator, whose state is a seed and a counter.

    Args:
        before: the states before three successive steps.

    Returns:
        None if the steps differ, if there are fewer, or if the generator is a CPU's.
    """
    if len(before) < 3 or any(state.numel() != 16 for state in before):
        return None
    (seed, first), *rest = (state.view(torch.int64).tolist() for state in before)
    if any(other != seed for other, _ in rest):
        return None
    second, third = (count for _, count in rest)
    return third - second if third - second == second - first else None


def advanced(state: Tensor, drawn: int) -> Tensor:
    """The state of a GPU's generator after a step."""
    later = state.clone()
    later.view(torch.int64)[1] += drawn
    return later


def make_batches(
    task: Task, count: int, generator: torch.Generator, device: torch.device
) -> SampledBatches:
    """The batches of a stage, fetched ahead if the task's data is not where the model is."""
    if task.in_background:
        return FetchedBatches(task, count, generator, device)
    return SampledBatches(task, count, generator)


def _copy(source: Batch, target: Batch) -> None:
    """Copy a batch into tensors of the same shapes; the host does not wait for a GPU."""
    pairs = [(source.inputs, target.inputs), (source.targets, target.targets)]
    if source.memories is not None and target.memories is not None:
        pairs.append((source.memories, target.memories))
    for one, other in pairs:
        other.copy_(one, non_blocking=True)
