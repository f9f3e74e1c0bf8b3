"""The look that all figures share."""

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrain.files import write_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, as on the pages.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#878d93")
GREY = COLOURS[-1]
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eceef0",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def panels(rows: int, columns: int, *, width: float = 3.2, height: float = 2.7, **options: Any):
    """A figure and its axes (rows, columns), made without pyplot: any thread may draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * rows))
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes


def render_figure(figure: "Figure", kind: str = "png") -> bytes:
    """The figure as the content of a file: png, pdf or svg."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(content, format=kind, dpi=130, facecolor="white")
    return content.getvalue()


def save(figure: "Figure", path: Path) -> None:
    """Write the figure to a file, whole or not at all; its suffix says in which format."""
    write_named(path, render_figure(figure, path.suffix.removeprefix(".").lower() or "png"))


def log_x_axis(axes: "Axes", values: Iterable[int] | None = None) -> None:
    """A logarithmic x axis in plain numbers: at these values, or at 1, 2, 5, 10, 20, ..."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    ticks = LogLocator(subs=(1, 2, 5)) if values is None else FixedLocator(sorted(set(values)))
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))


def log_y_axis(axes: "Axes", values: Sequence[float]) -> None:
    """A logarithmic y axis around these values, with ticks at 1, 2, 5, 10, 20, ... or, where it is
    long, at 1, 10, 100."""
    from matplotlib.ticker import FixedLocator, NullLocator

    least, most = min(values), max(values)
    middle, half = math.sqrt(least * most), max(1.3 * math.sqrt(most / least), 2.0)
    bottom, top = middle / half, middle * half
    digits = (1, 2, 5) if top / bottom < 2000 else (1,)
    decades = range(math.floor(math.log10(bottom)), math.ceil(math.log10(top)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(FixedLocator([y for y in ticks if bottom <= y <= top]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:.10g}")


def legend(figure: "Figure", axes: "Axes") -> None:
    """One legend under all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
