"""The batches of a stage: sampled inside the step, or by a background thread, a batch ahead.

Both give the same batches. The thread samples with a copy of the stage's generator, set to the
state that the generator has before the next step. So the generator itself, which checkpoints save,
is always that of the batch about to be trained, and never of one that was fetched ahead.

A step has drawn all its random numbers when its forward pass is done, or when its CUDA graph is
launched: then `prefetch` starts on the next batch, during the backward pass or while the GPU
computes. `load` waits for it and copies it into tensors that stay where they are, from which a
CUDA graph reads every batch.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from memtrain.data.task import Task
from memtrain.shapes import Batch

SLOTS = 3
"""Buffers on the host: with three a GPU may be two batches behind the thread."""


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
    """Batches that a background thread samples, one ahead of the step.

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
        # Window starts are sampled on the GPU, next to the step that runs there.
        self._stream = torch.cuda.Stream(device, priority=-1) if gpu else None
        self._slots: Iterator[_Slot] = cycle([_Slot(gpu) for _ in range(SLOTS)])
        self._static: Batch | None = None
        self._ahead: tuple[Tensor, Future[_Fetched]] | None = None

    def load(self) -> None:
        """Wait for the batch that the generator's state gives, and copy it to the device.

        Raises:
            MemtrainError: its data cannot be read.
        """
        self.prefetch()  # the first batch, or the state was set: a run was resumed
        assert self._ahead is not None
        fetched = self._ahead[1].result()
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
        if self._ahead is None or not torch.equal(self._ahead[0], state):
            self._ahead = state, self._thread.submit(self._fetch, state, next(self._slots))

    def _fetch(self, state: Tensor, slot: _Slot) -> _Fetched:
        self._copy.set_state(state)
        with self._own_stream():
            slot.fill(self.task.sample(self.count, self._copy))
        return _Fetched(slot, self._copy.get_state())

    def _own_stream(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


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
