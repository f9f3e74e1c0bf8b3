"""`memtrain reproduce`: the grids of some figures, then their pictures and verdicts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrain.errors import MemtrainError
from memtrain.experiments import FIGURES, load
from memtrain.experiments.drawing import save
from memtrain.experiments.experiment import Experiment, Job, Result, Setup, Verdict
from memtrain.experiments.sweep import Launch, results_of, sweep


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of one figure in a folder."""

    figure: Experiment
    jobs: list[Job]
    results: list[Result]
    verdict: Verdict
    picture: Path | None
    """None while runs are missing."""

    @property
    def complete(self) -> bool:
        return len(self.results) == len(self.jobs)


def reproduce(names: Sequence[str], setup: Setup, launch: Launch) -> dict[str, str]:
    """Run what is missing of the figures' grids; returns the runs that failed, with the reason."""
    figures = [load(name) for name in names]
    first = [(figure.name, job) for figure in figures for job in figure.grid(setup)]
    _remember(setup, [figure.name for figure in figures])
    failed = sweep(setup.folder, first, launch)
    then = []
    for figure in figures:
        jobs = _with_follow_up(figure, setup)[0]
        then += [(figure.name, job) for job in jobs]
    return failed | sweep(setup.folder, then, launch)


def _with_follow_up(figure: Experiment, setup: Setup) -> tuple[list[Job], list[Result]]:
    """All jobs of a figure and their results; the follow-up is there once the grid is done."""
    jobs = figure.grid(setup)
    results = results_of(setup.folder, [(figure.name, job) for job in jobs])
    if len(results) == len(jobs):
        more = figure.follow_up(setup, results)
        jobs += more
        results += results_of(setup.folder, [(figure.name, job) for job in more])
    return jobs, results


def outcome(name: str, setup: Setup) -> Outcome:
    """Draw and judge a figure from the results that are there."""
    figure = load(name)
    jobs, results = _with_follow_up(figure, setup)
    missing = len(jobs) - len(results)
    if missing:
        sentence = f"{missing} of {len(jobs)} runs are missing; reproduce it again to run them."
        verdict = Verdict(holds=None, sentence=sentence, numbers={})
        return Outcome(figure, jobs, results, verdict, None)
    picture = setup.folder / "figures" / f"{figure.name.replace(':', '.')}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    save(figure.plot(setup, results), picture)
    return Outcome(figure, jobs, results, figure.verdict(setup, results), picture)


# ---------------------------------------------------------------------------------- the folder


def figure_names(asked: str) -> list[str]:
    """`all`, one name, or a figure of the user's."""
    if asked == "all":
        return list(FIGURES)
    load(asked)  # says what is wrong with it, before anything runs
    return [asked]


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
