"""What was measured, as a table and a record."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from memtrain.accel.engine import pick_device
from memtrain.bench.growth import Curves
from memtrain.bench.measure import Result, Timing, machine
from memtrain.config import EngineConfig
from memtrain.plotting.style import (
    COLOURS,
    legend,
    log_x_axis,
    log_y_axis,
    panels,
    save,
)

WIDEST = 120
"""Columns of a terminal that the whole table takes; with fewer it comes in two parts."""
RATES = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}
"""Units of operations per second: whichever suits the machine."""
PARTS = (
    ("batch", "plain", "fast", "ratio", "start-up"),
    ("tokens/s", *RATES, "peak", "GB, plain", "GB, fast"),
)


def print_results(results: Sequence[Result], peak: float, device: torch.device) -> None:
    """One line a case; what this machine cannot tell has no column."""
    unit = "TFLOP/s" if peak >= 1e12 else "GFLOP/s"
    rows = [_row(result, peak, unit) for result in results]
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has room
        console = Console(highlight=False, width=max(WIDEST, console.width))
    console.print(f"{machine(device)}; a matrix product reaches {peak / RATES[unit]:.3g} {unit}")
    parts = PARTS if console.width < WIDEST else (sum(PARTS, ()),)
    for part in parts:
        columns = [name for name in part if any(row[name] for row in rows)]
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for result, row in zip(results, rows, strict=True):
            table.add_row(result.label, *(row[name] for name in columns))
        console.print(table)


def _row(result: Result, peak: float, unit: str) -> dict[str, str]:
    rate = result.flops / result.fast.seconds if result.flops else None
    reference = result.reference
    return {
        "batch": str(result.batch),
        "plain": _duration(reference.seconds) if reference else "",
        "fast": _duration(result.fast.seconds),
        "ratio": f"{result.ratio:.1f}x" if result.ratio else "",
        "tokens/s": f"{result.tokens_per_second:,.0f}",
        **{name: f"{rate / RATES[unit]:.3g}" if rate and name == unit else "" for name in RATES},
        "peak": f"{rate / peak:.0%}" if rate else "",
        "GB, plain": _gigabytes(reference),
        "GB, fast": _gigabytes(result.fast),
        "start-up": _duration(result.fast.start_up),
    }


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _gigabytes(timing: Timing | None) -> str:
    return f"{timing.peak_bytes / 1e9:.1f}" if timing and timing.peak_bytes is not None else ""


def as_record(results: Sequence[Result], engine: EngineConfig, size: str, peak: float) -> dict:
    """Everything measured, for JSON."""
    return {
        "machine": machine(pick_device(engine.device)),
        "size": size,
        "matrix_peak_flops": peak,
        "compiled": engine.compile,
        "results": [asdict(result) | {"ratio": result.ratio} for result in results],
    }


LOOKS: dict[str, dict[str, Any]] = {
    "SMT": dict(color=COLOURS[0], marker="o", linewidth=2.2),
    "DMT": dict(color=COLOURS[2], marker="s"),
    "BPTT": dict(color=COLOURS[1], marker="^"),
    "recomputed BPTT": dict(color=COLOURS[4], marker="v", linestyle="--"),
}
"""Kinds of steps, coloured as in the figures of the paper."""
UNITS = {"seconds": ("ms a step", 1e-3, ".3g"), "peak_bytes": ("peak GB", 1e9, ".2f")}
"""Of the table."""
AXIS_LABELS = {"seconds": ("seconds a step", 1.0), "peak_bytes": ("peak memory, GB", 1e9)}
QUIET = "#666666"
CAPTION_WIDTH = 7.0
"""Inches that the lines below the panels take."""
WORDS = {"seconds": "time", "peak_bytes": "memory"}


def print_curves(curves: Curves) -> None:
    """A table of each measure, the powers of the length, and what was left out."""
    console = Console(highlight=False)
    console.print(curves.machine)
    for measure in curves.measures:
        title, unit, form = UNITS[measure]
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(title, no_wrap=True)
        for step in curves.steps:
            table.add_column(step, justify="right")
        for axis in curves.axes:
            lines = {step: dict(curves.line(step, axis, measure)) for step in curves.steps}
            for value in sorted(set().union(*lines.values())):
                cells = [line.get(value) for line in lines.values()]
                shown = ["" if cell is None else f"{cell / unit:{form}}" for cell in cells]
                table.add_row(f"{axis} {value}", *shown)
            table.add_section()
        console.print(table)
    for axis in curves.axes:
        console.print(f"against {axis}: {held(curves, axis)}")
    for line in powers(curves):
        console.print(line, soft_wrap=True)
    for line in left_out(curves):
        console.print(line, soft_wrap=True)


def held(curves: Curves, axis: str) -> str:
    """What stays as it is while an axis grows."""
    named = {
        name: f"{at} {name}" if name == "memory tokens" else f"{name} {at}"
        for name, at in curves.held.get(axis, {}).items()
    }
    return ", ".join(named.values())


def powers(curves: Curves) -> list[str]:
    """With which power of the length each measure grows, a line each."""
    return [
        f"power of the length in {WORDS[measure]}: "
        + ", ".join(f"{step} {slope:.2f}" for step, slope in slopes.items())
        for measure, slopes in curves.powers().items()
        if slopes
    ]


def left_out(curves: Curves) -> list[str]:
    """What was not timed, a line for each reason and kind of step."""
    together: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in curves.left_out:
        axes = together.setdefault((one.why, one.step), {})
        axes.setdefault(one.axis, []).append(str(one.value))
    return [
        f"left out, {why}: {step} at "
        + "; ".join(f"{axis} {', '.join(values)}" for axis, values in axes.items())
        for (why, step), axes in together.items()
    ]


def draw_curves(curves: Curves, path: Path) -> None:
    """Seconds, and bytes where they are known, against each thing that grows."""
    rows, columns = len(curves.measures), len(curves.axes)
    height = 2.3 + 1.2 / rows  # what stands above and below takes the same room under one row
    width = max(3.0, CAPTION_WIDTH / columns)  # a run that was stopped may have one axis alone
    figure, grid = panels(rows, columns, width=width, height=height, sharey="row", sharex="col")
    for row, measure in zip(grid, curves.measures, strict=True):
        label, unit = AXIS_LABELS[measure]
        for place, axis in zip(row, curves.axes, strict=True):
            for step in curves.steps:
                line = curves.line(step, axis, measure)
                x, y = [x for x, _ in line], [y / unit for _, y in line]
                place.plot(x, y, label=step, markersize=5, **LOOKS[step])
        row[0].set_ylabel(label)
        numbers = [getattr(point, measure) / unit for point in curves.points]
        log_y_axis(row[0], numbers)
    for column, axis in zip(grid.T, curves.axes, strict=True):
        values = sorted({point.value for point in curves.points if point.axis == axis})
        log_x_axis(column[0], values)
        column[0].set_title(held(curves, axis), fontsize=8, color=QUIET)
        column[-1].set_xlabel(axis)
    figure.suptitle(f"A training step on {curves.machine}", fontsize=10)
    legend(figure, grid[0, 0])
    # Of the legend, so that room is made for both.
    figure.legends[0].set_title("\n".join(_caption(curves)))
    figure.legends[0].get_title().set(fontsize=8, color=QUIET, multialignment="center")
    save(figure, path)


def _caption(curves: Curves) -> list[str]:
    """What the panels do not say."""
    windows = f"windows of {curves.window} tokens"
    said = [f"SMT takes {windows} whatever the length, so that its step is timed once for all."]
    if curves.left_out:
        asked = len(curves.points) + len(curves.left_out)
        said[0] += f" {len(curves.left_out)} of {asked} points were left out."
    return said + powers(curves)
