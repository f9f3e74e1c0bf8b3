"""Line charts as HTML and inline SVG, drawn here: no plotting library, no request to anyone.

The SVG holds geometry only and stretches to any width; names and numbers are HTML around it, so
they keep their size on a phone. `page.py` has the style sheet.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

from memtrain.errors import MemtrainError

Number = int | float
Point = tuple[Number, Number]
Points = Sequence[Point | None]
"""The points of one series; None where it has a gap."""

BOX = 1000
"""Side of the SVG's viewBox; the browser stretches it to the size of the plot."""
COLOURS = 6
"""Colours in the palette; the style sheet knows them as c0, the accent, to c5."""
LABEL_GAP = 0.07
"""Least distance of two labels at line ends, as a share of the plot's height."""
LABEL_LENGTH = 28
"""A name of more characters is too wide for the end of a line; the legend has it then."""
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape_text(text: str) -> str:
    """`text` as safe HTML, in an element or in a quoted attribute."""
    return escape(UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text))


# ----------------------------------------------------------------------------------------- axes


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A range of numbers on a line from 0 to 1, and its ticks."""

    low: float
    """Where the axis begins; on a log axis, the decimal logarithm of that."""
    high: float
    """Where it ends, likewise."""
    log: bool
    """Whether places follow the logarithm."""
    ticks: list[float]
    """Round numbers in the range, rising."""
    labels: list[str]
    """What is written at each tick."""

    def place(self, value: Number) -> float:
        """Where `value` is: 0 at the beginning of the axis, 1 at its end."""
        value = math.log10(value) if self.log else value
        # Quarters, because the distance of two finite floats may be no finite float.
        return (value / 4 - self.low / 4) / (self.high / 4 - self.low / 4)


def linear_axis(
    values: Sequence[Number], *, fixed: tuple[Number, Number] | None = None, whole: bool = False
) -> Axis:
    """The axis of `values`, or from fixed[0] to fixed[1].

    `whole` extends it to whole ticks at both ends.
    """
    low, high = fixed or _padded(min(values, default=0), max(values, default=1))
    step, exponent = _round_step(high / 7 - low / 7)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if whole and not fixed:
        first -= _tick(first, step, exponent) > low
        last += _tick(last, step, exponent) < high
    ticks = [_tick(count, step, exponent) for count in range(first, last + 1)]
    ticks = [tick for tick in ticks if math.isfinite(tick)]
    if whole and not fixed:
        low, high = min(low, ticks[0]), max(high, ticks[-1])
    labels = tick_labels(ticks, step)
    return Axis(low=float(low), high=float(high), log=False, ticks=ticks, labels=labels)


def log_axis(values: Sequence[Number], *, whole: bool = False) -> Axis:
    """The logarithmic axis of `values`, all above 0: decades, or finer ticks where those are few.

    `whole` extends an axis over two decades or more to whole decades.
    """
    low, high = math.log10(min(values, default=1)), math.log10(max(values, default=10))
    if high - low < 0.3:
        low, high = low - 0.5, high + 0.5
    if whole and high - low >= 2:
        # Beyond these decades there are no floats.
        low, high = float(max(-323, math.floor(low))), float(min(308, math.ceil(high)))
        low, high = min(low, math.log10(min(values))), max(high, math.log10(max(values)))
    decades = range(math.floor(low), math.floor(high) + 1)
    mantissas = (1, 2, 5) if high - low < 3 else (1,)
    ticks = [float(f"{mantissa}e{decade}") for decade in decades for mantissa in mantissas]
    ticks = [tick for tick in ticks if _log_inside(tick, low, high)]
    labels = [label for tick in ticks for label in tick_labels([tick], tick)]
    if len(ticks) < 3:
        linear = linear_axis(values)
        named = zip(linear.ticks, linear.labels, strict=True)
        named = [(tick, label) for tick, label in named if _log_inside(tick, low, high)]
        if len(named) > len(ticks):
            ticks, labels = [tick for tick, _ in named], [label for _, label in named]
    stride = max(1, math.ceil(len(ticks) / 7))
    kept = slice((len(ticks) - 1) % stride, None, stride)
    return Axis(low=low, high=high, log=True, ticks=ticks[kept], labels=labels[kept])


def tick_labels(ticks: Sequence[Number], step: Number) -> list[str]:
    """Short names of numbers that lie `step` apart: 0, 0.002, 500, 1.5k, 20k, 1M, 2e−5."""
    largest = max(map(abs, ticks), default=0)
    return [_tick_label(tick, step, largest).replace("-", "\N{MINUS SIGN}") for tick in ticks]


def _tick_label(tick: Number, step: Number, largest: Number) -> str:
    size = abs(tick)
    places = -math.floor(math.log10(step) + 1e-9)
    if size == 0:
        return "0"
    if largest >= 1e15 or largest < 1e-4:
        digits = max(0, math.floor(math.log10(size) + 1e-9) + places)
        mantissa, exponent = f"{tick:.{digits}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    for unit, suffix in UNITS:
        if size >= unit and step >= unit / 20:
            return f"{tick / unit:.2f}".rstrip("0").rstrip(".") + suffix
    return f"{tick:,.{max(0, places)}f}"


def _log_inside(number: float, low: float, high: float) -> bool:
    """Whether the decimal logarithm of `number` lies between `low` and `high`."""
    return number > 0 and low - 1e-9 <= math.log10(number) <= high + 1e-9


def _padded(low: Number, high: Number) -> tuple[float, float]:
    """A range wide enough to draw, from 0 where it begins close to 0."""
    size = max(abs(low), abs(high))
    if high / 2 - low / 2 <= max(1e-9 * size, 1e-290):
        pad = size / 2 if size > 1e-290 else 1.0
        most = sys.float_info.max
        return max(low - pad, -most), min(high + pad, most)
    if 0 < low < 0.15 * high:
        return 0.0, float(high)
    return float(low), float(high)


def _round_step(least: float) -> tuple[float, int]:
    """The smallest 1, 2 or 5 times a power of ten that is at least `least`; and that power."""
    exponent = math.floor(math.log10(least))
    for mantissa in (1, 2, 5):
        step = float(f"{mantissa}e{exponent}")
        if step >= least * (1 - 1e-9):
            return step, exponent
    return float(f"1e{exponent + 1}"), exponent + 1


def _tick(count: int, step: float, exponent: int) -> float:
    """`count` steps, to the last bit: three steps of 0.1 are 0.3."""
    return float(f"{count * round(step / 10.0**exponent)}e{exponent}")


# --------------------------------------------------------------------------------------- charts


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    """What the legend calls it."""
    x: Sequence[Number | None]
    """Where its points are; a point with None, NaN or infinity is a gap."""
    y: Sequence[Number | None]
    """Their values, as many."""
    emphasised: bool = False
    """Draw it heavier and above the others; the first such line has the page's accent colour."""
    muted: bool = False
    """Draw it thin and grey: a reference."""
    dashed: bool = False
    """Draw it dashed."""
    colour: int | None = None
    """A place in the palette, for the same colour in every chart; None takes the next free one."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise MemtrainError(
                f"series {self.name!r}: {len(self.x)} x and {len(self.y)} y; give as many of each"
            )
        if self.colour is not None and not 0 <= self.colour < COLOURS:
            raise MemtrainError(f"colour={self.colour}: must be at least 0 and below {COLOURS}")

    def points(self, *, log_x: bool = False, log_y: bool = False) -> Points:
        """The points; None where one cannot be drawn (on a log axis: also at 0 and below)."""
        return [
            (x, y) if _drawable(x, log=log_x) and _drawable(y, log=log_y) else None
            for x, y in zip(self.x, self.y, strict=True)
        ]


def _drawable(value: Number | None, *, log: bool) -> TypeGuard[Number]:
    return value is not None and math.isfinite(value) and not (log and value <= 0)


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
        data = _hover_data(self, [x_axis, y_axis], drawn, kinds)
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
            f"{draw_svg(x_axis, y_axis, drawn, kinds)}{empty}</div>"
            f'<div class="ends">{end_labels}</div>'
            f'<div class="x-ticks">{_tick_spans(x_axis, "left")}</div>'
            f'<div class="x-label">{escape_text(self.x_label)}</div></div>'
            f'<p class="note">{escape_text(self.note)}</p></figure>'
        )


def line_classes(series: Sequence[Series]) -> list[str]:
    """The classes of each line: its colour and how it is drawn.

    Without a wish of its own, the first emphasised line gets the accent colour (if there is none:
    the first line), the others what is left. When all colours are taken, they return dotted.
    """
    coloured = [index for index, line in enumerate(series) if not line.muted]
    slots = {index: series[index].colour for index in coloured}
    undecided = [index for index in coloured if slots[index] is None]
    undecided.sort(key=lambda index: not series[index].emphasised)
    free = [slot for slot in range(COLOURS) if slot not in slots.values()]
    slots.update(zip(undecided, [*free, *range(COLOURS, COLOURS + len(series))], strict=False))
    classes = []
    for index, line in enumerate(series):
        slot = slots.get(index)
        names = ["grey" if slot is None else f"c{slot % COLOURS}"]
        names += ["strong"] if line.emphasised else []
        names += ["dashed"] if line.dashed else []
        names += ["dotted"] if slot is not None and slot >= COLOURS else []
        classes.append(" ".join(names))
    return classes


def end_places(drawn: Iterable[Points], x_axis: Axis, y_axis: Axis) -> list[tuple[int, float]]:
    """Where labels at the line ends go: (index of the series, share of the height from the top).

    Labels keep their distance from each other. The list is empty if some line ends far from the
    right edge or if there are too many: then the legend speaks.
    """
    lasts = [next((point for point in reversed(line) if point), None) for line in drawn]
    if not lasts or (len(lasts) - 1) * LABEL_GAP > 1:
        return []
    wanted = []
    for index, last in enumerate(lasts):
        if last is None or x_axis.place(last[0]) < 0.97:
            return []
        wanted.append((min(1.0, max(0.0, 1 - y_axis.place(last[1]))), index))
    wanted.sort()
    places: list[float] = []
    for place, _ in wanted:
        places.append(max(place, places[-1] + LABEL_GAP) if places else place)
    floor = 1.0
    for position in reversed(range(len(places))):
        places[position] = min(places[position], floor)
        floor = places[position] - LABEL_GAP
    return [(index, place) for (_, index), place in zip(wanted, places, strict=True)]


def draw_svg(x_axis: Axis, y_axis: Axis, drawn: Sequence[Points], kinds: Sequence[str]) -> str:
    """Grid and lines. A dot is a line of no length with round ends: stretching keeps it round."""
    grid = [f"M0,{BOX * (1 - y_axis.place(tick)):.1f}H{BOX}" for tick in y_axis.ticks]
    grid += [f"M{BOX * x_axis.place(tick):.1f},0V{BOX}" for tick in x_axis.ticks]
    shapes = [f'<path class="grid" d="{"".join(grid)}"/><path class="base" d="M0,{BOX}H{BOX}"/>']
    # Grey lines lie below, strong ones on top.
    order = sorted(range(len(drawn)), key=lambda i: ("strong" in kinds[i]) - ("grey" in kinds[i]))
    for index in order:
        runs: list[list[str]] = [[]]
        for point in drawn[index]:
            if point:
                x, y = x_axis.place(point[0]), 1 - y_axis.place(point[1])
                runs[-1].append(f"{BOX * x:.1f},{BOX * y:.1f}")
            elif runs[-1]:
                runs.append([])
        runs = [run for run in runs if run]
        lines = "".join("M" + "L".join(run) for run in runs if len(run) > 1)
        dots = {run[0] for run in runs if len(run) == 1}
        if "grey" not in kinds[index]:
            dots |= {run[-1] for run in runs[-1:]}
        if lines:
            shapes.append(f'<path class="line {kinds[index]}" d="{lines}"/>')
        if dots:
            marks = "".join(f"M{dot}h0" for dot in sorted(dots))
            shapes.append(f'<path class="dot {kinds[index]}" d="{marks}"/>')
    return f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none">{"".join(shapes)}</svg>'


def _tick_spans(axis: Axis, side: str) -> str:
    return "".join(
        f'<span style="{side}:{axis.place(tick) if side == "left" else 1 - axis.place(tick):.2%}">'
        f"{label}</span>"
        for tick, label in zip(axis.ticks, axis.labels, strict=True)
    )


def _key(series: Series, kind: str) -> str:
    swatch = (
        f'<svg viewBox="0 0 22 10" aria-hidden="true"><path class="line {kind}" d="M1,5H21"/></svg>'
    )
    return f'<span class="key {kind}">{swatch}{escape_text(series.name)}</span>'


def _short(value: Number) -> Number:
    """`value` in few characters; whole numbers stay exact."""
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.7g}")


def _hover_data(
    chart: Chart, axes: Sequence[Axis], drawn: Sequence[Points], kinds: Sequence[str]
) -> str:
    lines = [
        {"name": series.name, "kind": kind, "points": [[*map(_short, p)] for p in points if p]}
        for series, kind, points in zip(chart.series, kinds, drawn, strict=True)
    ]
    ranges = [[axis.low, axis.high, axis.log] for axis in axes]
    return json.dumps({"axes": ranges, "lines": lines}, separators=(",", ":"))


SCRIPT = """
(() => {
  const make = (parent, tag, kind, text) => {
    const node = parent.appendChild(document.createElement(tag));
    node.className = kind;
    node.textContent = text ?? "";
    return node;
  };
  const number = v => {
    const size = Math.abs(v);
    if (size && (size < 1e-4 || size >= 1e15)) return v.toExponential(3);
    const digits = Number.isInteger(v) ? 16 : Math.max(4, Math.floor(Math.log10(size)) + 2);
    return v.toLocaleString("en", { maximumSignificantDigits: Math.min(16, digits) });
  };
  const place = ([low, high, log], v) =>
    ((log ? Math.log10(v) : v) / 4 - low / 4) / (high / 4 - low / 4);
  const hides = [];
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const { axes, lines } = JSON.parse(figure.dataset.chart);
    const plot = figure.querySelector(".plot");
    const hover = make(plot, "div", "hover");
    hover.hidden = true;
    const hide = () => { hover.hidden = true; };
    const show = event => {
      const box = plot.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width;
      const near = lines.filter(line => line.points.length).map(line => {
        const [x, y] = line.points.reduce((best, point) =>
          Math.abs(place(axes[0], point[0]) - at) < Math.abs(place(axes[0], best[0]) - at)
            ? point : best);
        return { ...line, x, y, left: place(axes[0], x), top: 1 - place(axes[1], y) };
      });
      if (!near.length) return;
      hover.replaceChildren();
      hover.hidden = false;
      const closest = near.reduce((a, b) => Math.abs(b.left - at) < Math.abs(a.left - at) ? b : a);
      make(hover, "i", "rule").style.left = `${closest.left * 100}%`;
      const table = make(make(hover, "div", "readout"), "table", "");
      for (const { name, kind, x, y, left, top } of near) {
        if (top >= 0 && top <= 1) {
          const mark = make(hover, "i", `mark ${kind}`);
          mark.style.left = `${left * 100}%`;
          mark.style.top = `${top * 100}%`;
        }
        const row = make(table, "tr", kind);
        make(make(row, "td", ""), "span", "swatch").after(name);
        make(row, "td", "", number(y));
        make(row, "td", "at", `at ${number(x)}`);
      }
      /* Beside the rule, where there is more room; for a finger, above the plot. */
      const readout = table.parentNode, { offsetWidth: width, offsetHeight: height } = readout;
      const rule = closest.left * box.width, page = document.documentElement.clientWidth;
      const left = closest.left < 0.5 ? rule + 16 : rule - 16 - width;
      const most = page - 8 - width - box.left;
      readout.style.left = `${Math.max(8 - box.left, Math.min(left, most))}px`;
      const top = Math.min(event.clientY - box.top - height / 2, box.height - height - 6);
      readout.style.top = `${event.pointerType === "mouse" ? Math.max(6, top) : -height - 8}px`;
    };
    plot.addEventListener("pointermove", show);
    plot.addEventListener("pointerdown", show);
    plot.addEventListener("pointerleave", event => event.pointerType === "mouse" && hide());
    hides.push(event => plot.contains(event.target) || hide());
  }
  document.addEventListener("pointerdown", event => hides.forEach(hide => hide(event)));
})();
"""
"""Shows, under the pointer, the nearest point of each line. The page is legible without it."""
