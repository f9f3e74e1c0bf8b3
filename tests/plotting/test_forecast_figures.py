"""Figures of forecasts."""

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from memtrain.evaluation.forecast_scores import ForecastExample
from memtrain.plotting.forecasts import forecast_figure, save_forecast_figure


def example(columns: int = 1, horizon: int = 6, seasonal: bool = True, truth: bool = True):
    past = torch.arange(30.0)[:, None].expand(30, columns)
    bands = torch.linspace(-2, 2, 5)[:, None, None].expand(5, horizon, columns) + 30
    after = torch.full((horizon, columns), 31.0)
    return ForecastExample(past, bands, after if truth else None, after if seasonal else None)


def test_one_column_has_a_panel_per_origin():
    figure = forecast_figure([example()] * 3, ["load [MW]"], "a run")
    drawn = [axes for axes in figure.axes if axes.get_visible()]
    assert len(drawn) == 3 and len(figure.axes) == 4
    assert [axes.get_ylabel() for axes in drawn] == ["load [MW]", "", "load [MW]"]
    # The lowest panel of each column has the name of the axis.
    assert [bool(axes.get_xlabel()) for axes in drawn] == [False, True, True]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "history", "80 % band", "50 % band", "seasonal-naive", "median", "what followed",
    ]  # fmt: skip
    line = {line.get_label(): line for line in drawn[0].lines}
    assert list(np.asarray(line["what followed"].get_xdata())) == list(range(7))
    assert list(np.asarray(line["median"].get_xdata())) == list(range(1, 7))
    assert np.asarray(line["history"].get_xdata())[-1] == 0


def test_several_columns_have_a_row_each():
    figure = forecast_figure([example(2)] * 4, ["load", "price"])
    assert len(figure.axes) == 6  # of at most three origins
    assert [axes.get_ylabel() for axes in figure.axes] == ["load", "", "", "price", "", ""]


@pytest.mark.parametrize("horizon", [1, 40])
def test_what_is_unknown_is_not_drawn(tmp_path, horizon: int):
    one = example(horizon=horizon, seasonal=False, truth=False)
    one.history[20:22] = torch.nan
    labels = [text.get_text() for text in forecast_figure([one], ["y"]).legends[0].get_texts()]
    assert labels == ["history", "80 % band", "50 % band", "median"]
    save_forecast_figure([one], tmp_path / "deep" / "forecast.png", ["y"])
    assert imread(tmp_path / "deep" / "forecast.png").ndim == 3
