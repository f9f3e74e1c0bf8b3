"""Sums over held-out sequences that come a few at a time, and what follows from them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.models.rnn import RNN
from memtrain.shapes import IGNORE_INDEX

ROWS = 2**13
"""Memories that are made or read out at once."""


@dataclass(frozen=True, slots=True)
class Score:
    """Loss and accuracy over all positions that carry a target."""

    nats: float
    accuracy: float
    bits: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", self.nats / math.log(2))

    def __repr__(self) -> str:
        return f"Score(nats={self.nats:.4f}, bits={self.bits:.4f}, accuracy={self.accuracy:.4f})"


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the RNN's memory is from the teacher's."""

    rollout: list[float]
    """delta_t: mean squared error at each step of a rollout from the empty memory."""
    unexplained: list[float]
    """1 - R^2 at each step of that rollout."""
    one_step: float
    """Mean squared error of single steps from the teacher's memories."""
    one_step_unexplained: float
    """1 - R^2 of single steps."""


class ScoreAccumulator:
    """Sums of losses and right answers at every position."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.nats, self.right, self.asked = torch.zeros(
            3, length, dtype=torch.float64, device=device
        )

    def add(
        self,
        predict: Callable[[Tensor], Tensor],
        memories: Float[Tensor, "B T M D"],
        targets: Int[Tensor, "B T"],
        first: int = 0,
    ) -> None:
        """Read memories out, a bounded number at a time; they stand at `first` and after."""
        parts = zip(memories.flatten(0, 1).split(ROWS), targets.flatten().split(ROWS), strict=True)
        scored = [_token_scores(predict(part), asked) for part, asked in parts]
        nats, right = (
            torch.cat(values).view(targets.shape) for values in zip(*scored, strict=True)
        )
        self.nats[first:] += nats.double().sum(0)
        self.right[first:] += right.double().sum(0)
        self.asked[first:] += (targets != IGNORE_INDEX).double().sum(0)

    def score(self, first: int = 0) -> Score:
        asked = self.asked[first:].sum().clamp(min=1)
        return Score(
            float(self.nats[first:].sum() / asked), float(self.right[first:].sum() / asked)
        )

    def binned(self, width: int) -> list[float | None]:
        return binned_means(self.nats, self.asked, width)


def _token_scores(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Tensor]:
    """Nats, 0 where nothing is asked, and whether the likeliest token is the target."""
    nats = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
    return nats, logits.argmax(dim=-1) == targets


def binned_means(
    sums: Float[Tensor, " T"], counts: Float[Tensor, " T"], width: int
) -> list[float | None]:
    """Means over bins of positions; None where there is nothing to take a mean of."""
    pairs = zip(sums.split(width), counts.split(width), strict=True)
    totals = [(float(s.sum()), float(c.sum())) for s, c in pairs]
    return [total / count if count else None for total, count in totals]


class DriftAccumulator:
    """Sums from which the drift at every position follows, and the labels' variance."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.rollout, self.stepped = torch.zeros(2, length, dtype=torch.float64, device=device)
        self.label_sum: Tensor | float = 0.0
        self.label_squares: Tensor | float = 0.0
        self.rows = 0

    def add(
        self,
        rnn: RNN,
        inputs: Int[Tensor, "B T"],
        memories: Float[Tensor, "B T M D"],
        labels: Float[Tensor, "B T M D"],
    ) -> None:
        """A rollout from the empty memory, and single steps along the teacher's path."""
        empty = rnn.empty_memory(len(inputs))[:, None].to(labels.dtype)
        before = torch.cat([empty, labels[:, :-1]], dim=1).flatten(0, 1)
        parts = zip(before.split(ROWS), inputs.flatten().split(ROWS), strict=True)
        stepped = torch.cat(
            [rnn.unroll_last(token[:, None], part).float() for part, token in parts]
        )
        labels = labels.float()
        self.rollout += _squared(memories, labels)
        self.stepped += _squared(stepped.view(labels.shape), labels)
        self.label_sum = self.label_sum + labels.sum(dim=(0, 1), dtype=torch.float64)
        self.label_squares = self.label_squares + labels.double().square().sum(dim=(0, 1))
        self.rows += len(inputs)

    def drift(self) -> Drift:
        """1 - R^2 is the drift as a share of the labels' variance over sequences and steps."""
        assert isinstance(self.label_sum, Tensor) and isinstance(self.label_squares, Tensor)
        total = self.rows * len(self.rollout)
        squares, mean = self.label_squares / total, self.label_sum / total
        variance = float((squares - mean.square()).mean().clamp(min=1e-12))
        rollout, stepped = self.rollout / self.rows, float(self.stepped.mean() / self.rows)
        return Drift(
            rollout=rollout.tolist(),
            unexplained=(rollout / variance).tolist(),
            one_step=stepped,
            one_step_unexplained=stepped / variance,
        )


def _squared(one: Float[Tensor, "B T M D"], other: Float[Tensor, "B T M D"]) -> Float[Tensor, " T"]:
    return (one.float() - other).square().mean(dim=(2, 3)).sum(0, dtype=torch.float64)
