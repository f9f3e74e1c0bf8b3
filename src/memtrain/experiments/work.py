"""One run of a sweep from beginning to end, in whatever process: train, measure, answer."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrain.config import RunConfig
from memtrain.errors import DeviceMemoryError, DivergedError
from memtrain.experiments import load
from memtrain.experiments.experiment import Job, Result, Tag
from memtrain.train.stop import Interrupted


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
        trace.write_text(traceback.format_exc())
        line = (str(error).splitlines() or [""])[0]
        message = f"{type(error).__name__}: {line} (see {trace})"
        return Failed(work.key, message, _lacks_memory(error))
    finally:
        _let_go()


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
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.with_name(place.name + ".lock")):
        run, diverged = _trained(work, place, tell)
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


def _trained(work: Work, place: Path, tell: Tell) -> tuple[Any, str]:
    from memtrain.run import Run
    from memtrain.train.reporter import Reporter

    class Teller(Reporter):
        def stage(self, name: str, step: int, steps: int) -> None:
            self.name, self.steps = name, steps
            tell(Progress(work.key, name, step, steps))

        def advance(self, step: int, metrics: dict[str, float]) -> None:
            tell(Progress(work.key, self.name, step, self.steps))

    if not work.train:
        return Run(work.config, place), ""
    # Killed before its first checkpoint, a run has nothing worth keeping.
    if (place / "checkpoints").is_dir():
        run = Run.open(place, allow_code=True)
    else:
        run = Run.create(work.config, place, overwrite=True)
    try:
        return run.train(Teller()), ""
    except DivergedError as error:
        return Run.open(place, allow_code=True), str(error)


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


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a file's lock, which the system takes back if the process dies.

    Raises:
        BlockingIOError: another process holds it and `wait` is off.
    """
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
