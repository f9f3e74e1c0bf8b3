"""Predicted distributions of numbers, from the outputs of a decoder or readout."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.losses import degrees_of_freedom, log_scale
from memtrain.shapes import QUANTILES, Likelihood, Values

CRPS_SAMPLES = 32
"""Samples for the CRPS of a distribution without a formula; the estimate has no bias."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Independent distributions of the target numbers of some rows."""

    parameters: Float[Tensor, "*rows Y P"]
    likelihood: Likelihood

    @classmethod
    def of(cls, outputs: Float[Tensor, "*rows V"], values: Values) -> "Distribution":
        """The distributions that a model predicts by its outputs."""
        return cls(outputs.float().unflatten(-1, (values.targets, -1)), values.likelihood)

    def mean(self) -> Float[Tensor, "*rows Y"]:
        """The expected numbers; of quantiles, the median."""
        if self.likelihood == "quantile":
            return self.parameters[..., QUANTILES.index(0.5)]
        return self.parameters[..., 0]

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "*rows Y"]:
        """One sample of each number."""
        shape = self.parameters.shape[:-1]
        place = self.parameters.device if generator is None else generator.device
        return self.sample_from(torch.rand(2, *shape, generator=generator, device=place))

    def sample_from(self, uniforms: Float[Tensor, "2 *rows Y"]) -> Float[Tensor, "*rows Y"]:
        """One sample of each number, from two uniform random ones in [0, 1)."""
        first, second = uniforms.to(self.parameters.device).clamp(1e-7, 1 - 1e-7)
        if self.likelihood == "quantile":
            return self._interpolate(first)
        angle = torch.cos(2 * math.pi * second)
        scale = log_scale(self.parameters[..., 1]).exp()
        if self.likelihood == "gaussian":  # by Box and Muller
            radius = (-2 * first.log()).sqrt()
        else:  # by Bailey: the same for Student's t
            freedom = degrees_of_freedom(self.parameters[..., 2])
            radius = (freedom * torch.expm1(-2 / freedom * first.log())).sqrt()
        return self.parameters[..., 0] + scale * radius * angle

    def crps(
        self, targets: Float[Tensor, "*rows Y"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "*rows Y"]:
        """The CRPS of each number, NaN without a target: of normal distributions exact, else from
        `CRPS_SAMPLES` samples."""
        if self.likelihood == "gaussian":
            deviation = log_scale(self.parameters[..., 1]).exp()
            return normal_crps(self.parameters[..., 0], deviation, targets)
        several = self.parameters.expand(CRPS_SAMPLES, *self.parameters.shape)
        return sample_crps(Distribution(several, self.likelihood).sample(generator), targets)

    def _interpolate(self, level: Float[Tensor, "*rows Y"]) -> Float[Tensor, "*rows Y"]:
        """The quantiles at these levels: linear between the predicted ones, and beyond them."""
        ordered = self.parameters.sort(dim=-1).values.contiguous()  # predicted ones may cross
        levels = level.new_tensor(QUANTILES)
        upper = torch.searchsorted(levels, level.contiguous()).clamp(1, len(QUANTILES) - 1)
        low, high = levels[upper - 1], levels[upper]
        below = ordered.gather(-1, (upper - 1)[..., None])[..., 0]
        above = ordered.gather(-1, upper[..., None])[..., 0]
        return below + (level - low) / (high - low) * (above - below)


def normal_crps(
    mean: Float[Tensor, "*rows"], deviation: Float[Tensor, "*rows"], targets: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """The continuous ranked probability score of normal distributions; NaN without a target."""
    z = (targets - mean) / deviation
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return deviation * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))


def sample_crps(
    samples: Float[Tensor, "K *rows"], targets: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """The continuous ranked probability score of K samples, unbiased; NaN without a target.

    E|X - y| - E|X - X'| / 2: in the units of the target, 0 is perfect, and for a single sample it
    is the absolute error.
    """
    count = len(samples)
    error = (samples - targets).abs().mean(0)
    if count == 1:
        return error
    # The mean distance of two different samples, from their order.
    weight = 2 * torch.arange(1, count + 1, device=samples.device) - count - 1
    ordered = samples.sort(dim=0).values
    spread = torch.einsum("k,k...->...", weight.to(ordered), ordered)
    return error - spread / (count * (count - 1))
