"""Self-contained HTML pages: text, tables, charts and pictures in one file, without scripts.

A page loads nothing from elsewhere, and its Content-Security-Policy makes the browser enforce that.
It follows the reader's light or dark setting and reads well on a phone and on paper.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from memtrain.errors import CONTROL, MemtrainError
from memtrain.plotting.style import COLOURS, GREY, SOFT, SVG_STYLE, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell = str | int | float | None
Number = int | float
MAX = 1e100
"""Largest number that a chart draws; larger ones become gaps."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE_SHEET = Path(__file__).with_name("page.css")
"""The look of all pages."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NUMBER = r"\d[\d.,]*(e[-+\u2212]?\d+)?"
NUMERIC = re.compile(
    rf"[-+\u2212~≈<>≤≥]? ?{_NUMBER}( ?± ?{_NUMBER})?( ?[^\s\d]{{1,3}})?|[-\u2013\u2014]?"
)
"""Text set flush right: a number with an optional sign, error and unit; or a dash for none."""


def printable(text: str) -> str:
    """Replace control characters."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def escape_text(text: str) -> str:
    """Untrusted text as safe HTML, for an element or a quoted attribute."""
    return escape(printable(text))


@dataclass(frozen=True, kw_only=True)
class Text:
    """A paragraph of plain text: markup in it is shown, not interpreted."""

    text: str
    TAGS: ClassVar = ("<p>", "</p>")

    def html(self) -> str:
        return self.TAGS[0] + escape_text(self.text) + self.TAGS[1]


class Heading(Text):
    """Title of a section."""

    TAGS = ("<h2>", "</h2>")


class Notice(Text):
    """A paragraph set off from the rest."""

    TAGS = ('<p class="notice">', "</p>")


class Code(Text):
    """Text with its spaces and line breaks, such as a config."""

    TAGS = ("<pre>", "</pre>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a header; the first column names the row."""

    header: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Sequence[Cell]]
    """One cell per column; numbers are formatted, None is shown as a dash."""
    note: str = ""
    """A sentence under the table."""
    highlight: int | None = None
    """Index of the row to emphasise."""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise MemtrainError(
                    f"row {index} has {len(row)} cells: must have {len(self.header)}, one per "
                    "column"
                )
        if self.highlight is not None and not 0 <= self.highlight < len(self.rows):
            raise MemtrainError(f"highlight={self.highlight}: the rows are 0..{len(self.rows) - 1}")

    def html(self) -> str:
        columns = [[row[index] for row in self.rows] for index in range(len(self.header))]
        right = [bool(index) and all(map(_is_numeric, c)) for index, c in enumerate(columns)]
        sides = [' class="number"' * flush for flush in right]
        names = zip(self.header, sides, strict=True)
        head = "".join(f'<th scope="col"{side}>{escape_text(name)}</th>' for name, side in names)
        body = "".join(self._row_html(index, sides) for index in range(len(self.rows)))
        note = f'<p class="note">{escape_text(self.note)}</p>' if self.note else ""
        return (
            f'<div class="table"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table>{note}</div>"
        )

    def _row_html(self, index: int, sides: list[str]) -> str:
        row = [escape_text(_cell_text(cell)) for cell in self.rows[index]]
        cells = [
            f'<td{side} data-label="{escape_text(name)}">{cell}</td>'
            for name, cell, side in zip(self.header, row, sides, strict=True)
        ]
        cells[:1] = [f'<th scope="row">{row[0]}</th>'] if row else []
        mark = ' class="highlight"' if index == self.highlight else ""
        return f"<tr{mark}>{''.join(cells)}</tr>"


def _is_numeric(cell: Cell) -> bool:
    return not isinstance(cell, str) or NUMERIC.fullmatch(cell) is not None


def _cell_text(cell: Cell) -> str:
    if cell is None:
        return "\N{EN DASH}"
    if isinstance(cell, str):
        return cell
    return _plain_minus(f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}")


def _plain_minus(number: str) -> str:
    """1e-05 as 1e−5."""
    return re.sub(r"e\+?(-?)0*", r"e\1", number).replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A PNG picture, embedded in the page."""

    png_bytes: bytes
    """Content of the PNG file."""
    caption: str
    """Caption and alternative text."""

    def __post_init__(self) -> None:
        if not self.png_bytes.startswith(PNG_SIGNATURE):
            raise MemtrainError(f"png_bytes={self.png_bytes[:8]!r}...: must be a PNG file's bytes")

    def html(self) -> str:
        source = "data:image/png;base64," + base64.b64encode(self.png_bytes).decode()
        caption = escape_text(self.caption)
        return (
            f'<figure class="picture"><img src="{source}" alt="{caption}">'
            f'<figcaption class="note">{caption}</figcaption></figure>'
        )


# ---------------------------------------------------------------------------------------- charts


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    """Label in the legend."""
    x: Sequence[Number | None]
    y: Sequence[Number | None]
    """Coordinates; a point with None, NaN or infinity is a gap."""
    emphasised: bool = False
    """Draw the line thicker, in the accent colour and above the others."""
    muted: bool = False
    """Draw the line thin and grey: a reference."""
    dashed: bool = False
    colour: int | None = None
    """Index of the line's colour, for the same one in several charts. None: the next in order."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise MemtrainError(
                f"series {self.name!r}: {len(self.x)} x and {len(self.y)} y; must be equally many"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines over a common x axis, drawn by matplotlib as inline SVG."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    """The lines, in the order of the legend."""
    log_x: bool = False
    """Use a logarithmic x axis; points at or below 0 become gaps."""
    y_range: tuple[Number, Number] | None = None
    """Limits of the y axis; points outside become gaps. None fits the points."""
    note: str = ""
    """A sentence under the chart."""
    marks: Mapping[str, Number] = field(default_factory=dict)
    """Places on the x axis to mark, by their labels; those outside the axis are omitted."""

    def html(self, *, compact: bool = False) -> str:
        """Render the chart as a figure; a compact one fits half the page's width."""
        narrow = self._svg(472, 230)
        drawn = narrow if compact else f'<div class="wide">{self._svg(1000, 300)}</div>'
        drawn += "" if compact else f'<div class="narrow">{narrow}</div>'
        names = ", ".join(series.name for series in self.series)
        summary = f"{self.y_label} against {self.x_label}: {names or 'no series'}"
        return (
            f'<figure class="chart"><figcaption>{escape_text(self.title)}</figcaption>'
            f'<div role="img" aria-label="{escape_text(summary)}">{drawn}</div>'
            f'<p class="note">{escape_text(self.note)}</p></figure>'
        )

    def _svg(self, width: int, plot_height: int) -> str:
        """Draw at a size in CSS pixels, with legend and y label above the plot."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas

        columns = len(self.series)
        if sum(len(series.name) + 8 for series in self.series) > width / 8:
            columns = 1  # long names: one per line
        top = 36 + 20 * -(-len(self.series) // max(1, columns))
        height = top + plot_height + 50
        with rc_context(SVG_STYLE):
            figure = Canvas(figsize=(width / 72, height / 72))
            size = (1 - 60 / width, plot_height / height)
            axes = figure.add_axes((46 / width, 50 / height, *size))
            self._set_axes(axes, lines := [self._points(series) for series in self.series])
            self._draw(axes, lines)
            if self.series:
                legend = figure.legend(loc="upper left", bbox_to_anchor=(0, 1), ncols=columns)
                for index, series in enumerate(self.series):
                    legend.get_lines()[index].set_marker("")
                    if series.emphasised:
                        legend.texts[index].set_fontweight("bold")
            y_label, x_label = printable(self.y_label), printable(self.x_label)
            figure.text(0, 1 - (top - 24) / height, y_label, va="top", color=SOFT)
            figure.text(1 - 14 / width, 22 / height, x_label, ha="right", va="top", color=SOFT)
            return render_svg(figure)

    def _points(self, series: Series) -> np.ndarray:
        """x and y as an array (2, N), both NaN at gaps."""
        x, y = (
            [v if v is not None and abs(v) < MAX else np.nan for v in values]
            for values in (series.x, series.y)
        )
        points = np.array([x, y], dtype=float)
        low, high = self.y_range or (-MAX, MAX)
        seen = (points[1] >= low) & (points[1] <= high) & (points[0] > (0 if self.log_x else -MAX))
        points[:, ~seen] = np.nan
        return points

    def _set_axes(self, axes: "Axes", lines: list[np.ndarray]) -> None:
        """Set the limits and a few round ticks; an axis that begins near 0 begins at 0."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        points = np.concatenate([np.empty((2, 0)), *lines], axis=1)
        points = points[:, ~np.isnan(points[1])]
        if not points.size:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "No points to draw.", ha="center")
            return
        (left, bottom), (right, top) = points.min(axis=1), points.max(axis=1)
        round_ticks = MaxNLocator(6, steps=[1, 2, 5, 10])
        if self.log_x:
            axes.set_xscale("log")
            left, right = (left / 3, right * 3) if right < 2 * left else (left, right)
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right < 100 * left else (1,)))
            axes.minorticks_off()
        else:
            left = 0 if 0 < left < 0.15 * right else left
            if right - left <= 1e-9 * abs(right):
                left, right = left - (abs(left) or 1) / 2, right + (abs(right) or 1) / 2
            axes.xaxis.set_major_locator(round_ticks)
        axes.set_xlim(left, right)
        bottom, top = self.y_range or (0 if 0 < bottom < 0.15 * top else bottom, top)
        ticks = round_ticks.tick_values(bottom, top)
        axes.set_yticks(ticks)
        axes.set_ylim(*(self.y_range or (ticks[0], ticks[-1])))
        axes.xaxis.set_major_formatter(_tick_label)
        axes.yaxis.set_major_formatter(_tick_label)
        axes.grid(clip_on=False)

    def _draw(self, axes: "Axes", lines: list[np.ndarray]) -> None:
        coloured = [index for index, series in enumerate(self.series) if not series.muted]
        coloured.sort(key=lambda index: not self.series[index].emphasised)
        for index, (series, (x, y)) in enumerate(zip(self.series, lines, strict=True)):
            seen = np.pad(~np.isnan(y), 1)
            dots = seen[1:-1] & ~seen[:-2] & ~seen[2:]  # between gaps, where no line can show it
            if not series.muted:
                dots[np.flatnonzero(seen[1:-1])[-1:]] = True
            number = series.colour
            if number is None and not series.muted:
                number = coloured.index(index)
            axes.plot(
                x,
                y,
                label=" " + printable(series.name),  # matplotlib hides labels that begin with _
                color=GREY if number is None else COLOURS[number % 6],
                linewidth=1.25 if series.muted else 2.75 if series.emphasised else 1.75,
                linestyle=(0, (5, 4)) if series.dashed else "-",
                marker="o",
                markersize=8 if series.emphasised else 6,
                markevery=dots.tolist(),
                markeredgewidth=0,
                clip_on=False,
                zorder=2 - series.muted + series.emphasised,
            )
        low, high = axes.get_xlim()
        for label, x in self.marks.items():
            if not low <= x <= high:
                continue
            axes.axvline(x, color=SOFT, linewidth=1, linestyle=(0, (2, 3)), clip_on=False)
            place = axes.transAxes.inverted().transform(axes.transData.transform((x, 0)))[0]
            axes.annotate(
                printable(label),
                (x, 0),
                (-6 if place > 0.5 else 6, 6),  # on the side with more space
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right" if place > 0.5 else "left",
                color=SOFT,
            )


def _tick_label(value: float, _: object) -> str:
    """A short number: 0, 0.002, 500, 1.5k, 1M, 2e−5."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    unit, suffix = next((u for u in units if u[0] <= abs(value) < 1e15), (1, ""))
    return _plain_minus(f"{value / unit:.6g}{suffix}")


# ------------------------------------------------------------------------------- the whole page


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Charts or pictures side by side, or stacked on a narrow page."""

    parts: Sequence[Chart | Figure]

    def html(self) -> str:
        inner = (p.html(compact=True) if isinstance(p, Chart) else p.html() for p in self.parts)
        return f'<div class="columns">{"".join(inner)}</div>'


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """Parts that stay hidden until the reader opens them."""

    summary: str
    """The line that is always visible."""
    parts: Sequence["Part"]

    def html(self) -> str:
        inner = "".join(part.html() for part in self.parts)
        return f"<details><summary>{escape_text(self.summary)}</summary>{inner}</details>"


Part = Text | Table | Chart | Figure | Columns | Fold


def render_page(title: str, lead: str, parts: Sequence[Part], footer: str) -> str:
    """Render a page; write it as UTF-8.

    Args:
        title: headline, also the browser tab's title.
        lead: opening paragraph.
        parts: content from top to bottom.
        footer: small print; line breaks are kept.
    """
    body = "\n".join(part.html() for part in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape_text(title)}</title>
<style>{STYLE_SHEET.read_text()}</style>
</head>
<body>
<main>
<h1>{escape_text(title)}</h1>
<p class="lead">{escape_text(lead)}</p>
{body}
</main>
<footer>{escape_text(footer)}</footer>
</body>
</html>
"""
