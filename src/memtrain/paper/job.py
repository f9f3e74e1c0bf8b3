"""Run one job of a sweep in the current process: train, measure, return the results."""

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
    """Empty: other runs start from it, and no figure measures it now."""
    awaited: bool
    """Whether follow-up runs depend on it."""
    start: "Work | None" = None
    """The run whose stages this one continues."""
    rank: int = 0
    """See `Job.rank`."""

    @property
    def place(self) -> str:
        """The run's folder, relative to the sweep's."""
        return f"runs/{self.config.name}-{self.key}"

    @property
    def name(self) -> str:
        """The job's name."""
        return self.requests[0].job if self.requests else Path(self.place).name

    @property
    def title(self) -> str:
        """The figure's name and the job's."""
        return f"{self.requests[0].figure}: {self.name}" if self.requests else self.name


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
    return [_work(key, group) for key, group in groups.items()]


def _work(key: str, group: Sequence[tuple[Experiment, Job]]) -> Work:
    job, rank = group[0][1], min(job.rank for _, job in group)
    awaited = any(figure.follows_up and not figure.incremental for figure, _ in group)
    start = None
    if job.start is not None:
        start = Work(Job(config=job.start).key, job.start, True, (), awaited, rank=rank)
    return Work(
        key=key,
        config=job.config,
        train=job.train,
        requests=tuple(Request(figure.name, job.name, dict(job.tags)) for figure, job in group),
        awaited=awaited,
        start=start,
        rank=rank,
    )


def attempt(work: Work, folder: Path, notify: Notify) -> Done | Failed:
    """Call `perform`; an error becomes `Failed`, and its traceback a file next to the run's folder.

    Raises:
        Interrupted: the run was stopped by a signal, and is saved.
        torch.AcceleratorError: a fault on the GPU, of this run or of one that shares it.
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
        if isinstance(error, torch.AcceleratorError):
            raise  # a fault on the GPU: this process cannot use it any more
        out_of_memory = isinstance(error, DeviceMemoryError | torch.OutOfMemoryError)
        return Failed(work.key, f"{type(error).__name__}: {line}{see}", out_of_memory)
    finally:  # free the run's memory: its models and graphs refer to each other in cycles
        gc.collect()
        if torch.cuda.is_initialized():
            with suppress(torch.AcceleratorError):  # after a fault: the error is in the trace
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
    with _locked_place(place, folder):
        run, diverged = _trained(work, folder, notify)
        if not work.requests:
            return []
        curve = [_point(record) for record in run.metrics.read() if "evaluation" in record]
        cost = _cost(work, run)
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


@contextmanager
def _locked_place(place: Path, folder: Path) -> Iterator[None]:
    """Keep other processes from a run's folder."""
    refuse_links(place, folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = place.with_name(place.name + ".lock")
    with locked(lock, f"{place}: another process trains it", wait=True):
        yield


def _trained(work: Work, folder: Path, notify: Notify) -> tuple[Any, str]:
    """The trained run, and why it diverged, if it did."""
    from memtrain.training.console import Reporter
    from memtrain.training.run import Run

    class Notifier(Reporter):
        def stage(self, name: str, step: int, steps: int) -> None:
            self.name, self.steps = name, steps
            notify(Progress(work.key, name, step, steps))

        def advance(self, step: int, metrics: dict[str, float]) -> None:
            notify(Progress(work.key, self.name, step, self.steps))

    place, stored = folder / work.place, read_setup(folder)
    config = located(work.config, stored.root if stored else ROOT, folder)
    if not work.train:
        return Run(config, place), ""
    # Without a checkpoint there is nothing to resume from.
    if (place / "checkpoints").is_dir():
        run = _opened(config, place)
    else:
        start = _trained_start(work, folder)
        run = Run.create(config, place, overwrite=True)
        if start is not None:
            run.continue_from(start)
    try:
        return run.train(Notifier()), ""
    except DivergedError as error:
        return _opened(config, place), str(error)


def _trained_start(work: Work, folder: Path) -> Path | None:
    """The folder of the run that this one starts from, trained here if it is not yet.

    None if there is no such run, or if it diverged before its first checkpoint: the whole run is
    then trained, and diverges too.
    """
    if work.start is None:
        return None
    place = folder / work.start.place
    with _locked_place(place, folder):
        _trained(work.start, folder, lambda progress: None)
    return place if (place / "checkpoints").is_dir() else None


def _cost(work: Work, run: Any) -> dict[str, int | float]:
    """The costs of all stages, and as start_steps and so on those of the run it started from."""
    cost = {name.removeprefix("total_"): value for name, value in run.totals().items()}
    if work.start is not None:
        first = [
            stage for stage in run.progress.stages if work.start.config.stages()[stage.name].steps
        ]
        cost |= {f"start_{name}": sum(getattr(one, name) for one in first) for name in COSTS}
    return cost


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
