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
| V      | vocabulary size, or numbers that parametrize a prediction |
| X, Y   | numbers per input and per target, where they are no tokens |

Time runs as in the paper: `memory[t]` has read the inputs 0..t and predicts `targets[t]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from memtrain.errors import MemtrainError, did_you_mean

IGNORE_INDEX = -100
"""The target of a position without a target."""

Token = Int[Tensor, " B"] | Float[Tensor, "B X"]
"""What a cell reads at one step: a token or numbers per row."""
Inputs = Int[Tensor, "B T"] | Float[Tensor, "B T X"]
Targets = Int[Tensor, "B T"] | Float[Tensor, "B T Y"]
"""Where there is no target: IGNORE_INDEX among tokens, NaN among numbers."""

Likelihood = Literal["gaussian", "student-t", "quantile"]
QUANTILES = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)
"""The levels that a quantile head predicts."""
PARAMETERS: dict[str, int] = {"gaussian": 2, "student-t": 3, "quantile": len(QUANTILES)}
"""Numbers that parametrize the distribution of one target number."""


@dataclass(frozen=True, slots=True)
class Values:
    """Sequences of numbers instead of tokens, and how they are predicted.

    An input has `features` numbers: first the `targets` numbers of its own time, then what is known
    beforehand of the next time (covariates, actions). After the inputs 0..t a model predicts the
    target numbers of time t + 1. NaN marks a missing number, in inputs and targets.

    Example: `Values(features=4, targets=3)` are three measurements and one action.
    """

    features: int
    """Numbers per input, X."""
    targets: int = 1
    """Numbers per target, Y; the first ones of an input."""
    likelihood: Likelihood = "gaussian"
    """The predicted distribution of each target number: normal, Student's t (heavy tails), or
    quantiles (any shape; the loss is then the pinball loss)."""

    def __post_init__(self) -> None:
        for name in ("features", "targets"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise MemtrainError(f"{name}={size!r}: must be a whole number above 0")
        if self.targets > self.features:
            raise MemtrainError(
                f"targets={self.targets}: must be at most features={self.features}; an input "
                "begins with the target numbers of its own time"
            )
        if self.likelihood not in (known := get_args(Likelihood)):
            raise MemtrainError(
                f"likelihood={self.likelihood!r}: {did_you_mean(str(self.likelihood), known)}"
            )

    @property
    def known(self) -> int:
        """Numbers of an input that are known beforehand."""
        return self.features - self.targets

    @property
    def outputs(self) -> int:
        """Numbers that parametrize the prediction of one step, V."""
        return self.targets * PARAMETERS[self.likelihood]


Space = int | Values
"""What sequences consist of: tokens of a vocabulary of this size, or values."""


def space_of(vocab_size: object = 0, values: object = None) -> Space:
    """The space that a user names by one of two arguments.

    Raises:
        MemtrainError: neither or both are given, or not as they should be.
    """
    if not isinstance(values, Values | None):
        raise MemtrainError(
            f"values={values!r}: must be a memtrain.Values, such as Values(features=4, targets=3)"
        )
    if values is not None:
        if vocab_size:
            raise MemtrainError(
                f"vocab_size={vocab_size!r}: must be left out; values={values} are given"
            )
        return values
    if type(vocab_size) is not int or vocab_size < 1:
        raise MemtrainError(
            f"vocab_size={vocab_size!r}: must be a whole number above 0; vocab_size=..., or "
            "values=memtrain.Values(...) for sequences of numbers"
        )
    return vocab_size


def named(space: Space) -> dict[str, Any]:
    """The space as a keyword argument: the inverse of `space_of`."""
    return {"values": space} if isinstance(space, Values) else {"vocab_size": space}


def describe_space(space: Space) -> str:
    """A few words for a model's description."""
    if isinstance(space, Values):
        return f"{space.features} numbers to {space.targets} ({space.likelihood})"
    return f"vocabulary {space}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences and their targets: tokens, or numbers (see Values)."""

    inputs: Inputs
    targets: Targets
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

    future_inputs: Int[Tensor, "B S K"] | Float[Tensor, "B S K X"]
    future_targets: Int[Tensor, "B S F"] | Float[Tensor, "B S F Y"]


FREE_TO_READ = ("cpu",)
"""Devices whose numbers the host reads without a wait."""


def free_to_read(tensor: Tensor) -> bool:
    """Whether the host may read numbers of a tensor: on a GPU it would stall, and a CUDA graph
    does not allow it."""
    return tensor.device.type in FREE_TO_READ


def has_target(targets: Tensor) -> Bool[Tensor, "*rows"]:
    """Which positions have a target; of several numbers, at least one."""
    if targets.is_floating_point():
        return ~targets.isnan().all(dim=-1)
    return targets != IGNORE_INDEX


def count_targets(targets: Targets) -> Int[Tensor, " T"]:
    """How many tokens or numbers are to be predicted at each position."""
    if targets.is_floating_point():
        return (~targets.isnan()).sum(dim=(0, 2))
    return (targets != IGNORE_INDEX).sum(dim=0)


def keep_targets(targets: Tensor, kept: Bool[Tensor, "*rows"]) -> Tensor:
    """The targets where `kept`, no target elsewhere."""
    if targets.is_floating_point():
        return targets.where(kept[..., None], torch.nan)
    return targets.where(kept, IGNORE_INDEX)


def at_steps(sequences: Tensor, steps: Int[Tensor, "B S"]) -> Tensor:
    """The entries (B, S, ...) of sequences (B, T, ...) at the given steps of each row."""
    if sequences.dim() == 2:
        return sequences.gather(1, steps)
    return sequences[torch.arange(len(steps), device=steps.device)[:, None], steps]


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
