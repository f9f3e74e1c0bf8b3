"""Naive forecasts of numbers: the last observed value, and the value one season before.

They measure how much of the data is easy. A missing value is replaced by the last one that was
observed (of a season: at the same place of an earlier season); where there is no season before, a
seasonal forecast is the last observed value, and where nothing was observed yet, a forecast is 0,
the centre of scaled data. Probabilities come from a normal distribution around a forecast.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from memtrain.data.series_format import SeriesFormat
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.evaluation.ngram import Baseline
from memtrain.losses import LOG_SCALE_LIMIT, value_losses
from memtrain.models.likelihood import normal_crps
from memtrain.shapes import QUANTILES, Batch, Likelihood

TRAINING_WINDOWS = 256
"""Training sequences whose errors give the deviations of naive forecasts."""
LEAST_DEVIATION = math.exp(-LOG_SCALE_LIMIT)
"""The smallest deviation, that of the models: an exact forecast has no finite likelihood."""
NAIVE, SEASONAL = "naive", "seasonal-naive"

Guess = tuple[Float[Tensor, "*rows Y"], Bool[Tensor, "*rows Y"]]
"""Forecasts, and where they are of a season before; elsewhere they are the last observed value."""


def series_format(task: object) -> SeriesFormat | None:
    """The format of a task's series, if it has one."""
    found = getattr(task, "format", None)
    return found if isinstance(found, SeriesFormat) else None


def fill_forward(numbers: Float[Tensor, "B T Y"], every: int = 1) -> Float[Tensor, "B T Y"]:
    """Replace missing numbers by the last observed ones that are a multiple of `every` before."""
    length = numbers.shape[1]
    lead = -length % every
    padded = torch.nn.functional.pad(numbers, (0, 0, lead, 0), value=math.nan)
    rows = padded.unflatten(1, (-1, every))  # (B, seasons, every, Y)
    place = torch.arange(rows.shape[1], device=rows.device)[:, None, None]
    last = place.where(~rows.isnan(), 0).cummax(dim=1).values
    return rows.gather(1, last).flatten(1, 2)[:, lead:]


def next_guesses(numbers: Float[Tensor, "B T Y"], season: int = 0) -> Guess:
    """The forecast of the number after each one; without a season the last observed number."""
    guess = fill_forward(numbers).nan_to_num(0.0)
    seasonal = torch.zeros_like(guess, dtype=torch.bool)
    length = numbers.shape[1]
    if 0 < season <= length:
        before = fill_forward(numbers, season)[:, : length - season + 1]
        seasonal[:, season - 1 :] = ~before.isnan()
        guess[:, season - 1 :] = before.where(seasonal[:, season - 1 :], guess[:, season - 1 :])
    return guess, seasonal


def horizon_guesses(history: Float[Tensor, "B P Y"], horizon: int, season: int = 0) -> Guess:
    """The forecasts of the next `horizon` numbers after a history; see `next_guesses`."""
    guess = fill_forward(history)[:, -1:].nan_to_num(0.0).expand(-1, horizon, -1)
    if not 0 < season <= history.shape[1]:
        return guess, torch.zeros_like(guess, dtype=torch.bool)
    place = torch.arange(horizon, device=history.device) % season
    before = fill_forward(history, season)[:, -season:][:, place]
    return before.where(~before.isnan(), guess), ~before.isnan()


def deviations(
    guess: Float[Tensor, "N Y"], targets: Float[Tensor, "N Y"], kept: Bool[Tensor, "N Y"]
) -> Float[Tensor, " Y"]:
    """The root mean squared error of forecasts by column, over those that are kept; else 1."""
    error = (guess - targets).square().where(kept, math.nan)
    return error.nanmean(0).sqrt().nan_to_num(1.0).clamp(min=LEAST_DEVIATION)


def naive_baselines(task: Task, batch: Batch) -> list[Baseline]:
    """Score naive forecasts of the next number on a model's targets.

    A deviation per target column is fitted to training sequences, or to the held-out ones
    themselves if the task's `sample` fails; `Baseline.fitted_tokens` counts its numbers. Where a
    model predicts quantiles, the loss is the pinball loss of the quantiles of that distribution.
    """
    assert task.values is not None
    columns, likelihood = task.values.targets, task.values.likelihood
    series = series_format(task)
    fitted = training_batch(task) or batch
    observed = fitted.inputs[..., :columns], batch.inputs[..., :columns]
    names = {NAIVE: 0}
    if series is not None and 1 < series.season <= batch.inputs.shape[1]:
        names[SEASONAL] = series.season
    found, spreads = [], []
    for name, season in names.items():
        guess, seasonal = next_guesses(observed[0], season)
        kept = seasonal if season else ~seasonal
        spread = deviations(*(one.flatten(0, 1) for one in (guess, fitted.targets, kept)))
        spreads.append(spread.to(batch.targets.device))
        guess, seasonal = next_guesses(observed[1], season)
        # Where there is no season before, it is the naive forecast.
        spread = spreads[-1].where(seasonal, spreads[0])
        loss, mse, crps = naive_scores(guess, spread, batch.targets, likelihood)
        count = int((~fitted.targets.isnan()).sum())
        found.append(Baseline(name, loss, None, count, mse=mse, crps=crps))
    return found


def training_batch(task: Task) -> Batch | None:
    """Training sequences, always the same; None if the task cannot sample any."""
    try:
        return task.sample(TRAINING_WINDOWS, torch.Generator(task.device).manual_seed(0))
    except (MemtrainError, NotImplementedError):
        return None


def naive_scores(
    mean: Float[Tensor, "*rows Y"],
    deviation: Float[Tensor, "*rows Y"],
    targets: Float[Tensor, "*rows Y"],
    likelihood: Likelihood,
) -> tuple[float, float, float]:
    """Loss, squared error and CRPS of normal distributions, means over all targets."""
    if likelihood == "quantile":
        levels = torch.special.ndtri(mean.new_tensor(QUANTILES))
        outputs = mean[..., None] + deviation[..., None] * levels
        loss = value_losses(outputs.flatten(-2), targets, "quantile").where(
            ~targets.isnan(), math.nan
        )
    else:
        z = (targets - mean) / deviation
        loss = 0.5 * z.square() + deviation.log() + 0.5 * math.log(2 * math.pi)
    scores = (loss, (targets - mean).square(), normal_crps(mean, deviation, targets))
    return tuple(float(one.double().nanmean()) for one in scores)  # pyright: ignore
