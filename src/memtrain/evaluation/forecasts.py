"""Score forecasts of several steps against what followed, and against naive ones."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.data.series_format import ForecastCases, SeriesFormat
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.evaluation.closed_loop import closed_loop
from memtrain.evaluation.naive import (
    NAIVE,
    SEASONAL,
    deviations,
    horizon_guesses,
    series_format,
    training_batch,
)
from memtrain.models.likelihood import normal_crps, sample_crps
from memtrain.models.rnn import RNN
from memtrain.shapes import Batch

FORECAST_SEED = 2**31 - 2
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles of an example: the median, and the edges of the 50 % and 80 % bands."""
EXAMPLES = 4
"""Origins that are kept for a figure."""


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


@dataclass(frozen=True, slots=True)
class ForecastEvaluation:
    """Forecasts of a network and naive ones from the same held-out origins."""

    horizon: int
    """Steps that are forecast."""
    origins: int
    """Places in the held-out data where forecasts start."""
    count: int
    """Sample paths of each of the network's forecasts."""
    methods: dict[str, ForecastScore]
    """Of "RNN", "naive (last value)" and, if the data has a season, "seasonal-naive"."""
    coverage: float
    """The share of what followed that is in the RNN's 80 % band; 0.8 if it is calibrated."""
    fitted: Literal["training", "held-out"]
    """The errors that gave the deviations of the naive forecasts by step: of training sequences, or
    if those are too short, of these very forecasts, which flatters them."""
    examples: list[ForecastExample] = field(default_factory=list, repr=False, compare=False)
    """For a figure."""

    def to_json(self) -> dict[str, Any]:
        """All but the examples, as plain data."""
        methods = {name: asdict(score) for name, score in self.methods.items()}
        names = ("horizon", "origins", "count", "coverage", "fitted")
        return {name: getattr(self, name) for name in names} | {"methods": methods}

    def __repr__(self) -> str:
        crps = ", ".join(f"{name} {score.crps:.4f}" for name, score in self.methods.items())
        return (
            f"<ForecastEvaluation of {self.horizon} steps from {self.origins} origins, CRPS: "
            f"{crps}; coverage of the 80 % band {self.coverage:.1%}>"
        )


def closed_loop_error(
    rnn: RNN, cases: ForecastCases, *, count: int = 100, seed: int = 0
) -> ForecastScore:
    """The errors of a network's forecasts, overall and by step, in the units of the cases.

    Args:
        rnn: the network, on the device of the cases.
        cases: pasts, known numbers and what followed.
        count: sample paths per case.
        seed: of the samples.
    """
    steps = cases.targets.shape[1]
    paths = closed_loop(rnn, cases.inputs, steps, known=cases.known, count=count, seed=seed)
    return _sample_score(paths, cases.targets, None)


def evaluate_forecasts(
    model: Any,
    task: Task,
    horizon: int | None = None,
    *,
    origins: int = 64,
    count: int = 100,
    history: int | None = None,
    seed: int = FORECAST_SEED,
) -> ForecastEvaluation:
    """Forecast from held-out origins, and score it against what followed and naive forecasts.

    Origins are the task's `forecast_cases`; of a task without them, places in held-out sequences,
    the last `horizon` steps of which are forecast from those before.

    Args:
        model: an RNN that reads numbers, or a Run or Pretrained with one.
        task: the source of the origins.
        horizon: steps to forecast; by default a season, else a quarter of a sequence.
        origins: how many, fewer if the data has fewer.
        count: sample paths per origin.
        history: steps read before an origin; by default a whole sequence and at least a season.
        seed: of the sample paths, and of held-out sequences.

    Raises:
        MemtrainError: an argument is something else.
    """
    rnn = getattr(model, "rnn", model)
    if not isinstance(rnn, RNN) or not isinstance(task, Task):
        wrong = "model" if not isinstance(rnn, RNN) else "task"
        kind = "RNN, Run or Pretrained" if wrong == "model" else "Task"
        found = type(model if wrong == "model" else task).__name__
        raise MemtrainError(f"{wrong}={found}: must be a memtrain.{kind}")
    if task.values is None or task.space != rnn.space:
        raise MemtrainError(f"task={type(task).__name__}: must have the numbers that {rnn} reads")
    series = series_format(task)
    season = series.season if series is not None else 0
    if horizon is None:
        horizon = season or max(1, task.sequence_length // 4)
    for name, number in (("horizon", horizon), ("origins", origins), ("count", count)):
        if type(number) is not int or number < 1:
            raise MemtrainError(f"{name}={number!r}: must be a whole number above 0")
    device = rnn.readout.head.weight.device
    cases = _cases(task, horizon, origins, history or max(task.sequence_length, season), seed)
    cases = ForecastCases(*(one.to(device) for one in (cases.inputs, cases.known, cases.targets)))
    paths = closed_loop(rnn, cases.inputs, horizon, known=cases.known, count=count, seed=seed)
    return _compared(task, cases, paths, series)


def _cases(task: Task, horizon: int, origins: int, history: int, seed: int) -> ForecastCases:
    find = getattr(task, "forecast_cases", None)
    if find is not None:
        return find(origins, horizon, history)
    if horizon > task.sequence_length:
        raise MemtrainError(
            f"horizon={horizon}: must be at most {task.sequence_length}, the length of the task's "
            "sequences"
        )
    generator = torch.Generator(task.device).manual_seed(seed)
    return cases_of(task.held_out(origins, generator), horizon)


def cases_of(batch: Batch, horizon: int) -> ForecastCases:
    """The last `horizon` targets of sequences, to be forecast from the steps before them."""
    width = batch.targets.shape[2]
    past = batch.inputs.shape[1] - horizon + 1
    # The last known numbers are never read.
    known = torch.nn.functional.pad(batch.inputs[:, past:, width:], (0, 0, 0, 1))
    return ForecastCases(batch.inputs[:, :past], known, batch.targets[:, -horizon:])


def _compared(
    task: Task, cases: ForecastCases, paths: Float[Tensor, "N B H Y"], series: SeriesFormat | None
) -> ForecastEvaluation:
    targets = cases.targets
    horizon, width = targets.shape[1:]
    observed = cases.inputs[..., :width]
    season = series.season if series is not None else 0
    methods = {"RNN": _sample_score(paths, targets, series)}
    fitted, training = cases, training_batch(task)
    if training is not None and training.inputs.shape[1] - horizon + 1 >= max(1, season):
        fitted = cases_of(training, horizon)
    guess = None
    names = {NAIVE: 0} | ({SEASONAL: season} if season > 1 else {})
    for name, length in names.items():
        guess, _ = horizon_guesses(fitted.inputs[..., :width], horizon, length)
        kept = torch.ones_like(guess, dtype=torch.bool)
        spread = deviations(*(one.flatten(1) for one in (guess, fitted.targets, kept)))
        guess, _ = horizon_guesses(observed, horizon, length)
        spread = spread.view(horizon, width).to(targets.device).expand_as(guess)
        methods[name] = _score(guess, guess, normal_crps(guess, spread, targets), targets, series)
    low, high = quantiles_of(paths, (0.1, 0.9))
    inside = (low <= targets) & (targets <= high)
    coverage = float(inside[~targets.isnan()].float().mean())
    return ForecastEvaluation(
        horizon=horizon,
        origins=len(targets),
        count=len(paths),
        methods=methods,
        coverage=coverage,
        fitted="held-out" if fitted is cases else "training",
        examples=_examples(cases, paths, guess if season > 1 else None, series),
    )


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


def _sample_score(
    paths: Float[Tensor, "N B H Y"], targets: Float[Tensor, "B H Y"], series: SeriesFormat | None
) -> ForecastScore:
    median = quantiles_of(paths, [0.5])[0]
    return _score(paths.mean(0), median, sample_crps(paths, targets), targets, series)


def _score(
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
    overall = {name: float(error.nanmean()) for name, error in errors.items()}
    by_step = {
        f"{name}_by_step": error.nanmean(dim=(0, 2)).tolist() for name, error in errors.items()
    }
    return ForecastScore(**overall, **by_step, columns=columns)


def _examples(
    cases: ForecastCases,
    paths: Float[Tensor, "N B H Y"],
    seasonal: Float[Tensor, "B H Y"] | None,
    series: SeriesFormat | None,
) -> list[ForecastExample]:
    """Some of the forecasts, spread evenly over the origins."""
    count, width = min(EXAMPLES, len(cases.targets)), cases.targets.shape[2]
    chosen = torch.linspace(0, len(cases.targets) - 1, count).round().long().unique().tolist()
    units = series.unscale_targets if series is not None else lambda numbers: numbers
    return [
        ForecastExample(
            history=units(cases.inputs[row, :, :width]).cpu(),
            quantiles=units(quantiles_of(paths[:, row], LEVELS)).cpu(),
            truth=units(cases.targets[row]).cpu(),
            seasonal=None if seasonal is None else units(seasonal[row]).cpu(),
        )
        for row in chosen
    ]
