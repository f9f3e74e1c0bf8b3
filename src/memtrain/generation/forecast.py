"""`forecast`: sample what follows a past of numbers."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.data.series_format import ForecastCases, SeriesFormat
from memtrain.errors import MemtrainError
from memtrain.evaluation.closed_loop import closed_loop
from memtrain.evaluation.forecast_scores import (
    LEVELS,
    ForecastExample,
    column_names,
    quantiles_of,
)
from memtrain.evaluation.forecasts import EXAMPLES, closed_loop_error
from memtrain.evaluation.naive import horizon_guesses, series_format
from memtrain.files import write_output
from memtrain.models.rnn import RNN
from memtrain.shapes import Values, describe_space

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Forecast", "closed_loop_error", "forecast", "forecast_cases"]

SUFFIXES = (".csv", ".npz", ".png")


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Sample paths of what follows some pasts, in the units of the numbers that were given."""

    paths: Float[Tensor, "N B H Y"]
    """N sample paths of B rows, H steps and Y target numbers; one path of means if `mean=True`."""
    history: Float[Tensor, "B P Y"]
    """The target numbers that were read."""
    columns: tuple[str, ...]
    """Names of the target numbers."""
    season: int = 0
    """Steps per season, for the seasonal-naive line of the figure; 0 if unknown."""
    truth: Float[Tensor, "B H Y"] | None = None
    """What followed, if it is known."""

    def mean(self) -> Float[Tensor, "B H Y"]:
        """The mean of the paths."""
        return self.paths.mean(0)

    def median(self) -> Float[Tensor, "B H Y"]:
        """The median of the paths."""
        return self.quantile(0.5)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The q-th quantile of the paths (B, H, Y), 0 <= q <= 1; of several q, (Q, B, H, Y)."""
        levels = [q] if isinstance(q, int | float) else list(q)
        for level in levels:
            if not isinstance(level, int | float) or not 0 <= level <= 1:
                raise MemtrainError(f"q={level!r}: must be from 0 to 1; 0.5 is the median")
        found = quantiles_of(self.paths, levels)
        return found[0] if isinstance(q, int | float) else found

    def __repr__(self) -> str:
        count, rows, steps, _ = self.paths.shape
        return (
            f"<Forecast: {count} paths of {steps} steps after {rows} past{'s' * (rows > 1)}, "
            f"{', '.join(self.columns)}>"
        )

    def plot(self) -> "Figure":
        """The first pasts, medians and bands as a matplotlib Figure."""
        from memtrain.plotting.forecasts import forecast_figure

        return forecast_figure(self.examples(), self.columns)

    def _repr_png_(self) -> bytes:
        """The figure, for notebooks."""
        from memtrain.plotting.style import render_figure

        return render_figure(self.plot())

    def examples(self, most: int = EXAMPLES) -> list[ForecastExample]:
        """The first rows, for a figure."""
        bands, steps = self.quantile(LEVELS), self.paths.shape[2]
        seasonal = None
        if 1 < self.season <= self.history.shape[1]:
            seasonal, _ = horizon_guesses(self.history, steps, self.season)
        return [
            ForecastExample(
                history=self.history[row],
                quantiles=bands[:, row],
                truth=None if self.truth is None else self.truth[row],
                seasonal=None if seasonal is None else seasonal[row],
            )
            for row in range(min(most, len(self.history)))
        ]

    def save(self, path: Path | str) -> None:
        """Save the forecast; missing folders are created.

        Args:
            path: NAME.csv, a line per row, step and column with the mean and the 10, 25, 50, 75 and
                90 % quantiles; NAME.npz, all paths, history and columns as arrays; or NAME.png, a
                figure of the first rows.
        """
        path = check_forecast_file(Path(path))
        if path.suffix.lower() == ".png":
            from memtrain.plotting.style import save

            save(self.plot(), path)
        elif path.suffix.lower() == ".npz":
            content = io.BytesIO()
            arrays: dict[str, Any] = {"paths": self.paths.numpy(), "history": self.history.numpy()}
            if self.truth is not None:
                arrays["truth"] = self.truth.numpy()
            arrays["columns"] = np.array(self.columns)
            np.savez_compressed(content, **arrays)
            write_output(path, content.getvalue())
        else:
            write_output(path, self._csv().encode())

    def _csv(self) -> str:
        import csv

        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [f"q{100 * level:g}" for level in LEVELS]
        writer.writerow(["row", "step", "column", "mean", *names])
        numbers = torch.cat([self.mean()[None], self.quantile(LEVELS)])  # (1 + Q, B, H, Y)
        for row in range(numbers.shape[1]):
            for step in range(numbers.shape[2]):
                for at, column in enumerate(self.columns):
                    cells = [f"{number:.7g}" for number in numbers[:, row, step, at].tolist()]
                    writer.writerow([row, step + 1, column, *cells])
        return text.getvalue()


def check_forecast_file(path: Path) -> Path:
    """Refuse a name whose ending is not one of a forecast's files."""
    if path.suffix.lower() not in SUFFIXES:
        raise MemtrainError(
            f"path={path}: a forecast is saved as {', '.join(SUFFIXES)}; end the name in one"
        )
    return path


def forecast(
    model: Any,
    inputs: Any,
    steps: int,
    *,
    known: Any = None,
    count: int = 100,
    seed: int = 0,
    mean: bool = False,
) -> Forecast:
    """Sample what follows: the network reads the past, then its own samples, one by one.

    Numbers are given and returned in the data's units if the model has a `SeriesFormat` (a run of
    a series, or its RNN by `load_rnn`), which scales them; else in the units that the network
    reads. NaN marks a missing number of the past.

    Args:
        model: a `Run`, the result of `load_rnn` or `load_pretrained`, or an `RNN` with values.
        inputs: the past, (B, P, X): target numbers of a time, then what is known of the next time.
        steps: how many steps to forecast, H.
        known: (B, H, K), if inputs have known numbers; known[:, h] belongs to the input whose
            target numbers are forecast h, so it tells of the time after it. The last forecast is
            not read: (B, H - 1, K) suffices.
        count: sample paths per row.
        seed: the same seed gives the same paths, however many are run together.
        mean: read the predicted means instead of samples: one deterministic path.

    Raises:
        MemtrainError: an argument is invalid, or the network diverges.

    Example: `forecast(run, inputs, 24).save("forecast.png")`
    """
    rnn, series = _parts(model)
    for name, number, least in (("steps", steps, 1), ("count", count, 1), ("seed", seed, 0)):
        if type(number) is not int or number < least:
            raise MemtrainError(f"{name}={number!r}: must be a whole number, at least {least}")
    values = rnn.space
    assert isinstance(values, Values)
    past = _numbers("inputs", inputs, ("B", "P"), values.features)
    future = _known(known, len(past), steps, values)
    history = past[..., : values.targets]
    if series is not None:
        scaled = series.scale_targets(history), series.scale_known(past[..., values.targets :])
        past = torch.cat(scaled, dim=-1)
        future = None if future is None else series.scale_known(future)
    return _forecast(rnn, series, past, future, steps, count, seed, mean, history)


def forecast_cases(
    model: Any, cases: ForecastCases, *, count: int = 100, seed: int = 0
) -> Forecast:
    """Forecast cases of a task, which are in the model's units; the result is as of `forecast`."""
    rnn, series = _parts(model)
    width, steps = cases.targets.shape[2], cases.targets.shape[1]
    history, truth = cases.inputs[..., :width], cases.targets
    if series is not None:
        history, truth = series.unscale_targets(history), series.unscale_targets(truth)
    known = cases.known if cases.known.shape[2] else None
    return _forecast(
        rnn, series, cases.inputs, known, steps, count, seed, False, history, truth=truth.cpu()
    )


def _forecast(
    rnn: RNN,
    series: SeriesFormat | None,
    past: Tensor,
    known: Tensor | None,
    steps: int,
    count: int,
    seed: int,
    mean: bool,
    history: Tensor,
    **more: Any,
) -> Forecast:
    """Paths from a past and known numbers in the model's units."""
    device = rnn.readout.head.weight.device
    past = past.float().to(device)
    known = None if known is None else known.float().to(device)
    rnn.check_tokens("inputs", past)
    options: dict[str, Any] = dict(count=count, seed=seed, mean=mean)
    paths = closed_loop(rnn, past, steps, known=known, **options).cpu()
    if series is not None:
        paths = series.unscale_targets(paths.double()).float()
    columns = column_names(series, paths.shape[3])
    season = series.season if series is not None else 0
    return Forecast(paths, history.float().cpu(), columns, season, **more)


def _parts(model: Any) -> tuple[RNN, SeriesFormat | None]:
    """The RNN of a model, and the format of its numbers."""
    if isinstance(model, str | Path):
        raise MemtrainError(
            f"model={str(model)!r}: is a name, not a model; load it: load_rnn({str(model)!r})"
        )
    rnn = getattr(model, "rnn", model)
    if not isinstance(rnn, RNN):
        raise MemtrainError(
            f"model={type(model).__name__}: must be a Run, the result of load_rnn, or an RNN"
        )
    if not isinstance(rnn.space, Values):
        raise MemtrainError(
            f"model={type(model).__name__}: reads tokens ({describe_space(rnn.space)}) and has no "
            "numbers to forecast; memtrain.generate samples from it"
        )
    series = getattr(model, "series", None) or series_format(getattr(model, "task", None))
    return rnn, series


def _numbers(name: str, found: Any, axes: tuple[str, str], width: int) -> Tensor:
    """Numbers as a tensor (axes, width)."""
    shape = f"({', '.join(axes)}, {width})"
    try:
        numbers = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError, KeyError):  # KeyError: a table of pandas
        kind = type(found).__name__
        raise MemtrainError(f"{name}={kind}: must be numbers of shape {shape}") from None
    if numbers.dim() != 3 or numbers.shape[2] != width or not numbers.numel():
        hint = f"; {name}[None] makes a batch of one" if numbers.dim() == 2 else ""
        raise MemtrainError(f"{name}: must have shape {shape}, not {tuple(numbers.shape)}{hint}")
    numbers = numbers.detach().double()
    if bool(numbers.isinf().any()):
        raise MemtrainError(f"{name}: contains infinity; numbers must be finite, or NaN if missing")
    return numbers


def _known(found: Any, rows: int, steps: int, values: Values) -> Tensor | None:
    """The known numbers of the future, checked."""
    if not values.known:
        if found is not None:
            raise MemtrainError(
                "known: must be left out; all numbers of this model's inputs are target numbers"
            )
        return None
    shape = f"({rows}, {steps}, {values.known})"
    if found is None:
        if steps == 1:
            return None
        raise MemtrainError(
            f"known=None: must be numbers of shape {shape}; this model's inputs have "
            f"{values.known} known numbers beside {values.targets} target numbers"
        )
    known = _numbers("known", found, (str(rows), str(steps)), values.known)
    if len(known) != rows or known.shape[1] not in (steps, steps - 1):
        raise MemtrainError(f"known: must have shape {shape}, not {tuple(known.shape)}")
    return known
