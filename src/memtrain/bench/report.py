"""What was measured, as a table, a record and a figure."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from memtrain.bench.cases import Growth
from memtrain.bench.measure import Result, Timing
from memtrain.config import EngineConfig
from memtrain.train.engine import pick_device

WIDEST = 120
"""Columns of a terminal that the whole table takes; with fewer it comes in two parts."""
PARTS = (
    ("batch", "plain", "fast", "ratio", "start-up"),
    ("tokens/s", "TFLOP/s", "peak", "GB, plain", "GB, fast"),
)


def machine(device: torch.device) -> str:
    """The device in words, and what runs on it."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def print_results(results: Sequence[Result], peak: float, device: torch.device) -> None:
    """One line a case; what this machine cannot tell has no column."""
    rows = [_row(result, peak) for result in results]
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has room
        console = Console(highlight=False, width=max(WIDEST, console.width))
    console.print(f"{machine(device)}; a matrix product reaches {peak / 1e12:.3g} TFLOP/s")
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


def _row(result: Result, peak: float) -> dict[str, str]:
    rate = result.flops / result.fast.seconds if result.flops else None
    reference = result.reference
    return {
        "batch": str(result.batch),
        "plain": _duration(reference.seconds) if reference else "",
        "fast": _duration(result.fast.seconds),
        "ratio": f"{result.ratio:.1f}x" if result.ratio else "",
        "tokens/s": f"{result.tokens_per_second:,.0f}",
        "TFLOP/s": f"{rate / 1e12:.3g}" if rate else "",
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


def growth_record(points: Sequence[tuple[Growth, Timing]], engine: EngineConfig, size: str) -> dict:
    """Every point of the growth curves, for JSON."""
    return {
        "machine": machine(pick_device(engine.device)),
        "size": size,
        "points": [
            {"step": g.case.label, "axis": g.axis, "value": g.value, **asdict(timing)}
            for g, timing in points
        ],
    }


def draw_growth(record: dict, path: Path) -> None:
    """Seconds, and bytes where they are known, against each thing that grows."""
    from matplotlib.figure import Figure

    points = record["points"]
    axes_names = list(dict.fromkeys(point["axis"] for point in points))
    steps = list(dict.fromkeys(point["step"] for point in points))
    measures = [("seconds", "seconds a step", 1.0)]
    if all(point["peak_bytes"] is not None for point in points):
        measures.append(("peak_bytes", "peak memory, GB", 1e9))
    size = (3.4 * len(axes_names), 3.2 * len(measures))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(measures), len(axes_names), squeeze=False, sharey="row")
    for row, (key, label, unit) in zip(grid, measures, strict=True):
        for axis, name in zip(row, axes_names, strict=True):
            for step in steps:
                line = [p for p in points if p["step"] == step and p["axis"] == name]
                axis.plot(
                    [p["value"] for p in line],
                    [p[key] / unit for p in line],
                    marker="o",
                    markersize=4,
                    label=step,
                )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            values = sorted({p["value"] for p in points if p["axis"] == name})
            axis.set_xticks(values, [str(value) for value in values])
            axis.set_xlabel(name)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(label)
    grid[0][0].legend(fontsize=8)
    figure.suptitle(record["machine"], fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
