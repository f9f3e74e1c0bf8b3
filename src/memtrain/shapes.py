"""Letters for tensor shapes, and the records that pass through a training step.

Every tensor in the library is described with these letters:

| letter | meaning                                                   |
| ------ | --------------------------------------------------------- |
| B      | sequences in a batch                                      |
| T      | tokens in a sequence                                      |
| S      | timesteps chosen from a sequence                          |
| N      | rows of any kind: B, or B·S after flattening              |
| C      | context length: how far back the teacher sees             |
| F      | future length: how many targets a memory predicts         |
| M, D   | a memory is M tokens of width D                           |
| W      | inner width of a Transformer                              |
| V      | vocabulary size                                           |

Time runs as in the paper: `memory[t]` has read the inputs 0..t and predicts `targets[t]`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100
"""The target of a position without a target."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences and their targets."""

    inputs: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    memories: Float[Tensor, "B T M D"] | None = None
    """The memory after each input, where the data has labels; else the teacher makes them."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to each tensor, for example one that selects rows."""
        memories = None if self.memories is None else change(self.memories)
        return Batch(change(self.inputs), change(self.targets), memories)

    def to(self, device) -> "Batch":
        return self.map(lambda tensor: tensor.to(device))


@dataclass(frozen=True, slots=True)
class Window:
    """The futures of some timesteps, which the memories made there have to predict.

    `future_targets[..., k]` follows `future_inputs[..., :k]`, so K = F - 1.
    """

    future_inputs: Int[Tensor, "B S K"]
    future_targets: Int[Tensor, "B S F"]


@dataclass(frozen=True, slots=True)
class Losses:
    """The result of an objective: the scalar to minimise and its named, detached parts."""

    total: Float[Tensor, ""]
    parts: dict[str, Tensor]


class BatchShard:
    """The rows of a batch that one call of the objective sees; here, all of them.

    Where a loss is a mean or a comparison over the whole batch, the objective uses `sum` and
    `gather`. They return the value for the whole batch, but only this shard's share of the gradient
    flows back; the gradients of all shards add up to that of the whole batch.
    """

    index = 0
    count = 1

    def whole(self, rows: int) -> int:
        """Rows of the whole batch when each shard has `rows`."""
        return rows * self.count

    def rows(self, whole: Tensor) -> Tensor:
        """This shard's rows of a tensor made for the whole batch."""
        own = len(whole) // self.count
        return whole[self.index * own : (self.index + 1) * own]

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all shards."""
        return value

    def gather(self, value: Tensor) -> Tensor:
        """The rows of all shards, in order."""
        return value


WHOLE_BATCH = BatchShard()
