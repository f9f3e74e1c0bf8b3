"""A chart as an HTML figure: axes, lines, legend and labels around the plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memtrain.errors import MemtrainError
from memtrain.plotting.chart.axes import Axis, Number, linear_axis, log_axis
from memtrain.plotting.chart.escaping import escape_text
from memtrain.plotting.chart.hover import hover_data
from memtrain.plotting.chart.lines import (
    Mark,
    Series,
    draw_svg,
    end_places,
    line_classes,
    mark_places,
)

LABEL_LENGTH = 28
"""A name of more characters is too wide for the end of a line; the legend has it then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines over a common axis, with a read-out under the pointer."""

    title: str
    """What the chart shows."""
    x_label: str
    """What runs to the right."""
    y_label: str
    """What runs upwards."""
    series: Sequence[Series]
    """The lines; the order is that of the legend."""
    log_x: bool = False
    """Logarithmic x."""
    log_y: bool = False
    """Logarithmic y."""
    y_range: tuple[Number, Number] | None = None
    """Ends of the y axis; lines are cut there. None follows the points."""
    note: str = ""
    """A sentence under the chart."""
    marks: Sequence[Mark] = ()
    """Places on the x axis that are named."""

    def __post_init__(self) -> None:
        if self.y_range is None:
            return
        low, high = self.y_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise MemtrainError(f"y_range={self.y_range}: must be two numbers, the lower one first")
        if self.log_y:
            raise MemtrainError(f"y_range={self.y_range} with log_y: a log axis follows its points")

    def html(self, *, compact: bool = False) -> str:
        """The chart as a figure; a compact one is low and never has labels at the line ends."""
        drawn = [series.points(log_x=self.log_x, log_y=self.log_y) for series in self.series]
        points = [point for line in drawn for point in line if point]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        x_axis = log_axis(xs) if self.log_x else linear_axis(xs)
        y_axis = (
            log_axis(ys, whole=True)
            if self.log_y
            else linear_axis(ys, fixed=self.y_range, whole=True)
        )
        kinds = line_classes(self.series)
        keys = [_key(series, kind) for series, kind in zip(self.series, kinds, strict=True)]
        brief = all(len(series.name) <= LABEL_LENGTH for series in self.series)
        ends = end_places(drawn, x_axis, y_axis) if brief and not compact else []
        data = hover_data(self.series, [x_axis, y_axis], drawn, kinds)
        shape = "compact" if compact else "ended" if ends else "plain"
        names = ", ".join(series.name for series in self.series)
        summary = f"{self.y_label} against {self.x_label}: {names or 'no series'}"
        empty = "" if points else '<p class="empty">No points to draw.</p>'
        end_labels = "".join(
            f'<span style="top:{place:.2%}">{keys[index]}</span>' for index, place in ends
        )
        return (
            f'<figure class="chart {shape}" data-chart="{escape_text(data)}">'
            f"<figcaption>{escape_text(self.title)}</figcaption>"
            f'<div class="legend">{"".join(keys)}</div>'
            f'<div class="frame"><div class="y-label">{escape_text(self.y_label)}</div>'
            f'<div class="y-ticks">{_tick_spans(y_axis, "top")}</div>'
            f'<div class="plot" role="img" aria-label="{escape_text(summary)}">'
            f"{draw_svg(x_axis, y_axis, drawn, kinds, self.marks)}{empty}"
            f"{_mark_labels(self.marks, x_axis)}</div>"
            f'<div class="ends">{end_labels}</div>'
            f'<div class="x-ticks">{_tick_spans(x_axis, "left")}</div>'
            f'<div class="x-label">{escape_text(self.x_label)}</div></div>'
            f'<p class="note">{escape_text(self.note)}</p></figure>'
        )


def _tick_spans(axis: Axis, side: str) -> str:
    return "".join(
        f'<span style="{side}:{axis.place(tick) if side == "left" else 1 - axis.place(tick):.2%}">'
        f"{label}</span>"
        for tick, label in zip(axis.ticks, axis.labels, strict=True)
    )


def _mark_labels(marks: Sequence[Mark], x_axis: Axis) -> str:
    """Beside their lines, on the side with more room."""
    return "".join(
        f'<span class="upright-label{" before" if place > 0.5 else ""}" style="left:{place:.2%}">'
        f"{escape_text(mark.label)}</span>"
        for mark, place in mark_places(marks, x_axis)
    )


def _key(series: Series, kind: str) -> str:
    swatch = (
        f'<svg viewBox="0 0 22 10" aria-hidden="true"><path class="line {kind}" d="M1,5H21"/></svg>'
    )
    return f'<span class="key {kind}">{swatch}{escape_text(series.name)}</span>'
