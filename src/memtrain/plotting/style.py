"""The style of all figures, and how they are rendered: PNG, PDF, or SVG inside a page."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from memtrain.files import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, readable for colour-blind people; grey is for references.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#878d93")
GREY, INK, SOFT, GRID = COLOURS[-1], "#1b1e21", "#5c636a", "#eceef0"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
SVG_STYLE: dict[Any, Any] = {
    **STYLE,
    "figure.constrained_layout.use": False,
    "font.size": 13,
    "text.parse_math": False,  # a $ in a name is a $
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.edgecolor": GREY,
    "axes.spines.left": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 10,
    "ytick.major.pad": 10,
    "lines.scale_dashes": False,
    "legend.fontsize": 14,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "memtrain",
}
"""For charts in HTML pages: the page's colours, font sizes in CSS pixels, text as text."""
SVG_COLOURS = {colour: f"var(--c{index})" for index, colour in enumerate(COLOURS)} | {
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    GRID: "var(--grid)",
}
"""CSS variables in place of colours, so that charts follow the page's light or dark setting."""


def panels(rows: int, columns: int, *, width: float = 3.2, height: float = 2.7, **options: Any):
    """Create a figure and its axes (rows, columns) without pyplot, so that any thread may draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * rows))
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes


def render_figure(figure: "Figure", kind: str = "png") -> bytes:
    """Render a figure as the content of a PNG, PDF or SVG file."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(content, format=kind, dpi=130, facecolor="white")
    return content.getvalue()


def render_svg(figure: "Figure") -> str:
    """Render a figure as an SVG element for an HTML page; the same figure gives the same text.

    Call it within `rc_context(SVG_STYLE)`. The element has no ids of groups, no namespaces, no
    references to other files and no fonts: it inherits the page's font.
    """
    content = io.BytesIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(content, format="svg", transparent=True, metadata=no_metadata)
    root = ElementTree.fromstring(content.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {
            name.rpartition("}")[2]: _short_attribute(value)
            for name, value in element.attrib.items()
            if not (element.tag == "g" and name == "id") and not value.startswith("rotate(-0 ")
        }
        element.tail = None
        if element.tag != "text":
            element.text = None
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.remove(root[0])  # matplotlib's style sheet, which would apply to the whole page
    return ElementTree.tostring(root, encoding="unicode")


def _short_attribute(value: str) -> str:
    value = re.sub(r"font-family: [^;]*;? ?", "", " ".join(value.split()))
    value = re.sub(r"(\.\d\d)\d+", r"\1", value)
    return re.sub("#[0-9a-f]{6}", lambda colour: SVG_COLOURS.get(colour[0], colour[0]), value)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure to a file atomically, in the format of its suffix."""
    write_output(path, render_figure(figure, path.suffix.removeprefix(".").lower() or "png"))


def log_x_axis(axes: "Axes", values: Iterable[int] | None = None) -> None:
    """Make the x axis logarithmic, with ticks at `values` or at 1, 2, 5, 10, 20, ..."""
    from matplotlib.ticker import FixedLocator, LogLocator

    axes.set_xscale("log")
    if values is None:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        short_ticks(axes)
    else:
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
        axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.minorticks_off()


def short_ticks(axes: "Axes") -> None:
    """Label the x axis so that large numbers do not overlap: 0.5, 200, 5k, 20M."""
    from matplotlib.ticker import EngFormatter

    large = EngFormatter(sep="")
    axes.xaxis.set_major_formatter(lambda x, _: large(x) if x >= 1000 else f"{x:.10g}")


def log_y_axis(axes: "Axes", values: Sequence[float]) -> None:
    """Make the y axis logarithmic around `values`, with ticks at 1, 2, 5, 10, ... or, on a long
    axis, at 1, 10, 100."""
    from matplotlib.ticker import LogLocator

    least, most = min(values), max(values)
    middle, half = math.sqrt(least * most), max(1.3 * math.sqrt(most / least), 2.0)
    bottom, top = middle / half, middle * half
    ticks = LogLocator(subs=(1, 2, 5) if top / bottom < 2000 else (1,)).tick_values(bottom, top)
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.set_yticks([tick for tick in ticks if bottom <= tick <= top])
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.minorticks_off()


def legend(figure: "Figure", axes: "Axes") -> None:
    """Draw one legend under all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
