"""Benchmark results as tables, a figure and JSON."""

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
from memtrain.bench.measure import CaseResult, Timing, machine
from memtrain.config import EngineConfig
from memtrain.plotting.style import COLOURS, legend, log_x_axis, log_y_axis, panels, save

WIDEST = 120
"""Width of the whole table; a narrower terminal shows it in two parts."""
RATES = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}
PARTS = (
    ("batch", "plain", "fast", "ratio", "start-up"),
    ("tokens/s", *RATES, "peak", "GB, plain", "GB, fast"),
)


def print_results(results: Sequence[CaseResult], peak: float, device: torch.device) -> None:
    """Print one line per case; columns without a value on this machine are omitted."""
    unit = "TFLOP/s" if peak >= 1e12 else "GFLOP/s"
    rows = [_row(result, peak, unit) for result in results]
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width
        console = Console(highlight=False, width=max(WIDEST, console.width))
    console.print(f"{machine(device)}; a matrix product reaches {peak / RATES[unit]:.3g} {unit}")
    parts = PARTS if console.width < WIDEST else (sum(PARTS, ()),)
    for part in parts:
        columns = [name for name in part if any(row[name] for row in rows)]
        table = empty_table("", columns)
        for result, row in zip(results, rows, strict=True):
            table.add_row(result.label, *(row[name] for name in columns))
        console.print(table)


def empty_table(title: str, columns: Sequence[str]) -> Table:
    """An empty table with a column per name after the title."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(title, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _row(result: CaseResult, peak: float, unit: str) -> dict[str, str]:
    rate = result.flops / result.fast.seconds if result.flops else None
    reference = result.reference
    return {
        "batch": str(result.batch),
        "plain": format_duration(reference.seconds) if reference else "",
        "fast": format_duration(result.fast.seconds),
        "ratio": f"{result.ratio:.1f}x" if result.ratio else "",
        "tokens/s": f"{result.tokens_per_second:,.0f}",
        **{name: f"{rate / RATES[unit]:.3g}" if rate and name == unit else "" for name in RATES},
        "peak": f"{rate / peak:.0%}" if rate else "",
        "GB, plain": _gigabytes(reference),
        "GB, fast": _gigabytes(result.fast),
        "start-up": format_duration(result.fast.start_up),
    }


def format_duration(seconds: float) -> str:
    """Seconds with three digits, in the unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _gigabytes(timing: Timing | None) -> str:
    return f"{timing.peak_bytes / 1e9:.1f}" if timing and timing.peak_bytes is not None else ""


def as_record(results: Sequence[CaseResult], engine: EngineConfig, size: str, peak: float) -> dict:
    """All measurements, for JSON."""
    return {
        "machine": machine(pick_device(engine.device)),
        "size": size,
        "matrix_peak_flops": peak,
        "compiled": engine.compile,
        "results": [asdict(result) | {"ratio": result.ratio} for result in results],
    }


# --------------------------------------------------------------------------------------- growth

LINE_STYLES: dict[str, dict[str, Any]] = {
    "SMT": dict(color=COLOURS[0], marker="o", linewidth=2.2),
    "DMT": dict(color=COLOURS[2], marker="s"),
    "BPTT": dict(color=COLOURS[1], marker="^"),
    "recomputed BPTT": dict(color=COLOURS[4], marker="v", linestyle="--"),
}
"""By kind of step, coloured as in the paper's figures."""
UNITS = {"seconds": ("ms per step", 1e-3, ".3g"), "peak_bytes": ("peak GB", 1e9, ".2f")}
"""Title, unit and format of each measure in the table."""
AXIS_LABELS = {"seconds": ("seconds per step", 1.0), "peak_bytes": ("peak memory, GB", 1e9)}
QUIET = "#666666"
CAPTION_WIDTH = 7.0
"""Inches that the lines below the panels need."""
WORDS = {"seconds": "time", "peak_bytes": "memory"}


def print_curves(curves: Curves) -> None:
    """Print a table per measure, the powers of the length, and the points left out."""
    console = Console(highlight=False)
    console.print(curves.machine)
    for measure in curves.measures:
        title, unit, form = UNITS[measure]
        table = empty_table(title, curves.steps)
        for axis in curves.axes:
            lines = {step: dict(curves.line(step, axis, measure)) for step in curves.steps}
            before: list[float | None] = [None] * len(lines)
            for value in sorted(set().union(*lines.values())):
                cells = [line.get(value) for line in lines.values()]
                shown = [
                    "" if cell is None else "same" if cell == last else f"{cell / unit:{form}}"
                    for cell, last in zip(cells, before, strict=True)
                ]
                table.add_row(f"{axis} {value}", *shown)
                before = cells
            table.add_section()
        console.print(table)
    for axis in curves.axes:
        console.print(f"against {axis}: {held(curves, axis)}")
    for line in powers(curves) + left_out(curves):
        console.print(line, soft_wrap=True)


def held(curves: Curves, axis: str) -> str:
    """The values of the other axes."""
    return ", ".join(
        f"{at} {name}" if name == "memory tokens" else f"{name} {at}"
        for name, at in curves.held.get(axis, {}).items()
    )


def powers(curves: Curves) -> list[str]:
    """One line per measure: the power of the length with which each kind of step grows."""
    return [
        f"power of the length in {WORDS[measure]}: "
        + ", ".join(f"{step} {slope:.2f}" for step, slope in slopes.items())
        for measure, slopes in curves.powers().items()
        if slopes
    ]


def left_out(curves: Curves) -> list[str]:
    """The points that were not timed: one line per reason and kind of step."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in curves.left_out:
        axes = groups.setdefault((one.why, one.step), {})
        axes.setdefault(one.axis, []).append(str(one.value))
    return [
        f"left out, {why}: {step} at "
        + "; ".join(f"{axis} {', '.join(values)}" for axis, values in axes.items())
        for (why, step), axes in groups.items()
    ]


def draw_curves(curves: Curves, path: Path) -> None:
    """Draw seconds, and bytes where they are known, against each axis."""
    rows, columns = len(curves.measures), len(curves.axes)
    height = 2.3 + 1.2 / rows  # title and legend need the same space with one row
    width = max(3.0, CAPTION_WIDTH / columns)  # an interrupted benchmark may have a single axis
    figure, grid = panels(rows, columns, width=width, height=height, sharey="row", sharex="col")
    for row, measure in zip(grid, curves.measures, strict=True):
        label, unit = AXIS_LABELS[measure]
        for place, axis in zip(row, curves.axes, strict=True):
            for step in curves.steps:
                line = curves.line(step, axis, measure)
                x, y = [x for x, _ in line], [y / unit for _, y in line]
                place.plot(x, y, label=step, markersize=5, **LINE_STYLES[step])
        row[0].set_ylabel(label)
        log_y_axis(row[0], [getattr(point, measure) / unit for point in curves.points])
    for column, axis in zip(grid.T, curves.axes, strict=True):
        log_x_axis(column[0], sorted({p.value for p in curves.points if p.axis == axis}))
        column[0].set_title(held(curves, axis), fontsize=8, color=QUIET)
        column[-1].set_xlabel(axis)
    figure.suptitle(f"A training step on {curves.machine}", fontsize=10)
    legend(figure, grid[0, 0])
    # The caption is the legend's title, so that the layout reserves space for it.
    figure.legends[0].set_title("\n".join(_caption(curves)))
    figure.legends[0].get_title().set(fontsize=8, color=QUIET, multialignment="center")
    save(figure, path)


def _caption(curves: Curves) -> list[str]:
    windows = f"windows of {curves.window} tokens"
    line = f"SMT uses {windows} at every length, so that its step is timed only once."
    if curves.left_out:
        total = len(curves.points) + len(curves.left_out)
        line += f" {len(curves.left_out)} of {total} points were left out."
    return [line, *powers(curves)]
