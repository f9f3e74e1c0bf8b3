"""What was measured, as a table and a record."""

import platform
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from memtrain.accel.engine import pick_device
from memtrain.bench.measure import Result, Timing
from memtrain.config import EngineConfig

WIDEST = 120
"""Columns of a terminal that the whole table takes; with fewer it comes in two parts."""
RATES = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}
"""Units of operations per second: whichever suits the machine."""
PARTS = (
    ("batch", "plain", "fast", "ratio", "start-up"),
    ("tokens/s", *RATES, "peak", "GB, plain", "GB, fast"),
)


def machine(device: torch.device) -> str:
    """The device in words, and what runs on it."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    return f"{platform.machine()}, {threads} thread{plural}, torch {torch.__version__}"


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
