"""Axes: from numbers to places, with few round ticks and short names for them."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

Number = int | float
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


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
