"""The objective contract: all that the trainer knows about a way of training."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from memtrain.objectives.overlap import NO_OVERLAP, Overlap
from memtrain.objectives.sharding import WHOLE, BatchShard
from memtrain.shapes import Batch, Losses


class Objective(nn.Module, ABC):
    """Owns the loss; the trainer owns the loop."""

    part: BatchShard = WHOLE
    """Which part of the batch the next call gets, and what the others say; the trainer sets it."""
    beside: Overlap = NO_OVERLAP
    """Where work goes that nothing waits for yet; the trainer sets it."""

    @abstractmethod
    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        """The loss of a batch; the generator is the only source of chance.

        What is drawn is drawn for the whole batch, and `self.part.rows` of it is used: so a batch
        that is shared out meets the same chance. Means go through `self.part.sum`.
        """

    @abstractmethod
    def trained(self) -> dict[str, nn.Module]:
        """The modules that train, by name; each is clipped to its own gradient norm."""

    @abstractmethod
    def tokens_needed(self) -> int:
        """The length of the sequences to draw from a stream; other data have their own."""

    def empty_start_rows(self, rows: int) -> int:
        """How many of a batch's rows, the first ones, are read from the empty memory on."""
        return 0

    @property
    def capturable(self) -> bool:
        """Whether a step makes no decision on the host, so that a graph of it can be replayed."""
        return False

    @property
    def rehearsable(self) -> bool:
        """Whether a step is short enough to be taken once more, for its kernels to be known."""
        return False

    @property
    def applies_once(self) -> bool:
        """Whether a step uses every trained matrix in one product only."""
        return False

    def sync_readout(self) -> None:
        """Make the RNN whole, before it is looked at and when the stage ends."""


def sample_steps(
    rows: int, count: int, below: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """`count` distinct timesteps of 0..below-1 for each of `rows` sequences, (rows, count)."""
    chance = torch.rand(rows, below, generator=generator, device=generator.device)
    return chance.topk(count, dim=1).indices.to(device)
