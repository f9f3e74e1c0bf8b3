"""memtrain runs and memtrain compare."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError, printable
from memtrain.files import strict_json

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
CUT = {"data": 10, "method": 8, "cell": 8}
"""Longest entries of some columns."""
NUMBERS = ("params", "steps", "loss", "sec", "ago")


@dataclass(frozen=True)
class _RunsOptions:
    """List the runs below a folder, the last changed first: data, method, cell, parameters, steps
    done, held-out loss, training seconds and state (running, stopped, finished or damaged)."""

    folder: tyro.conf.Positional[Path] = Path("runs")
    """Where to look, also in its subfolders."""
    sort: str = "changed"
    """changed, name, data, loss, steps or seconds."""
    json: bool = False
    """Print one JSON list instead of the table."""

    def __post_init__(self) -> None:
        if self.sort not in ORDERS:
            raise MemtrainError(f"--sort={self.sort}: must be one of {', '.join(ORDERS)}")


ORDERS = {
    "changed": lambda one: -one.changed,
    "name": lambda one: str(one.folder),
    "data": lambda one: (one.data, str(one.folder)),
    "loss": lambda one: (one.loss, one.rnn is None, one.rnn or 0.0),
    "steps": lambda one: -one.steps,
    "seconds": lambda one: -one.seconds,
}


@dataclass(frozen=True)
class _CompareOptions:
    """Compare runs of the same data in one table (settings that differ, held-out losses of teacher
    and RNN, parameters, steps, tokens, sequential operations, seconds) and one figure of their
    held-out losses. Losses in different units are refused; different data is marked."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """At least two run folders."""
    out: Path | None = None
    """The figure, .png, .svg or .pdf (default: compare.png in the folder that holds the runs)."""
    json: bool = False
    """Print one JSON object instead of the tables; no figure is drawn unless --out is given."""

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix.lower() not in FIGURE_SUFFIXES:
            raise MemtrainError(f"--out {self.out}: must end in {', '.join(FIGURE_SUFFIXES)}")
        if self.out is not None and self.out.is_dir():
            raise MemtrainError(f"--out {self.out}: is a folder; name a file in it")


def runs(arguments: list[str]) -> int:
    """List the runs below a folder."""
    options = parse(_RunsOptions, arguments, "memtrain runs")

    from memtrain.runs.listing import list_runs

    found = sorted(list_runs(options.folder), key=ORDERS[options.sort])
    if options.json:
        print(strict_json([one.to_json() for one in found]), flush=True)
        return 0
    if not found:
        raise MemtrainError(
            f"{options.folder}: holds no runs; memtrain train makes one, memtrain runs FOLDER "
            "looks elsewhere"
        )
    _print_runs(found, options.folder)
    return 0


def _print_runs(found: list, folder: Path) -> None:
    """Print a table; a column with the same entry in every row becomes a line below it."""
    from rich.console import Console
    from rich.table import Column, Table

    rows = [_row(one, folder) for one in found]
    same = {name: {row[name] for row in rows} for name in ("data", "method", "cell")}
    shared = {name: values.pop() for name, values in same.items() if len(values) == 1}
    names = [name for name in rows[0] if name not in shared]
    console = Console(highlight=False, markup=False)
    room = console.width - 2 * (len(names) - 1)
    for name in (name for name in reversed(names) if name != "run"):
        room -= _cut(rows, name, CUT.get(name, console.width))
    _cut(rows, "run", max(8, room))
    right = {name: "right" for name in NUMBERS}
    columns = [Column(name, justify=right.get(name, "left"), no_wrap=True) for name in names]  # type: ignore[arg-type]
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1))
    for row in rows:
        table.add_row(*(row[name] for name in names))
    console.print(table)
    for one in found:
        if one.problem:
            print(printable(f"{one.folder}: {one.problem}"))
    if shared:
        print("all     ", ", ".join(f"{name} {value}" for name, value in shared.items()))
    units = sorted({one.loss for one in found if one.loss})
    print(f"loss     held-out loss of the RNN, {' or '.join(units) or 'none yet'}")


def _cut(rows: list[dict[str, str]], name: str, width: int) -> int:
    """Shorten a column's entries to a width; returns how much of it they take."""
    for row in rows:
        if len(row[name]) > width:
            row[name] = f"{row[name][: width - 1]}…"
    return max(len(name), *(len(row[name]) for row in rows))


def _row(one: Any, folder: Path) -> dict[str, str]:
    from memtrain.plotting.comparison import loss_text, short_count

    going = one.state in ("running", "stopped") and one.method != one.stage
    return {
        "run": printable(str(one.folder.relative_to(folder) if one.folder != folder else folder)),
        "data": printable(re.sub("-[0-9a-f]{8}$", "", one.data)),  # the key of prepared data
        "method": one.method,
        "cell": printable(one.cell),
        "params": short_count(one.parameters),
        "steps": f"{one.stage} {short_count(one.steps)}" if going else short_count(one.steps),
        "loss": loss_text(one.rnn),
        "sec": short_count(one.seconds),
        "state": one.state,
        "ago": _ago(one.changed),
    }


def _ago(moment: float) -> str:
    passed = max(0.0, time.time() - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if passed >= size:
            return f"{int(passed // size)}{unit}"
    return "now"


def compare(arguments: list[str]) -> int:
    """Compare runs in one table and one figure."""
    options = parse(_CompareOptions, arguments, "memtrain compare")

    from rich.console import Console

    from memtrain.plotting.comparison import compare_runs, comparison_tables
    from memtrain.plotting.style import save

    compared = compare_runs(options.runs)
    if options.json:
        plain = {"loss": compared.loss, "warnings": compared.warnings, "runs": compared.rows()}
        print(strict_json(plain), flush=True)
    else:
        console = Console(highlight=False)
        for warning in compared.warnings:
            console.print(f"[bold]Note:[/bold] {warning}.")
        for table in comparison_tables(compared):
            console.print(table)
    out = options.out
    if out is None and not options.json:
        out = Path(os.path.commonpath([run.resolve().parent for run in options.runs]))
        out = out / "compare.png"
    if out is not None:
        save(compared.figure(), out)
        if not options.json:
            print(f"figure  {out}")
    return 0
