"""What `memtrain reproduce` and `memtrain report` do, and what they print."""

import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memtrain.errors import MemtrainError
from memtrain.experiments.experiment import Setup
from memtrain.experiments.launch import default_processes, run_locally, run_on_ray
from memtrain.experiments.report import write_report
from memtrain.experiments.reproduce import Outcome, figure_names, outcome, reproduce


def run_reproduce(options: Any) -> int:
    """Run, draw, judge; 1 if a run failed."""
    folder = options.folder or Path("runs") / f"reproduce-{options.scale}"
    names = figure_names(options.figure)
    setup = Setup(
        scale=options.scale, folder=folder, data_dir=options.data_dir, device=options.device
    )
    processes = options.processes or default_processes(options.device)
    launch = partial(run_locally, folder=folder, processes=processes)
    if options.launcher == "ray":
        launch = partial(run_on_ray, folder=folder, processes=processes, address=options.address)
    failed = reproduce(names, setup, launch)
    found = [outcome(name, setup) for name in names]
    if options.json:
        record = {"scale": setup.scale, "figures": _plain(found), "failed": failed}
        print(json.dumps(_finite(record)))
    else:
        _print_verdicts(found, setup)
        print(f"\nfolder  {folder}\npage    memtrain report {folder}")
    if failed:
        print(f"memtrain: {len(failed)} runs failed; the same command tries again", file=sys.stderr)
    return 1 if failed else 0


def _plain(found: Sequence[Outcome]) -> dict[str, Any]:
    return {
        one.figure.name: {
            "claim": one.figure.claim,
            "holds": one.verdict.holds,
            "sentence": one.verdict.sentence,
            "numbers": one.verdict.numbers,
            "picture": str(one.picture) if one.picture else None,
            "runs": len(one.results),
        }
        for one in found
    }


def _finite(value: Any) -> Any:
    """JSON knows no nan: null takes its place."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_verdicts(found: Sequence[Outcome], setup: Setup) -> None:
    table = Table(title=f"scale {setup.scale}", show_lines=True)
    for column in ("figure", "the claim", "what was found"):
        table.add_column(column)
    for one in found:
        table.add_row(one.figure.name, one.verdict.word, one.verdict.sentence)
    Console(highlight=False).print(table)


def run_report(folders: Sequence[Path], out: Path | None) -> int:
    if not folders:
        folders = sorted(path.parent for path in Path("runs").glob("reproduce-*/setup.json"))
    if not folders:
        raise MemtrainError(
            "nothing to report: no runs/reproduce-* here; memtrain reproduce all makes one"
        )
    page = write_report(folders, out or folders[0] / "report.html")
    print(page.resolve().as_uri())
    return 0
