"""Run one job of a sweep in the current process: train, measure, return the results."""

import gc
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memtrain.config import RunConfig, Stream
from memtrain.errors import DeviceMemoryError, DivergedError, MemtrainError, printable
from memtrain.files import locked, refuse_links, write_atomic
from memtrain.paper import load
from memtrain.paper.base import ROOT, Experiment, Job, Result, Tag, flat_scores
from memtrain.paper.results import COSTS, read_setup
from memtrain.paper.toy_data import located
from memtrain.runs.processes import Interrupted


@dataclass(frozen=True, slots=True)
class Request:
    """A figure that measures a run, and the run's position in its grid."""

    figure: str
    job: str
    tags: dict[str, Tag]


@dataclass(frozen=True, slots=True)
class Work:
    """A run, trained once, and every figure that measures it."""

    key: str
    config: RunConfig
    train: bool
    requests: tuple[Request, ...]
    awaited: bool
    """Whether follow-up runs depend on it."""

    @property
    def place(self) -> str:
        """The run's folder, relative to the sweep's."""
        return f"runs/{self.config.name}-{self.key}"

    @property
    def title(self) -> str:
        return f"{self.requests[0].figure}: {self.requests[0].job}"


@dataclass(frozen=True, slots=True)
class Progress:
    key: str
    stage: str
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Done:
    key: str
    results: list[Result]


@dataclass(frozen=True, slots=True)
class Failed:
    key: str
    message: str
    out_of_memory: bool = False
    """The device's memory was too small for this run, or for all runs that shared it."""


Event = Progress | Done | Failed
Notify = Callable[[Progress], None]


def collect(jobs: Iterable[tuple[Experiment, Job]]) -> list[Work]:
    """Group the jobs of several figures by run."""
    groups: dict[str, list[tuple[Experiment, Job]]] = {}
    for figure, job in jobs:
        groups.setdefault(job.key, []).append((figure, job))
    return [
        Work(
            key=key,
            config=group[0][1].config,
            train=group[0][1].train,
            requests=tuple(Request(figure.name, job.name, dict(job.tags)) for figure, job in group),
            awaited=any(figure.follows_up for figure, _ in group),
        )
        for key, group in groups.items()
    ]


def attempt(work: Work, folder: Path, notify: Notify) -> Done | Failed:
    """Call `perform`; an error becomes `Failed`, and its traceback a file next to the run's folder.

    Raises:
        Interrupted: the run was stopped by a signal, and is saved.
    """
    import torch

    place = folder / work.place
    trace = place.with_name(place.name + ".error.txt")
    try:
        done = Done(work.key, perform(work, folder, notify))
        trace.unlink(missing_ok=True)  # of an earlier attempt
        return done
    except Interrupted:
        raise
    except Exception as error:
        line = printable((str(error).splitlines() or [""])[0])
        see = f" (see {trace})" if _save_trace(trace, folder, traceback.format_exc()) else ""
        out_of_memory = isinstance(error, DeviceMemoryError | torch.OutOfMemoryError)
        return Failed(work.key, f"{type(error).__name__}: {line}{see}", out_of_memory)
    finally:  # free the run's memory: its models and graphs refer to each other in cycles
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _save_trace(trace: Path, folder: Path, text: str) -> bool:
    try:
        refuse_links(trace, folder)
        write_atomic(trace, text.encode(errors="replace"))
    except (OSError, MemtrainError):
        return False
    return True


def perform(work: Work, folder: Path, notify: Notify) -> list[Result]:
    """Train from the last checkpoint, then measure for every figure that requested it."""
    place = folder / work.place
    refuse_links(place, folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    stored = read_setup(folder)
    config = located(work.config, stored.root if stored else ROOT, folder)
    lock = place.with_name(place.name + ".lock")
    with locked(lock, f"{place}: another process trains it", wait=True):
        run, diverged = _trained(work, config, place, notify)
        curve = [_point(record) for record in run.metrics.read() if "evaluation" in record]
        cost = {name.removeprefix("total_"): value for name, value in run.totals().items()}
        figures = {request.figure: load(request.figure) for request in work.requests}
        measured = {name: figure.measure(run) for name, figure in figures.items()}
        return [
            Result(
                figure=request.figure,
                version=figures[request.figure].version,
                job=request.job,
                key=work.key,
                tags=request.tags,
                measured=measured[request.figure],
                cost=cost,
                curve=curve,
                diverged=diverged,
            )
            for request in work.requests
        ]


def _trained(work: Work, config: RunConfig, place: Path, notify: Notify) -> tuple[Any, str]:
    """The trained run, and why it diverged, if it did."""
    from memtrain.training.console import Reporter
    from memtrain.training.run import Run

    class Notifier(Reporter):
        def stage(self, name: str, step: int, steps: int) -> None:
            self.name, self.steps = name, steps
            notify(Progress(work.key, name, step, steps))

        def advance(self, step: int, metrics: dict[str, float]) -> None:
            notify(Progress(work.key, self.name, step, self.steps))

    if not work.train:
        return Run(config, place), ""
    # Without a checkpoint there is nothing to resume from.
    if (place / "checkpoints").is_dir():
        run = _opened(config, place)
    else:
        run = Run.create(config, place, overwrite=True)
    try:
        return run.train(Notifier()), ""
    except DivergedError as error:
        return _opened(config, place), str(error)


def _opened(config: RunConfig, place: Path) -> Any:
    """Open a run if its config is the job's, so that it imports no classes but the figure's."""
    from memtrain.config.serialize import to_json
    from memtrain.runs.run_folder import read_folder
    from memtrain.training.run import Run

    found = read_folder(place)
    if isinstance(found.data, Stream) and isinstance(config.data, Stream):
        moved = replace(found, data=replace(found.data, path=config.data.path))
        if moved == config != found:  # the sweep's folder was moved
            refuse_links(place / "config.json", place)
            write_atomic(place / "config.json", to_json(config).encode())
            found = moved
    if found != config:
        raise MemtrainError(f"{place}: config.json is not that of the job; remove the folder")
    return Run.open(place, allow_code=True)


def _point(record: dict[str, Any]) -> dict[str, Any]:
    """One evaluation during a run, without its lists."""
    costs = {name: record[f"total_{name}"] for name in COSTS}
    return costs | {"stage": record["stage"]} | flat_scores(record["evaluation"])
