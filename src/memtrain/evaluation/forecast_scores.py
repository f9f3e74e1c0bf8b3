"""Scores of forecasts by method and step of the horizon, and examples for figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from memtrain.data.series_format import SeriesFormat
from memtrain.models.likelihood import sample_crps

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles of an example: the median, and the edges of the 50 % and 80 % bands."""


@dataclass(frozen=True, slots=True)
class ForecastScore:
    """Errors of one method, means over origins and target columns, in the model's units."""

    mse: float
    """Of the mean."""
    mae: float
    """Of the median."""
    crps: float
    """Of the distribution; of a point forecast it would be the absolute error."""
    mse_by_step: list[float]
    """By step of the horizon; NaN where nothing was observed. As are the next two."""
    mae_by_step: list[float]
    crps_by_step: list[float]
    columns: dict[str, dict[str, float]] = field(default_factory=dict)
    """mse, mae and crps of each target column in the data's units, if the task has a format."""


@dataclass(frozen=True, slots=True)
class ForecastExample:
    """A forecast from one origin, in the data's units if they are known."""

    history: Float[Tensor, "P Y"]
    quantiles: Float[Tensor, "5 H Y"]
    """Of the sample paths, at `LEVELS`."""
    truth: Float[Tensor, "H Y"] | None = None
    """What followed."""
    seasonal: Float[Tensor, "H Y"] | None = None
    """The seasonal-naive forecast."""


def column_names(series: SeriesFormat | None, width: int) -> tuple[str, ...]:
    """The names of the target numbers."""
    return tuple(f"number {at}" for at in range(width)) if series is None else series.targets


def quantiles_of(
    paths: Float[Tensor, "N *rows"], levels: Sequence[float]
) -> Float[Tensor, "Q *rows"]:
    """Quantiles of samples, linear between them. (torch.quantile refuses large tensors.)"""
    ordered = paths.sort(dim=0).values
    place = paths.new_tensor(levels).clamp(0, 1) * (len(paths) - 1)
    below = place.floor().long()
    share = (place - below).view(-1, *[1] * (paths.dim() - 1))
    above = (below + 1).clamp(max=len(paths) - 1)
    return ordered[below].lerp(ordered[above], share)


def sample_score(
    paths: Float[Tensor, "N B H Y"], targets: Float[Tensor, "B H Y"], series: SeriesFormat | None
) -> ForecastScore:
    median = quantiles_of(paths, [0.5])[0]
    return forecast_score(paths.mean(0), median, sample_crps(paths, targets), targets, series)


def forecast_score(
    mean: Float[Tensor, "B H Y"],
    median: Float[Tensor, "B H Y"],
    crps: Float[Tensor, "B H Y"],
    targets: Float[Tensor, "B H Y"],
    series: SeriesFormat | None,
) -> ForecastScore:
    errors = {
        "mse": (mean - targets).double().square(),
        "mae": (median - targets).double().abs(),
        "crps": crps.double(),
    }
    columns: dict[str, dict[str, float]] = {}
    for at, column in enumerate(series.targets if series is not None else ()):
        scale = series.target_scale[at] if series is not None else 1.0
        units = {"mse": scale**2, "mae": scale, "crps": scale}
        columns[column] = {
            name: float(error[..., at].nanmean()) * units[name] for name, error in errors.items()
        }
    mse, mae, crps_mean = (float(error.nanmean()) for error in errors.values())
    by_step = [error.nanmean(dim=(0, 2)).tolist() for error in errors.values()]
    return ForecastScore(mse, mae, crps_mean, *by_step, columns=columns)
