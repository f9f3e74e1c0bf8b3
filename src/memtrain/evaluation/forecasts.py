"""Score forecasts of several steps against what followed, and against naive ones."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.data.series_format import ForecastCases, SeriesFormat
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.evaluation.closed_loop import closed_loop
from memtrain.evaluation.forecast_scores import (
    LEVELS,
    ForecastExample,
    ForecastScore,
    column_names,
    forecast_score,
    quantiles_of,
    sample_score,
)
from memtrain.evaluation.naive import (
    NAIVE,
    SEASONAL,
    deviations,
    horizon_guesses,
    series_format,
    training_batch,
)
from memtrain.models.likelihood import normal_crps
from memtrain.models.rnn import RNN
from memtrain.shapes import Batch

FORECAST_SEED = 2**31 - 2
EXAMPLES = 4
"""Origins that are kept for a figure."""


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
    """Of "RNN", "naive" and, if the data has a season, "seasonal-naive"."""
    coverage: float
    """The share of what followed that is in the RNN's 80 % band; 0.8 if it is calibrated."""
    fitted: Literal["training", "held-out"]
    """The errors that gave the deviations of the naive forecasts by step: of training sequences, or
    if those are too short, of these very forecasts, which flatters them."""
    columns: tuple[str, ...] = ()
    """Names of the target columns."""
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
    return sample_score(paths, cases.targets, None)


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
    horizon = default_horizon(task) if horizon is None else horizon
    for name, number in (("horizon", horizon), ("origins", origins), ("count", count)):
        if type(number) is not int or number < 1:
            raise MemtrainError(f"{name}={number!r}: must be a whole number above 0")
    device = rnn.readout.head.weight.device
    cases = held_out_cases(task, horizon, origins, history, seed)
    cases = ForecastCases(*(one.to(device) for one in (cases.inputs, cases.known, cases.targets)))
    paths = closed_loop(rnn, cases.inputs, horizon, known=cases.known, count=count, seed=seed)
    return _compared(task, cases, paths, series_format(task))


def default_horizon(task: Task) -> int:
    """A season, or a quarter of a sequence if there is none; at most what is held out."""
    series = series_format(task)
    wanted = (series.season if series is not None else 0) or max(1, task.sequence_length // 4)
    return min(wanted, getattr(task, "longest_horizon", wanted))


def held_out_cases(
    task: Task,
    horizon: int,
    origins: int,
    history: int | None = None,
    seed: int = FORECAST_SEED,
) -> ForecastCases:
    """Pasts and futures of a task that were not trained on; see `evaluate_forecasts`."""
    find = getattr(task, "forecast_cases", None)
    if find is not None:
        series = series_format(task)
        season = series.season if series is not None else 0
        return find(origins, horizon, history or max(task.sequence_length, season))
    if horizon > task.sequence_length:
        raise MemtrainError(
            f"horizon={horizon}: must be at most {task.sequence_length}, the length of the task's "
            "sequences"
        )
    generator = torch.Generator().manual_seed(seed)
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
    methods = {"RNN": sample_score(paths, targets, series)}
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
        methods[name] = forecast_score(
            guess, guess, normal_crps(guess, spread, targets), targets, series
        )
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
        columns=column_names(series, width),
        examples=_examples(cases, paths, guess if season > 1 else None, series),
    )


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
