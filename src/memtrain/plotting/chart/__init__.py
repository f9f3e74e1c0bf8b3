"""Line charts as HTML and inline SVG, drawn here: no plotting library, no request to anyone.

The SVG holds geometry only and stretches to any width; names and numbers are HTML around it, so
they keep their size on a phone. `page_style.py` has the style sheet.
"""

from memtrain.plotting.chart.axes import Axis, linear_axis, log_axis, tick_labels
from memtrain.plotting.chart.escaping import escape_text
from memtrain.plotting.chart.figure import Chart
from memtrain.plotting.chart.hover import SCRIPT
from memtrain.plotting.chart.lines import (
    BOX,
    LABEL_GAP,
    Mark,
    Series,
    draw_svg,
    end_places,
    line_classes,
)

__all__ = [
    "Axis",
    "BOX",
    "Chart",
    "LABEL_GAP",
    "Mark",
    "SCRIPT",
    "Series",
    "draw_svg",
    "end_places",
    "escape_text",
    "line_classes",
    "linear_axis",
    "log_axis",
    "tick_labels",
]
