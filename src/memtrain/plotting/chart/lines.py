"""The lines of a chart: their points and gaps, their colours, where their labels go, their SVG."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from memtrain.errors import MemtrainError
from memtrain.plotting.chart.axes import Axis, Number

Point = tuple[Number, Number]
Points = Sequence[Point | None]
"""The points of one series; None where it has a gap."""

BOX = 1000
"""Side of the SVG's viewBox; the browser stretches it to the size of the plot."""
COLOURS = 6
"""Colours in the palette; the style sheet knows them as c0, the accent, to c5."""
LABEL_GAP = 0.07
"""Least distance of two labels at line ends, as a share of the plot's height."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A place on the x axis, marked by an upright line and a label."""

    x: Number
    """Where; it is left out where the axis does not reach."""
    label: str
    """What happens there."""


def _drawable(value: Number | None, *, log: bool) -> TypeGuard[Number]:
    return value is not None and math.isfinite(value) and not (log and value <= 0)


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


def mark_places(marks: Sequence[Mark], x_axis: Axis) -> list[tuple[Mark, float]]:
    """The marks that the axis reaches, each with its place: 0 at the left, 1 at the right."""
    known = [mark for mark in marks if _drawable(mark.x, log=x_axis.log)]
    placed = [(mark, x_axis.place(mark.x)) for mark in known]
    return [(mark, place) for mark, place in placed if 0 <= place <= 1]


def draw_svg(
    x_axis: Axis,
    y_axis: Axis,
    drawn: Sequence[Points],
    kinds: Sequence[str],
    marks: Sequence[Mark] = (),
) -> str:
    """Grid, marks and lines.

    A dot is a line of no length with round ends: stretching keeps it round.
    """
    grid = [f"M0,{BOX * (1 - y_axis.place(tick)):.1f}H{BOX}" for tick in y_axis.ticks]
    grid += [f"M{BOX * x_axis.place(tick):.1f},0V{BOX}" for tick in x_axis.ticks]
    shapes = [f'<path class="grid" d="{"".join(grid)}"/><path class="base" d="M0,{BOX}H{BOX}"/>']
    shapes += [
        f'<path class="upright" d="M{BOX * place:.1f},0V{BOX}"/>'
        for _, place in mark_places(marks, x_axis)
    ]
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
            places = "".join(f"M{dot}h0" for dot in sorted(dots))
            shapes.append(f'<path class="dot {kinds[index]}" d="{places}"/>')
    return f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none">{"".join(shapes)}</svg>'
