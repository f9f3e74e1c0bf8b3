"""`memtrain reproduce`: run the grids of figures, then plot and judge them."""

import math
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memtrain.accel.engine import pick_device
from memtrain.errors import MemtrainError, printable
from memtrain.files import refuse_links, strict_json, write_output
from memtrain.paper import FIGURES, load
from memtrain.paper.base import TOO_SMALL, Experiment, Job, Result, Setup, Tag, Verdict
from memtrain.paper.results import (
    ResultId,
    ResultsFile,
    StoredSetup,
    job_id,
    read_setup,
    write_setup,
)
from memtrain.paper.slurm import run_on_slurm
from memtrain.paper.sweep import FigureJob, Launch, results_of, sweep
from memtrain.paper.workers import default_processes, run_locally, run_on_ray, shared_gpu
from memtrain.plotting.style import render_figure


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results, verdict and plot of one figure."""

    figure: Experiment
    jobs: list[Job]
    results: list[Result]
    verdict: Verdict
    picture: Path | None
    """None if a setting has no result yet."""

    @property
    def missing(self) -> int:
        return len(self.jobs) - len(self.results)


class Reproduced(NamedTuple):
    """The outcomes of figures, and the jobs that failed, with the reason."""

    outcomes: list[Outcome]
    failed: dict[str, str]


def run_reproduce(options: Any) -> int:
    """Run the command: sweep, plot, judge and print; returns 1 if a run failed."""
    folder = options.folder or Path("runs") / f"reproduce-{options.scale}"
    names = [name for one in options.figures for name in (FIGURES if one == "all" else (one,))]
    figures = [load(name) for name in dict.fromkeys(names)]
    setup = Setup(
        scale=options.scale, folder=folder, data_dir=options.data_dir, device=options.device
    )
    with _launcher(options, folder) as launch:
        outcomes, failed = reproduce(figures, setup, launch, minutes=options.minutes)
    missing = sum(one.missing for one in outcomes)
    if options.json:
        plain = {one.figure.name: _plain(one) for one in outcomes}
        record = {"scale": setup.scale, "figures": plain, "failed": failed, "missing": missing}
        print(strict_json(record))
    else:
        _print_verdicts(outcomes, setup)
        print(f"\nfolder  {folder}\npage    memtrain report {quote(str(folder))}")
    if failed:
        print(
            f"memtrain: {len(failed)} runs failed; the same command retries them", file=sys.stderr
        )
    elif missing:
        after = f"{missing} runs are missing after {options.minutes:g} minutes"
        print(f"memtrain: {after}; the same command continues", file=sys.stderr)
    return 1 if failed else 0


@contextmanager
def _launcher(options: Any, folder: Path) -> Iterator[Launch]:
    """The launcher chosen by the options."""
    if options.launcher == "slurm":
        parts: Any = dict(folder=folder, jobs=options.processes, options=options.slurm)
        yield partial(run_on_slurm, **parts)
        return
    processes = options.processes or default_processes(options.device, options.scale)
    if options.launcher == "ray":
        yield partial(run_on_ray, folder=folder, processes=processes, address=options.address)
        return
    on_gpu = pick_device(options.device).type == "cuda"
    several = on_gpu and processes > 1 and options.mps
    with shared_gpu() if several else nullcontext(False) as shared:
        if on_gpu:
            way = "run concurrently (MPS)" if shared else "take turns (no MPS)"
            print(f"{processes} runs at a time, whose kernels {way}", file=sys.stderr)
        yield partial(run_locally, folder=folder, processes=processes, on_gpu=on_gpu)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "claim": outcome.figure.claim,
        "holds": outcome.verdict.holds,
        "sentence": outcome.verdict.sentence,
        "numbers": outcome.verdict.numbers,
        "picture": str(outcome.picture) if outcome.picture else None,
        "runs": len(outcome.results),
        "missing": outcome.missing,
    }


def _print_verdicts(outcomes: Sequence[Outcome], setup: Setup) -> None:
    judged = f": {TOO_SMALL} any claim" if setup.scale == "smoke" else ""
    table = Table(title=f"scale {setup.scale}{judged}", show_lines=True)
    for column in ("figure", "the claim", "findings"):
        table.add_column(column)
    for one in outcomes:
        cells = (one.figure.name, one.verdict.word, one.verdict.sentence)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    Console(highlight=False).print(table)


def reproduce(
    figures: Sequence[Experiment], setup: Setup, launch: Launch, *, minutes: float = math.inf
) -> Reproduced:
    """Run the missing jobs of the figures' grids and follow-ups, then plot and judge each figure.

    All figures share the launcher, so that no process is idle while one figure finishes.
    """
    stored = _checked_setup(setup)
    setup = replace(setup, root=stored.root)
    grids = {figure.name: figure.grid(setup) for figure in figures}
    write_setup(
        setup.folder, replace(stored, figures=list({**dict.fromkeys(stored.figures), **grids}))
    )
    waiting = {figure.name: figure for figure in figures if figure.follows_up}
    keys = {name: [job_id(figure, job) for job in grids[name]] for name, figure in waiting.items()}
    given: set[ResultId] = set()

    def follow_ups(results: Mapping[ResultId, Result]) -> list[FigureJob]:
        """The new follow-ups: of figures whose grid has just finished, and of incremental ones."""
        due = []
        for name, figure in list(waiting.items()):
            complete = all(key in results for key in keys[name])
            if complete:
                del waiting[name]
            if complete or figure.incremental:
                there = [key in results for key in keys[name]]
                found = results_of(results, figure, compress(grids[name], there))
                with errors_of(figure, setup.folder):
                    jobs = {job_id(figure, job): job for job in figure.follow_up(setup, found)}
                due += [(figure, job) for key, job in jobs.items() if key not in given]
                given.update(jobs)
        return due

    jobs = [(figure, job) for figure in figures for job in grids[figure.name]]
    results, failed = sweep(setup.folder, jobs, launch, more=follow_ups, minutes=minutes)
    outcomes = [outcome(figure, setup, grids[figure.name], results) for figure in figures]
    return Reproduced(outcomes, failed)


def outcome(
    figure: Experiment, setup: Setup, grid: Sequence[Job], results: Mapping[ResultId, Result]
) -> Outcome:
    """Plot and judge a figure from the available results, if every setting has one.

    An incremental figure needs only some results.
    """
    jobs, found = list(grid), results_of(results, figure, grid)
    partial = figure.incremental and bool(found)
    known = len(found) == len(jobs) or not figure.follows_up or partial
    if known:
        with errors_of(figure, setup.folder):
            more = figure.follow_up(setup, found)
        jobs += more
        found += results_of(results, figure, more)
    empty = {_setting(job.tags) for job in jobs} - {_setting(result.tags) for result in found}
    missing = len(jobs) - len(found)
    # Without the grid's results the follow-ups are not even known.
    if not known or (empty and not partial):
        sentence = (
            f"{missing} of {len(jobs)} runs are missing, {len(empty)} settings have none; the "
            "same command continues them."
        )
        why = TOO_SMALL if setup.scale == "smoke" else "not judged, runs are missing"
        verdict = Verdict(holds=None, unjudged=why, sentence=sentence, numbers={})
        return Outcome(figure, jobs, found, verdict, None)
    picture = setup.folder / "figures" / f"{figure.name.replace(':', '.')}.png"
    refuse_links(picture, setup.folder)
    with errors_of(figure, setup.folder):
        content = render_figure(figure.plot(setup, found))
        verdict = figure.verdict(setup, found)
    write_output(picture, content)
    if missing:
        which = "" if empty else " (seeds)"
        sentence = f"{verdict.sentence} {missing} of {len(jobs)} runs are missing{which}."
        verdict = replace(verdict, sentence=sentence)
    return Outcome(figure, jobs, found, verdict, picture)


@contextmanager
def errors_of(figure: Experiment, folder: Path) -> Iterator[None]:
    """Turn any error of a figure into a MemtrainError that names the figure and its results."""
    try:
        # The plot itself shows the values that matplotlib and numpy warn about.
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
            yield
    except MemtrainError as error:
        raise MemtrainError(f"figure {figure.name}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = next(iter(str(error).splitlines()), "")
        results = enumerate(ResultsFile(folder).read(), start=1)
        numbers = [number for number, result in results if result.figure == figure.name]
        lines = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise MemtrainError(
            f"figure {figure.name}: its results are damaged (results.jsonl, lines {lines}), or it "
            f"cannot handle them: {type(error).__name__}: {reason} "
            f"({Path(place.filename).name}:{place.lineno})"
        ) from None


def _setting(tags: Mapping[str, Tag]) -> tuple:
    """All tags except the seed."""
    return tuple(sorted((name, str(tag)) for name, tag in tags.items() if name != "seed"))


def _checked_setup(setup: Setup) -> StoredSetup:
    """The setup to store: that of the folder, if it has one.

    Raises:
        MemtrainError: the folder was made with another scale, data folder or device.
    """
    given = StoredSetup(
        scale=setup.scale,
        data_dir=str(setup.data_dir),
        device=setup.device,
        figures=[],
        root=setup.root,
    )
    stored = read_setup(setup.folder)
    for name in ("scale", "data_dir", "device"):
        before, now = getattr(stored or given, name), getattr(given, name)
        if before != now:
            raise MemtrainError(
                f"{name}={now}: {setup.folder} was made with {before}; choose another --folder"
            )
    return stored or given


def open_folder(folder: Path) -> tuple[Setup, list[str]]:
    """The setup of a folder, for reading only, and its figures in the paper's order."""
    stored = read_setup(folder)
    if stored is None:
        raise MemtrainError(f"{folder}: nothing was reproduced there (setup.json is missing)")
    setup = Setup(
        scale=stored.scale,
        folder=folder,
        data_dir=Path(stored.data_dir),
        device=stored.device,
        root=stored.root,
        prepares=False,
    )
    own = [name for name in stored.figures if name not in FIGURES]
    return setup, [name for name in dict.fromkeys([*FIGURES, *own]) if name in stored.figures]
