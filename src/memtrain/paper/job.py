"""One run of a sweep from beginning to end, in whatever process: train, measure, answer."""

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memtrain.config import RunConfig, Stream
from memtrain.errors import DeviceMemoryError, DivergedError, MemtrainError, printable
from memtrain.files import locked, refuse_links, write_atomic
from memtrain.paper import load
from memtrain.paper.base import ROOT, Job, Result, Tag
from memtrain.paper.results import read_setup
from memtrain.paper.toy_data import located
from memtrain.training.processes import Interrupted


@dataclass(frozen=True, slots=True)
class Asked:
    """A figure that wants to measure a run, and the run's place in its grid."""

    figure: str
    job: str
    tags: dict[str, Tag]


@dataclass(frozen=True, slots=True)
class Work:
    """A run, and every figure that asks for it: it is trained once."""

    key: str
    config: RunConfig
    train: bool
    asked: tuple[Asked, ...]

    @property
    def place(self) -> str:
        """The run's folder inside a sweep's."""
        return f"runs/{self.config.name}-{self.key}"


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
    lacked_memory: bool = False
    """A device's memory was too small, for this run or for all that shared it."""


Event = Progress | Done | Failed
Tell = Callable[[Progress], None]


def collect(jobs: list[tuple[str, Job]]) -> list[Work]:
    """Jobs of several figures as work: equal runs are one."""
    together: dict[str, tuple[Job, list[Asked]]] = {}
    for figure, job in jobs:
        _, asked = together.setdefault(job.key, (job, []))
        asked.append(Asked(figure, job.name, dict(job.tags)))
    return [
        Work(key, job.config, job.train, tuple(asked)) for key, (job, asked) in together.items()
    ]


def attempt(work: Work, folder: Path, tell: Tell) -> Done | Failed:
    """`perform`; whatever goes wrong is an answer, and its traceback is beside the run's folder.

    Raises:
        Interrupted: the run was asked to stop, and is saved.
    """
    place = folder / work.place
    trace = place.with_name(place.name + ".error.txt")
    try:
        done = Done(work.key, perform(work, folder, tell))
        trace.unlink(missing_ok=True)  # of an earlier attempt
        return done
    except Interrupted:
        raise
    except Exception as error:
        line = printable((str(error).splitlines() or [""])[0])
        message = f"{type(error).__name__}: {line}{_kept(trace, folder, traceback.format_exc())}"
        return Failed(work.key, message, _lacks_memory(error))
    finally:
        _let_go()


def _kept(trace: Path, folder: Path, text: str) -> str:
    """Write a traceback beside the run's folder; where it is, or nothing if that cannot be."""
    try:
        refuse_links(trace, folder)
        write_atomic(trace, text.encode(errors="replace"))
    except (OSError, MemtrainError):
        return ""
    return f" (see {trace})"


def _lacks_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, DeviceMemoryError | torch.OutOfMemoryError)


def _let_go() -> None:
    """Free a run's memory for the next one: its models and graphs know each other in circles."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def perform(work: Work, folder: Path, tell: Tell) -> list[Result]:
    """Train from where the run stands, then measure for every figure that asked."""
    place = folder / work.place
    refuse_links(place, folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    stored = read_setup(folder)
    config = located(work.config, stored.root if stored else ROOT, folder)
    lock = place.with_name(place.name + ".lock")
    with locked(lock, f"{place}: another process trains it", wait=True):
        run, diverged = _trained(work, config, place, tell)
        curve = [_point(record) for record in run.metrics.read() if "evaluation" in record]
        cost = {name.removeprefix("total_"): value for name, value in run.totals().items()}
        figures = {asked.figure: load(asked.figure) for asked in work.asked}
        measured = {name: figure.measure(run) for name, figure in figures.items()}
        return [
            Result(
                figure=asked.figure,
                version=figures[asked.figure].version,
                job=asked.job,
                key=work.key,
                tags=asked.tags,
                measured=measured[asked.figure],
                cost=cost,
                curve=curve,
                diverged=diverged,
            )
            for asked in work.asked
        ]


def _trained(work: Work, config: RunConfig, place: Path, tell: Tell) -> tuple[Any, str]:
    from memtrain.training.console import Reporter
    from memtrain.training.run import Run

    class Teller(Reporter):
        def stage(self, name: str, step: int, steps: int) -> None:
            self.name, self.steps = name, steps
            tell(Progress(work.key, name, step, steps))

        def advance(self, step: int, metrics: dict[str, float]) -> None:
            tell(Progress(work.key, self.name, step, self.steps))

    if not work.train:
        return Run(config, place), ""
    # Killed before its first checkpoint, a run has nothing worth keeping.
    if (place / "checkpoints").is_dir():
        run = _opened(config, place)
    else:
        run = Run.create(config, place, overwrite=True)
    try:
        return run.train(Teller()), ""
    except DivergedError as error:
        return _opened(config, place), str(error)


def _opened(config: RunConfig, place: Path) -> Any:
    """The run in a folder, if it is this one: what is imported is what the figure itself names."""
    from memtrain.config.serialize import to_json
    from memtrain.training.run import Run
    from memtrain.training.run_folder import read_folder

    found = read_folder(place)
    if isinstance(found.data, Stream) and isinstance(config.data, Stream):
        moved = replace(found, data=replace(found.data, path=config.data.path))
        if moved == config != found:  # the sweep's folder lies elsewhere now
            refuse_links(place / "config.json", place)
            write_atomic(place / "config.json", to_json(config).encode())
            found = moved
    if found != config:
        raise MemtrainError(f"{place}: config.json is not that of the job; remove the folder")
    return Run.open(place, allow_code=True)


def _point(record: dict[str, Any]) -> dict[str, Any]:
    """One evaluation along a run, without its long lists."""
    found = record["evaluation"]
    point = {key: record["total_" + key] for key in ("steps", "tokens", "sequential_ops")}
    point |= {"seconds": record["total_seconds"], "stage": record["stage"]}
    point |= {"rnn_nats": found["rnn"]["nats"], "rnn_accuracy": found["rnn"]["accuracy"]}
    if found["teacher"] is not None:
        point["teacher_nats"] = found["teacher"]["nats"]
        point["teacher_accuracy"] = found["teacher"]["accuracy"]
    return point
