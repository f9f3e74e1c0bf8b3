"""Distributions of numbers: samples agree with densities, and scores with known values."""

import math

import pytest
import torch
from torch import distributions

from memtrain.losses import degrees_of_freedom, log_scale, value_losses
from memtrain.models.likelihood import Distribution, sample_crps
from memtrain.shapes import QUANTILES, Values

ROWS = 40_000


def outputs_of(likelihood: str) -> torch.Tensor:
    """One prediction, for every row."""
    if likelihood == "quantile":
        one = distributions.Normal(1.0, 2.0).icdf(torch.tensor(QUANTILES))
    else:
        one = torch.tensor([1.0, 0.7, 1.5])[: 2 if likelihood == "gaussian" else 3]
    return one.expand(ROWS, -1)


@pytest.mark.parametrize("likelihood", ["gaussian", "student-t", "quantile"])
def test_samples_are_those_of_the_predicted_distribution(likelihood):
    values = Values(features=1, likelihood=likelihood)
    outputs = outputs_of(likelihood)
    drawn = Distribution.of(outputs, values).sample(torch.Generator().manual_seed(0))[:, 0]
    scale = float(log_scale(torch.tensor(0.7)).exp())
    if likelihood == "student-t":
        freedom = float(degrees_of_freedom(torch.tensor(1.5)))
        import scipy.stats

        expected = scipy.stats.t(freedom, 1.0, scale).ppf([0.05, 0.25, 0.5, 0.75, 0.95])
    else:
        deviation = scale if likelihood == "gaussian" else 2.0
        levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
        expected = distributions.Normal(1.0, deviation).icdf(levels).tolist()
    found = drawn.quantile(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])).tolist()
    assert found == pytest.approx(list(expected), abs=0.1)


def test_the_losses_are_torchs_densities():
    generator = torch.Generator().manual_seed(1)
    outputs, targets = torch.randn(5, 4, generator=generator), torch.randn(5, 2)
    mean, scale = outputs[:, [0, 2]], log_scale(outputs[:, [1, 3]]).exp()
    expected = -distributions.Normal(mean, scale).log_prob(targets)
    torch.testing.assert_close(value_losses(outputs, targets, "gaussian"), expected)
    outputs = torch.randn(5, 6, generator=generator)
    mean, scale = outputs[:, [0, 3]], log_scale(outputs[:, [1, 4]]).exp()
    freedom = degrees_of_freedom(outputs[:, [2, 5]])
    expected = -distributions.StudentT(freedom, mean, scale).log_prob(targets)
    torch.testing.assert_close(value_losses(outputs, targets, "student-t"), expected)


def test_quantiles_minimize_the_pinball_loss():
    values = Values(features=1, likelihood="quantile")
    right, numbers = outputs_of("quantile"), 1 + 2 * torch.randn(ROWS, 1)
    best = value_losses(right, numbers, values.likelihood).mean()
    for wrong in (right + 0.3, right - 0.3, right * 1.2, right * 0.8):
        assert value_losses(wrong, numbers, values.likelihood).mean() > best


def test_quantiles_that_cross_are_sorted():
    crossed = torch.tensor(QUANTILES).flip(0)[None]
    drawn = Distribution.of(crossed, Values(features=1, likelihood="quantile")).sample()
    assert bool(drawn.isfinite().all())


def test_the_score_of_samples_is_that_of_the_normal_distribution():
    samples = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0.0, 1.0, -2.0])
    normal = distributions.Normal(0.0, 1.0)
    density, below = normal.log_prob(targets).exp(), normal.cdf(targets)
    exact = targets * (2 * below - 1) + 2 * density - 1 / math.sqrt(math.pi)
    torch.testing.assert_close(sample_crps(samples, targets), exact, atol=0.03, rtol=0.0)


def test_the_score_of_one_sample_is_the_absolute_error_and_has_no_bias():
    assert sample_crps(torch.tensor([[2.0]]), torch.tensor([5.0])).item() == 3.0
    generator = torch.Generator().manual_seed(0)
    few = sample_crps(torch.randn(2, ROWS, generator=generator), torch.zeros(ROWS)).mean()
    many = sample_crps(torch.randn(200, 2000, generator=generator), torch.zeros(2000)).mean()
    assert float(few) == pytest.approx(float(many), abs=0.02)
    assert sample_crps(torch.zeros(3, 1), torch.tensor([math.nan])).isnan().all()
