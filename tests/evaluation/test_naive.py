"""Naive forecasts of numbers, against numbers computed by hand."""

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch

from memtrain.data.series_format import SeriesFormat
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.evaluation.naive import (
    NAIVE,
    SEASONAL,
    fill_forward,
    horizon_guesses,
    naive_baselines,
    next_guesses,
)
from memtrain.shapes import QUANTILES, Batch, Values

NAN = math.nan


def series(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[None, :, None]


def listed(numbers: torch.Tensor) -> list[float]:
    return [None if math.isnan(n) else n for n in numbers.flatten().tolist()]  # type: ignore


def test_missing_numbers_are_the_last_observed_ones():
    assert listed(fill_forward(series(NAN, 1, NAN, NAN, 4))) == [None, 1, 1, 1, 4]
    every_third = fill_forward(series(1, NAN, 3, NAN, 5, NAN, 7, NAN), 3)
    assert listed(every_third) == [1, None, 3, 1, 5, 3, 7, 5]


def test_the_next_number_is_the_last_one_or_that_of_a_season_before():
    numbers = series(1, 2, 3, NAN, 5, 6)
    guess, seasonal = next_guesses(numbers)
    assert listed(guess) == [1, 2, 3, 3, 5, 6] and not seasonal.any()
    guess, seasonal = next_guesses(numbers, season=3)
    # The third guess is of time 3, a season after time 0; the last of time 6 is of time 0, as time
    # 3 is missing.
    assert listed(guess) == [1, 2, 1, 2, 3, 1]
    assert seasonal.flatten().tolist() == [False, False, True, True, True, True]
    assert listed(next_guesses(series(NAN, NAN, 2))[0]) == [0, 0, 2]


def test_a_horizon_repeats_the_last_number_or_season():
    numbers = series(0, 1, 2, 3, NAN, 5)
    assert listed(horizon_guesses(numbers, 4)[0]) == [5, 5, 5, 5]
    assert listed(horizon_guesses(series(1, NAN), 2)[0]) == [1, 1]
    assert listed(horizon_guesses(numbers, 5, season=3)[0]) == [3, 1, 5, 3, 1]
    guess, seasonal = horizon_guesses(numbers, 2, season=7)  # no season is that long
    assert listed(guess) == [5, 5] and not seasonal.any()


class Fixed(Task):
    """Training residuals of deviation 2 for the last number; held-out numbers of one's choice."""

    sequence_length = 4
    values = Values(features=1)

    def __init__(self, season: int = 0, likelihood: Any = "gaussian", trains: bool = True) -> None:
        self.values = Values(features=1, likelihood=likelihood)
        self.trains = trains
        self.format = SeriesFormat(
            targets=("y",), target_centre=(0.0,), target_scale=(1.0,), season=season
        )

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        if not self.trains:
            raise MemtrainError("there are no training sequences")
        numbers = torch.tensor([0.0, 2.0, 0.0, 2.0, 0.0]).expand(count, -1)[..., None]
        return Batch(numbers[:, :-1], numbers[:, 1:])


HELD_OUT = Batch(series(1, 2, NAN, 4), series(2, NAN, 4, 8))


def test_baselines_equal_numbers_computed_by_hand():
    (naive,) = naive_baselines(Fixed(), HELD_OUT)
    # Guesses 1, 2, 2, 4 of targets 2, none, 4, 8: errors 1, 2, 4.
    assert naive.name == NAIVE and naive.bits is None
    assert naive.mse == pytest.approx((1 + 4 + 16) / 3)
    nats = 0.5 * (1 + 4 + 16) / 3 / 4 + math.log(2) + 0.5 * math.log(2 * math.pi)
    assert naive.nats == pytest.approx(nats, rel=1e-5)
    normal = torch.distributions.Normal(0.0, 1.0)
    crps = 0.0
    for error in (1.0, 2.0, 4.0):
        z = torch.tensor(error / 2)
        cdf, density = normal.cdf(z), normal.log_prob(z).exp()
        crps += 2 * float(z * (2 * cdf - 1) + 2 * density - 1 / math.sqrt(math.pi)) / 3
    assert naive.crps == pytest.approx(crps, rel=1e-5)


def test_the_seasonal_baseline_uses_a_season_before_where_there_is_one():
    naive, seasonal = naive_baselines(Fixed(season=2), HELD_OUT)
    # Guesses: 1 (the last), then times 0, 1 and 0 again, as time 2 is missing: 1, 2, 1.
    assert seasonal.name == SEASONAL and naive.name == NAIVE
    assert seasonal.mse == pytest.approx((1 + 4 + 49) / 3)
    assert seasonal.nats > 100  # training data is exactly periodic: the smallest deviation
    assert len(naive_baselines(Fixed(season=5), HELD_OUT)) == 1


def test_deviations_are_of_held_out_errors_without_training_sequences():
    (naive,) = naive_baselines(Fixed(trains=False), HELD_OUT)
    deviation = math.sqrt((1 + 4 + 16) / 3)
    assert naive.nats == pytest.approx(0.5 + math.log(deviation) + 0.5 * math.log(2 * math.pi))
    assert naive.fitted_tokens == 3


def test_with_quantiles_the_loss_is_the_pinball_loss():
    (naive,) = naive_baselines(Fixed(likelihood="quantile"), HELD_OUT)
    (normal,) = naive_baselines(Fixed(), HELD_OUT)
    assert (naive.mse, naive.crps) == (normal.mse, normal.crps)
    total = 0.0
    for level in QUANTILES:
        quantile = NormalDist(0, 2).inv_cdf(level)
        for error in (1.0, 2.0, 4.0):
            total += max(level * (error - quantile), (level - 1) * (error - quantile))
    assert naive.nats == pytest.approx(total / 3 / len(QUANTILES), rel=1e-5)
