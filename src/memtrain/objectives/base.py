"""The objective contract: what the trainer needs to know about a training method."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from memtrain.errors import MemtrainError
from memtrain.models.rnn import RNN
from memtrain.objectives.arguments import check_generator, checked_batch
from memtrain.shapes import WHOLE_BATCH, Batch, BatchShard, Inputs, Losses, Targets, Values


class Overlap:
    """`with overlap():` marks work whose result is not needed before `overlap.join()`.

    This one runs it in place; accel/cuda_graphs.py runs it on side streams of a GPU.
    """

    @contextmanager
    def __call__(self, urgent: bool = False) -> Iterator[None]:
        """Args: urgent: whether this work takes longest, so that it should be scheduled first."""
        yield

    def join(self) -> None:
        """Wait for the marked work."""


NO_OVERLAP = Overlap()


@runtime_checkable
class Exchange(Protocol):
    """The collective operations of the processes that share a batch."""

    rank: int
    size: int

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        ...

    def gather(self, value: Tensor) -> Tensor:
        """The values of all processes, stacked on a new first axis."""
        ...


@dataclass
class Exchanged:
    """The values that the micro-batches of one process exchanged, in order of the calls."""

    values: list[list[Tensor]]
    recording: bool = True


class MicroBatchShard(BatchShard):
    """One of `accumulate` micro-batches of one of several processes.

    With one micro-batch per process, values are exchanged as they are computed. With more, a
    micro-batch needs values of later ones, so a first pass without gradients records them all.
    Exchanged values must not depend on earlier exchanges.
    """

    def __init__(self, group: Exchange, micro_batch: int, exchanged: Exchanged) -> None:
        self.group = group
        self.micro_batch = micro_batch
        self.exchanged = exchanged
        self.accumulate = len(exchanged.values)
        self.index = group.rank * self.accumulate + micro_batch
        self.count = group.size * self.accumulate
        self.calls = 0

    def sum(self, value: Tensor) -> Tensor:
        values = self._exchange(value, self.group.sum)
        return _WholeBatchValue.apply(value, torch.stack(values).sum(dim=0), None)

    def gather(self, value: Tensor) -> Tensor:
        values = self._exchange(value, self.group.gather)  # of each: (processes, rows, ...)
        whole = torch.stack(values, dim=1).flatten(0, 2)
        own = slice(self.index * len(value), (self.index + 1) * len(value))
        return _WholeBatchValue.apply(value, whole, own)

    def _exchange(self, value: Tensor, collective: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The value of every micro-batch, each already exchanged between the processes."""
        if self.accumulate == 1:
            return [collective(value.detach())]
        if self.exchanged.recording:
            self.exchanged.values[self.micro_batch].append(collective(value.detach()))
            # The first pass needs the right shape only.
            return [self.exchanged.values[self.micro_batch][-1]] * self.accumulate
        self.calls += 1
        return [values[self.calls - 1] for values in self.exchanged.values]


class _WholeBatchValue(torch.autograd.Function):
    """Forward: the value of the whole batch. Backward: the gradient of this shard's rows."""

    @staticmethod
    def forward(ctx, value: Tensor, whole: Tensor, rows: slice | None) -> Tensor:
        ctx.rows = rows
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (gradient,) = gradients
        return gradient if ctx.rows is None else gradient[ctx.rows], None, None


class Objective(nn.Module, ABC):
    """Owns the loss; the trainer owns the loop."""

    shard: BatchShard = WHOLE_BATCH
    """The shard of the batch that the next call gets; set by the trainer."""
    rollout_length: int = 0
    """Steps that each row of a stream is unrolled, which a curriculum changes; 0: it cannot."""
    overlap: Overlap = NO_OVERLAP
    """Runs work that can overlap with the rest of the step; set by the trainer."""

    def forward(
        self,
        tokens: Batch | Inputs,
        generator: torch.Generator | None = None,
        *,
        targets: Targets | None = None,
    ) -> Losses:
        """The loss of a batch, `losses.total`, and its named parts, `losses.parts`.

        Args:
            tokens: sequences (B, T), int64, or numbers (B, T, X); or a Batch of sequences and
                targets.
            generator: the source of randomness; by default torch's global one.
            targets: (B, T), targets[:, t] is predicted after tokens[:, t]; IGNORE_INDEX where there
                is none. By default the next token. Numbers (B, T, Y), NaN where there is none; by
                default the first Y numbers of the next input.

        Raises:
            MemtrainError: an argument does not fit the models.
        """
        if not isinstance(tokens, Batch) or generator is None or targets is not None:
            tokens = self.check_batch(tokens, targets)
            generator = check_generator(generator)
        return self.compute(tokens, generator)

    def check_batch(self, tokens: object, targets: object) -> Batch:
        """The batch of a user's own loop."""
        assert isinstance(self.rnn, RNN)
        return checked_batch(self.rnn, tokens, targets)

    @abstractmethod
    def compute(self, batch: Batch, generator: torch.Generator) -> Losses:
        """The loss of a checked batch; the generator is the only source of randomness.

        Random numbers are drawn for the whole batch and sliced by `self.shard.rows`, so that they
        do not depend on the sharding. Means are computed with `self.shard.sum`.
        """

    @abstractmethod
    def trained(self) -> dict[str, nn.Module]:
        """The modules to train, by name; gradients are clipped per module."""

    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters to train, for your optimizer; one that two modules share comes once.

        Raises:
            MemtrainError: there are none.
        """
        every = dict.fromkeys(p for part in self.trained().values() for p in part.parameters())
        if not (trained := [p for p in every if p.requires_grad]):
            raise MemtrainError(
                f"{type(self).__name__}: requires_grad=False for all {len(every)} parameters, so "
                "there is nothing to train; call requires_grad_() on the models"
            )
        return trained

    def __repr__(self) -> str:
        models = ", ".join(f"{name} {type(part).__name__}" for name, part in self.trained().items())
        return f"<{type(self).__name__}: trains {models}>"

    @abstractmethod
    def tokens_needed(self) -> int:
        """Tokens per window to draw from a stream; other data have sequences of their own."""

    def tokens_read(self, length: int) -> int:
        """Tokens of a drawn sequence of this length that one step reads, for the count."""
        return length

    def shortest_length(self) -> int:
        """Tokens that a sequence must have."""
        return 1

    def empty_start_rows(self, rows: int) -> int:
        """How many rows of a batch, the first ones, start from the empty memory."""
        return 0

    def kept_tensors(self) -> dict[str, Tensor]:
        """Tensors that this objective keeps between steps, by name; a checkpoint has them too."""
        return {}

    def keep_tensors(self, named: Mapping[str, Tensor]) -> None:
        """Continue from what `kept_tensors` returned; from nothing if it is empty."""

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured as a CUDA graph: it never reads values on the host.

        Steps on sequences of numbers have not been tested there.
        """
        rnns = [module for module in self.children() if isinstance(module, RNN)]
        return not any(isinstance(rnn.space, Values) for rnn in rnns)

    @property
    def short_step(self) -> bool:
        """Whether a step is short enough to run it once more, to find the kernels to compile."""
        return True

    @property
    def applies_once(self) -> bool:
        """Whether a step uses every trained matrix in only one product."""
        return False

    def sync_readout(
        self, gather: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    ) -> None:
        """Update the RNN's readout from the teacher, before evaluation and at the end of a stage.

        Args:
            gather: assembles tensors that are sharded over processes.
        """


def sample_steps(
    rows: int, count: int, below: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """`count` distinct timesteps of 0..below-1 for each of `rows` sequences, (rows, count)."""
    uniform = torch.rand(rows, below, generator=generator, device=generator.device)
    return uniform.topk(count, dim=1).indices.to(device)
