"""What the numbers of a series mean: names, units and scale, saved with the weights."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.errors import MemtrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesFormat:
    """The columns of a series and how they are scaled for a model: (number - centre) / scale."""

    targets: tuple[str, ...]
    """Names of the columns that are predicted."""
    target_centre: tuple[float, ...]
    target_scale: tuple[float, ...]
    known: tuple[str, ...] = ()
    """Names of the numbers that are known beforehand: covariates, actions, features of time."""
    known_centre: tuple[float, ...] = ()
    known_scale: tuple[float, ...] = ()
    season: int = 0
    """Steps per season, for the seasonal-naive forecast; 0 if unknown."""

    def __post_init__(self) -> None:
        for names, *numbers in (
            (self.targets, self.target_centre, self.target_scale),
            (self.known, self.known_centre, self.known_scale),
        ):
            if any(len(one) != len(names) for one in numbers):
                raise MemtrainError(f"columns={names}: each must have a centre and a scale")
        if not self.targets:
            raise MemtrainError("targets=(): there must be at least one column to predict")

    def scale_targets(self, numbers: Float[Tensor, "*rows Y"]) -> Float[Tensor, "*rows Y"]:
        """From the data's units to the model's."""
        return _scaled(numbers, self.target_centre, self.target_scale)

    def scale_known(self, numbers: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
        """From the data's units to the model's."""
        return _scaled(numbers, self.known_centre, self.known_scale)

    def unscale_targets(self, numbers: Float[Tensor, "*rows Y"]) -> Float[Tensor, "*rows Y"]:
        """From the model's units back to the data's."""
        centre, scale = (numbers.new_tensor(x) for x in (self.target_centre, self.target_scale))
        return numbers * scale + centre


def _scaled(numbers: Tensor, centre: tuple[float, ...], scale: tuple[float, ...]) -> Tensor:
    return (numbers - torch.tensor(centre).to(numbers)) / torch.tensor(scale).to(numbers)


@dataclass(frozen=True, slots=True)
class ForecastCases:
    """Pasts to read and futures to forecast, in the model's units."""

    inputs: Float[Tensor, "B P X"]
    """The past: target numbers of a time, then what is known of the next time."""
    known: Float[Tensor, "B H K"]
    """known[:, h] belongs to the input whose target numbers are targets[:, h]."""
    targets: Float[Tensor, "B H Y"]
    """What really followed; targets[:, 0] follows the last input."""
