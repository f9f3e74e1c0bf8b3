"""Figures of forecasts: history, what followed, median and bands, for a few origins."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrain.evaluation.forecast_scores import ForecastExample
from memtrain.plotting.style import COLOURS, GREY, INK, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORECAST, NAIVE_LINE = COLOURS[0], COLOURS[1]
MOST_COLUMNS = 4
"""Target columns of a series that are drawn."""
MOST_ORIGINS = 3
"""Origins that are drawn of several target columns."""
HISTORY = 2
"""Steps of history that are drawn, in horizons."""
LEAST_HISTORY = 24


def save_forecast_figure(
    examples: Sequence[ForecastExample], path: Path, columns: Sequence[str], title: str = ""
) -> None:
    """Save `forecast_figure`; missing folders are created."""
    save(forecast_figure(examples, columns, title), path)


def forecast_figure(
    examples: Sequence[ForecastExample], columns: Sequence[str], title: str = ""
) -> "Figure":
    """Draw forecasts as small multiples.

    One target column: a panel per origin, two in a row. Several: a row of panels per column, one
    panel per origin.

    Args:
        examples: at least one.
        columns: names of the target columns, with their units if they have any.
        title: of the whole figure.
    """
    drawn = columns[:MOST_COLUMNS]
    if len(drawn) > 1:
        examples = examples[:MOST_ORIGINS]
    if len(drawn) == 1:
        wide = min(2, len(examples))
        rows = -(-len(examples) // wide)
    else:
        rows, wide = len(drawn), len(examples)
    # Few panels may be wide; many in a row must not be wider than a page.
    width = 7.0 if wide == 1 else max(3.2, 11.0 / wide)
    figure, grid = panels(rows, wide, width=width, height=2.7, sharex=True, sharey="row")
    places = [(at, column) for at in range(len(drawn)) for column in range(len(examples))]
    for at, number in places:
        place = divmod(number, wide) if len(drawn) == 1 else (at, number)
        axes = grid[place]
        _draw(axes, examples[number], at)
        if place[1] == 0:
            axes.set_ylabel(drawn[at])
        if place[0] == rows - 1 or number + wide >= len(places):
            axes.set_xlabel("steps after the last observation")
        if len(examples) > 1 and at == 0:
            axes.set_title(f"origin {number + 1}", fontsize=9, loc="left", color=GREY)
    for axes in grid.flat[len(places) :]:  # an odd number of origins
        axes.set_visible(False)
    if len(places) < grid.size and rows > 1:
        grid[-2, -1].tick_params(labelbottom=True)
    if title:
        figure.suptitle(title, fontsize=10)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8.5, frameon=False
    )
    return figure


def _draw(axes: "Axes", example: ForecastExample, at: int) -> None:
    """One column of one forecast."""
    horizon = example.quantiles.shape[1]
    shown = min(len(example.history), max(HISTORY * horizon, LEAST_HISTORY))
    past = example.history[len(example.history) - shown :, at].numpy()
    low, lower, median, upper, high = example.quantiles[:, :, at].numpy()
    steps = np.arange(1, horizon + 1)
    axes.plot(np.arange(1 - shown, 1), past, label="history", **_line(past, GREY, 1.3))
    bands = {"80 % band": (low, high, 0.16), "50 % band": (lower, upper, 0.30)}
    for label, (bottom, top, alpha) in bands.items():
        axes.fill_between(steps, bottom, top, color=FORECAST, alpha=alpha, linewidth=0, label=label)
    if example.seasonal is not None:
        numbers = example.seasonal[:, at].numpy()
        axes.plot(
            steps, numbers, color=NAIVE_LINE, linewidth=1, linestyle="--", label="seasonal-naive"
        )
    axes.plot(steps, median, color=FORECAST, linewidth=2, label="median", **_alone(median))
    if example.truth is not None:
        truth = example.truth[:, at].numpy()
        followed = np.concatenate([past[-1:], truth])
        axes.plot(
            np.arange(horizon + 1), followed, label="what followed", **_line(followed, INK, 1.3)
        )
    axes.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
    axes.margins(x=0.01)


def _line(numbers: np.ndarray, colour: str, width: float) -> dict[str, Any]:
    """The style of observed numbers; dots show those that stand alone between missing ones."""
    dots: dict[str, Any] = dict(marker=".", markersize=3.5) if np.isnan(numbers).any() else {}
    return dict(color=colour, linewidth=width) | dots


def _alone(numbers: np.ndarray) -> dict[str, Any]:
    """A dot for a forecast of a single step, which has no line."""
    return dict(marker="o", markersize=4) if len(numbers) == 1 else {}
