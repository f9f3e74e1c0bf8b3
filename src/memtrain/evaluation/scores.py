"""Scores of predictions, accumulated over held-out sequences: of tokens, and of numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.data.series_format import SeriesFormat
from memtrain.losses import value_losses
from memtrain.models.likelihood import Distribution
from memtrain.objectives.large_vocabulary import positions_at_once
from memtrain.shapes import IGNORE_INDEX, Values

ROWS = 2**13
"""Memories that are computed or decoded at once."""

Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Score:
    """Loss and accuracy over all positions that carry a target, or over all target numbers."""

    nats: float
    """Cross-entropy; of numbers the negative log-likelihood, or the pinball loss of quantiles."""
    accuracy: float | None = None
    """None for numbers, which have the next four instead."""
    mse: float | None = None
    """Squared error of the predicted mean (of quantiles, the median), in the model's units."""
    crps: float | None = None
    """Continuous ranked probability score, in the model's units; of one number, |error|."""
    column_mse: dict[str, float] | None = None
    """The squared error of each target column in the data's units, if the task has a format."""
    column_crps: dict[str, float] | None = None
    """The CRPS of each target column in the data's units, if the task has a format."""
    bits_per_byte: float | None = None
    """Of a text: bits per byte, which models with different tokens can be compared by."""
    bits: float | None = field(init=False)
    """nats / log 2; None for numbers."""

    def __post_init__(self) -> None:
        bits = None if self.accuracy is None else self.nats / math.log(2)
        object.__setattr__(self, "bits", bits)

    def __repr__(self) -> str:
        names = ("nats", "bits", "bits_per_byte", "accuracy", "mse", "crps")
        found = {name: number for name in names if (number := getattr(self, name)) is not None}
        return f"Score({', '.join(f'{name}={number:.4f}' for name, number in found.items())})"


class ScoreAccumulator:
    """Accumulates losses and correct predictions per position.

    Args:
        length: the number of positions.
        device: where the sums are.
        vocab_size: the number of tokens; with many of them, fewer memories are decoded at once.
        text_bytes: the bytes of text that all targets at each position stand for, if it is a text.
    """

    def __init__(
        self,
        length: int,
        device: torch.device,
        vocab_size: int,
        text_bytes: Float[Tensor, " T"] | None = None,
    ) -> None:
        zeros = torch.zeros(3, length, dtype=torch.float64, device=device)
        self.nats, self.correct, self.targets = zeros
        self.rows = min(ROWS, positions_at_once(vocab_size, device))
        self.text_bytes = text_bytes

    def add(
        self,
        predict: Predict,
        memories: Float[Tensor, "B T M D"],
        targets: Int[Tensor, "B T"],
        first: int = 0,
    ) -> None:
        """Score memories, a bounded number at a time; `first` is the position of the first."""
        flat, wanted = memories.flatten(0, 1), targets.flatten()
        # Made beforehand: small tensors kept from each part would lie between the freed logits of
        # a CPU's heap, which could then not be used again.
        scored = torch.empty(2, len(flat), dtype=torch.float64, device=targets.device)
        for begin in range(0, len(flat), self.rows):
            part = slice(begin, begin + self.rows)
            scored[0, part], scored[1, part] = _token_scores(predict(flat[part]), wanted[part])
        nats, correct = scored.view(2, *targets.shape)
        self.nats[first:] += nats.sum(0)
        self.correct[first:] += correct.sum(0)
        self.targets[first:] += (targets != IGNORE_INDEX).double().sum(0)

    def score(self, first: int = 0) -> Score:
        """The means over the positions from `first` on."""
        count = self.targets[first:].sum().clamp(min=1)
        nats, correct = (sums[first:].sum() / count for sums in (self.nats, self.correct))
        return Score(float(nats), float(correct), bits_per_byte=self._bits_per_byte(first))

    def _bits_per_byte(self, first: int) -> float | None:
        if self.text_bytes is None:
            return None
        scored = self.targets[first:] > 0  # a rollout may begin later
        size = float(self.text_bytes[first:][scored].sum())
        return float(self.nats[first:].sum()) / size / math.log(2) if size else None

    def binned(self, width: int) -> list[float | None]:
        return binned_means(self.nats, self.targets, width)


class ValueScoreAccumulator:
    """The same for numbers: losses, squared errors and CRPS per position and target column."""

    def __init__(
        self, length: int, device: torch.device, values: Values, series: SeriesFormat | None
    ) -> None:
        self.values, self.series = values, series
        zeros = torch.zeros(4, length, values.targets, dtype=torch.float64, device=device)
        self.nats, self.squares, self.crps, self.targets = zeros
        self.generator = torch.Generator().manual_seed(0)

    def add(
        self,
        predict: Predict,
        memories: Float[Tensor, "B T M D"],
        targets: Float[Tensor, "B T Y"],
        first: int = 0,
    ) -> None:
        """Score memories, a bounded number at a time; `first` is the position of the first."""
        flat = memories.flatten(0, 1).split(ROWS), targets.flatten(0, 1).split(ROWS)
        scored = [self._scores(predict(part), target) for part, target in zip(*flat, strict=True)]
        parts = [torch.cat(one).view(targets.shape) for one in zip(*scored, strict=True)]
        for sums, part in zip((self.nats, self.squares, self.crps), parts, strict=True):
            sums[first:] += part.double().nansum(0)
        self.targets[first:] += (~targets.isnan()).double().sum(0)

    def _scores(
        self, outputs: Float[Tensor, "N V"], targets: Float[Tensor, "N Y"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss (0 without a target), squared error and CRPS (NaN) of each target number."""
        predicted = Distribution.of(outputs, self.values)
        squares = (predicted.mean() - targets).square()
        losses = value_losses(outputs, targets, self.values.likelihood)
        return losses, squares, predicted.crps(targets, self.generator)

    def score(self, first: int = 0) -> Score:
        """The means over the positions from `first` on."""
        count = self.targets[first:].sum(0)
        sums = [one[first:].sum(0) for one in (self.nats, self.squares, self.crps)]
        nats, mse, crps = (float(one.sum() / count.sum().clamp(min=1)) for one in sums)
        if self.series is None:
            return Score(nats, mse=mse, crps=crps)
        scale = self.nats.new_tensor(self.series.target_scale)
        units = (scale.square(), scale)
        columns = [
            dict(zip(self.series.targets, (one / count.clamp(min=1) * unit).tolist(), strict=True))
            for one, unit in zip(sums[1:], units, strict=True)
        ]
        return Score(nats, mse=mse, crps=crps, column_mse=columns[0], column_crps=columns[1])

    def binned(self, width: int) -> list[float | None]:
        return binned_means(self.nats.sum(1), self.targets.sum(1), width)


def _token_scores(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Tensor]:
    """Nats, 0 without a target, and whether the likeliest token is the target."""
    nats = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
    return nats, logits.argmax(dim=-1) == targets


def binned_means(
    sums: Float[Tensor, " T"], counts: Float[Tensor, " T"], width: int
) -> list[float | None]:
    """Means over bins of positions; None for an empty bin."""
    pairs = zip(sums.split(width), counts.split(width), strict=True)
    totals = [(float(s.sum()), float(c.sum())) for s, c in pairs]
    return [total / count if count else None for total, count in totals]
