"""What `memtrain reproduce` and `memtrain report` do, and what they print."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memtrain.accel.engine import pick_device
from memtrain.errors import MemtrainError, printable
from memtrain.files import refuse_links, strict_json, write_named
from memtrain.paper.base import TOO_SMALL, Setup
from memtrain.paper.mps import shared_gpu
from memtrain.paper.report import make_report
from memtrain.paper.reproduce import Outcome, figure_names, outcome, reproduce
from memtrain.paper.sweep import Launch
from memtrain.paper.workers import default_processes, run_locally, run_on_ray


def run_reproduce(options: Any) -> int:
    """Run, draw, judge; 1 if a run failed."""
    folder = options.folder or Path("runs") / f"reproduce-{options.scale}"
    names = figure_names(options.figures)
    setup = Setup(
        scale=options.scale, folder=folder, data_dir=options.data_dir, device=options.device
    )
    with _launcher(options, folder) as launch:
        failed = reproduce(names, setup, launch, minutes=options.minutes)
    found = [outcome(name, setup) for name in names]
    missing = sum(len(one.jobs) - len(one.results) for one in found)
    if options.json:
        record = {"scale": setup.scale, "figures": _plain(found), "failed": failed}
        print(strict_json(record | {"missing": missing}))
    else:
        _print_verdicts(found, setup)
        print(f"\nfolder  {folder}\npage    memtrain report {quote(str(folder))}")
    if failed:
        print(f"memtrain: {len(failed)} runs failed; the same command tries again", file=sys.stderr)
    elif missing:
        told = f"{missing} runs are missing after {options.minutes:g} minutes"
        print(f"memtrain: {told}; the same command continues", file=sys.stderr)
    return 1 if failed else 0


@contextmanager
def _launcher(options: Any, folder: Path) -> Iterator[Launch]:
    """Where runs happen, as the options say."""
    processes = options.processes or default_processes(options.device, options.scale)
    if options.launcher == "ray":
        yield partial(run_on_ray, folder=folder, processes=processes, address=options.address)
        return
    on_gpu = pick_device(options.device).type == "cuda"
    several = on_gpu and processes > 1 and options.mps
    with shared_gpu() if several else nullcontext(False) as shared:
        if on_gpu:
            way = "at the same time (MPS)" if shared else "in turns (no MPS)"
            print(f"{processes} runs at a time, kernels {way}", file=sys.stderr)
        yield partial(run_locally, folder=folder, processes=processes)


def _plain(found: Sequence[Outcome]) -> dict[str, Any]:
    return {
        one.figure.name: {
            "claim": one.figure.claim,
            "holds": one.verdict.holds,
            "sentence": one.verdict.sentence,
            "numbers": one.verdict.numbers,
            "picture": str(one.picture) if one.picture else None,
            "runs": len(one.results),
            "missing": len(one.jobs) - len(one.results),
        }
        for one in found
    }


def _print_verdicts(found: Sequence[Outcome], setup: Setup) -> None:
    judged = f": {TOO_SMALL} any claim" if setup.scale == "smoke" else ""
    table = Table(title=f"scale {setup.scale}{judged}", show_lines=True)
    for column in ("figure", "the claim", "what was found"):
        table.add_column(column)
    for one in found:
        cells = (one.figure.name, one.verdict.word, one.verdict.sentence)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    Console(highlight=False).print(table)


def run_report(folders: Sequence[Path], out: Path | None, allow_code: bool) -> int:
    """Write the page and print where it is; what was left out goes to stderr."""
    if not folders:
        folders = sorted(path.parent for path in Path("runs").glob("reproduce-*/setup.json"))
    if not folders:
        raise MemtrainError(
            "nothing to report: no runs/reproduce-* here; memtrain reproduce all makes one"
        )
    page = out or folders[0] / "report.html"
    if out is None:
        refuse_links(page, folders[0])
    report = make_report(folders, allow_code=allow_code)
    write_named(page, report.html.encode())
    for name in report.left_out:
        print(f"left out {name}: --allow-code imports it, if you trust it", file=sys.stderr)
    print(page.resolve().as_uri())
    return 0
