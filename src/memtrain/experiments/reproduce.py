"""`memtrain reproduce`: the grids of some figures, then their pictures and verdicts."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memtrain.drawing import save
from memtrain.errors import MemtrainError
from memtrain.experiments import FIGURES, load
from memtrain.experiments.experiment import Experiment, Job, Result, Setup, Tag, Verdict
from memtrain.experiments.sweep import Launch, Place, place_of, results_of, sweep


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
    figures = [load(name) for name in names]
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
                found = [results[place] for place in places[name]]
                due += [(name, job) for job in figure.follow_up(setup, found)]
        return due

    return sweep(setup.folder, jobs, launch, more=more, minutes=minutes)


def outcome(name: str, setup: Setup) -> Outcome:
    """Draw and judge a figure from the results that are there, if that is enough."""
    figure = load(name)
    jobs = figure.grid(setup)
    results = results_of(setup.folder, [(figure.name, job) for job in jobs])
    known = len(results) == len(jobs) or not figure.follows_up
    if known:
        more = figure.follow_up(setup, results)
        jobs += more
        results += results_of(setup.folder, [(figure.name, job) for job in more])
    empty = {_group(job.tags) for job in jobs} - {_group(result.tags) for result in results}
    missing = len(jobs) - len(results)
    if empty or not known:  # not even what is still to come
        sentence = (
            f"{missing} of {len(jobs)} runs are missing, {len(empty)} settings have none; the "
            "same command goes on with them."
        )
        verdict = Verdict(holds=None, sentence=sentence, numbers={})
        return Outcome(figure, jobs, results, verdict, None)
    picture = setup.folder / "figures" / f"{figure.name.replace(':', '.')}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    save(figure.plot(setup, results), picture)
    verdict = figure.verdict(setup, results)
    if missing:
        told = f"{verdict.sentence} {missing} of {len(jobs)} runs are missing (seeds)."
        verdict = replace(verdict, sentence=told)
    return Outcome(figure, jobs, results, verdict, picture)


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
    """What a folder is of, so that a report needs no options. One scale a folder."""
    path = setup.folder / "setup.json"
    plain = {"scale": setup.scale, "data_dir": str(setup.data_dir), "device": setup.device}
    figures = list(names)
    if path.exists():
        known = json.loads(path.read_text())
        figures = [*known["figures"], *(name for name in names if name not in known["figures"])]
        changed = {key for key in plain if known[key] != plain[key]}
        if changed:
            key = sorted(changed)[0]
            raise MemtrainError(
                f"{key}={plain[key]}: {setup.folder} was made with {known[key]}; "
                "take another --folder"
            )
    setup.folder.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(plain | {"figures": figures}, indent=2) + "\n")
    draft.replace(path)


def open_folder(folder: Path) -> tuple[Setup, list[str]]:
    """The setup of a folder and the names of its figures."""
    path = folder / "setup.json"
    if not path.is_file():
        raise MemtrainError(f"{folder}: nothing was reproduced there (setup.json is missing)")
    known = json.loads(path.read_text())
    setup = Setup(
        scale=known["scale"],
        folder=folder,
        data_dir=Path(known["data_dir"]),
        device=known["device"],
    )
    return setup, known["figures"]


def outcomes(folder: Path) -> Iterator[Outcome]:
    """Every figure of a folder, in the paper's order."""
    setup, names = open_folder(folder)
    order = [*FIGURES, *(name for name in names if name not in FIGURES)]
    for name in order:
        if name in names:
            yield outcome(name, setup)
