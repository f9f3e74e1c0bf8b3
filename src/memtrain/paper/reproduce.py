"""`memtrain reproduce`: the grids of some figures, then their pictures and verdicts."""

import math
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memtrain.errors import MemtrainError
from memtrain.files import refuse_links, write_named
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
from memtrain.plotting.style import rendered


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
        content = rendered(figure.plot(setup, results))
        verdict = figure.verdict(setup, results)
    write_named(picture, content)
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
