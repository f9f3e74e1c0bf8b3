"""`memtrain reproduce`: the grids of some figures, then their pictures and verdicts."""

import math
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memtrain.accel.engine import pick_device
from memtrain.errors import MemtrainError, printable
from memtrain.files import refuse_links, strict_json, write_output
from memtrain.paper import FIGURES, load
from memtrain.paper.base import (
    TOO_SMALL,
    Experiment,
    Job,
    Result,
    Setup,
    Tag,
    Verdict,
)
from memtrain.paper.results import ResultsFile, Stored, read_setup, settled, write_setup
from memtrain.paper.sweep import Launch, Place, place_of, results_of, sweep
from memtrain.paper.workers import default_processes, run_locally, run_on_ray, shared_gpu
from memtrain.plotting.style import render_figure


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of one figure in a folder."""

    figure: Experiment
    jobs: list[Job]
    results: list[Result]
    verdict: Verdict
    picture: Path | None
    """None while a setting has no run."""

    @property
    def complete(self) -> bool:
        return len(self.results) == len(self.jobs)


def reproduce(
    names: Sequence[str], setup: Setup, launch: Launch, *, minutes: float = math.inf
) -> dict[str, str]:
    """Run what is missing of the figures' grids; returns the runs that failed, with the reason.

    The runs of all figures share the launcher, so none of it is idle while one figure ends.
    """
    figures, setup = [load(name) for name in names], settled(setup)
    grids = {figure.name: figure.grid(setup) for figure in figures}
    _remember(setup, list(grids))
    jobs = [(name, job) for name, grid in grids.items() for job in grid]
    places = {name: [place_of(name, job) for job in grid] for name, grid in grids.items()}
    waiting = {figure.name: figure for figure in figures if figure.follows_up}

    def more(results: Mapping[Place, Result]) -> list[tuple[str, Job]]:
        """The follow-ups of figures whose grid is just done."""
        due = []
        for name, figure in list(waiting.items()):
            if all(place in results for place in places[name]):
                del waiting[name]
                found = [
                    replace(results[place], tags=dict(job.tags))
                    for place, job in zip(places[name], grids[name], strict=True)
                ]
                with blaming(figure, setup.folder):
                    due += [(name, job) for job in figure.follow_up(setup, found)]
        return due

    return sweep(setup.folder, jobs, launch, more=more, minutes=minutes)


def outcome(name: str, setup: Setup) -> Outcome:
    """Draw and judge a figure from the results that are there, if that is enough."""
    figure, setup = load(name), settled(setup)
    jobs = figure.grid(setup)
    results = results_of(setup.folder, [(figure.name, job) for job in jobs])
    known = len(results) == len(jobs) or not figure.follows_up
    if known:
        with blaming(figure, setup.folder):
            more = figure.follow_up(setup, results)
        jobs += more
        results += results_of(setup.folder, [(figure.name, job) for job in more])
    empty = {_group(job.tags) for job in jobs} - {_group(result.tags) for result in results}
    missing = len(jobs) - len(results)
    if empty or not known:  # not even what is still to come
        sentence = (
            f"{missing} of {len(jobs)} runs are missing, {len(empty)} settings have none; the "
            "same command continues them."
        )
        why = TOO_SMALL if setup.scale == "smoke" else "not judged, runs are missing"
        verdict = Verdict(holds=None, unjudged=why, sentence=sentence, numbers={})
        return Outcome(figure, jobs, results, verdict, None)
    picture = setup.folder / "figures" / f"{figure.name.replace(':', '.')}.png"
    refuse_links(picture, setup.folder)
    with blaming(figure, setup.folder):
        content = render_figure(figure.plot(setup, results))
        verdict = figure.verdict(setup, results)
    write_output(picture, content)
    if missing:
        told = f"{verdict.sentence} {missing} of {len(jobs)} runs are missing (seeds)."
        verdict = replace(verdict, sentence=told)
    return Outcome(figure, jobs, results, verdict, picture)


@contextmanager
def blaming(figure: Experiment, folder: Path) -> Iterator[None]:
    """Whatever a figure raises on results is one line: they are damaged, or the figure is wrong."""
    try:
        # Values that matplotlib warns of are seen in the picture.
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
            yield
    except MemtrainError as error:
        raise MemtrainError(f"figure {figure.name}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = next(iter(str(error).splitlines()), "")
        numbers = [
            number
            for number, result in enumerate(ResultsFile(folder).read(), start=1)
            if result.figure == figure.name
        ]
        lines = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise MemtrainError(
            f"figure {figure.name}: its results are damaged (results.jsonl, lines {lines}), or it "
            f"cannot handle them: {type(error).__name__}: {reason} "
            f"({Path(place.filename).name}:{place.lineno})"
        ) from None


def _group(tags: Mapping[str, Tag]) -> tuple:
    """A setting: all but the seed."""
    return tuple(sorted((name, str(tag)) for name, tag in tags.items() if name != "seed"))


# ---------------------------------------------------------------------------------- the folder


def figure_names(asked: Sequence[str]) -> list[str]:
    """Names, `all`, or figures of the user's, each once."""
    names = [name for one in asked for name in (FIGURES if one == "all" else (one,))]
    for name in names:
        load(name)  # says what is wrong with it, before anything runs
    return list(dict.fromkeys(names))


def _remember(setup: Setup, names: Sequence[str]) -> None:
    """Note what a folder is of. One scale a folder.

    Raises:
        MemtrainError: the folder was made with another scale, data or device.
    """
    stored = read_setup(setup.folder)
    asked = Stored(
        scale=setup.scale,
        data_dir=str(setup.data_dir),
        device=setup.device,
        figures=list(names),
        root=setup.root,
    )
    if stored is not None:
        for name in ("scale", "data_dir", "device"):
            before, now = getattr(stored, name), getattr(asked, name)
            if before != now:
                raise MemtrainError(
                    f"{name}={now}: {setup.folder} was made with {before}; take another --folder"
                )
        asked = replace(asked, figures=list(dict.fromkeys([*stored.figures, *names])))
    write_setup(setup.folder, asked)


def open_folder(folder: Path) -> tuple[Setup, list[str]]:
    """The setup of a folder, to look at only, and the names of its figures in the paper's order."""
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
    order = [*FIGURES, *dict.fromkeys(name for name in stored.figures if name not in FIGURES)]
    return setup, [name for name in order if name in stored.figures]


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
