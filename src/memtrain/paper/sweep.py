"""Run many jobs, each exactly once, across crashes and restarts.

FOLDER/results.jsonl   one line per finished job
       runs/           the run folders; equal runs of several figures share one
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from memtrain.config import RunConfig
from memtrain.config.stages import STREAM_ROLLOUT
from memtrain.data.synthetic import TASKS
from memtrain.errors import printable
from memtrain.files import locked
from memtrain.paper.base import Experiment, Job, Result
from memtrain.paper.job import Done, Event, Failed, Progress, Work, collect
from memtrain.paper.results import ResultId, ResultsFile, id_of, job_id
from memtrain.training.console import ETA, format_time

FORWARD, BACKWARD = 1, 2
"""Relative costs of a rollout step and of its gradient."""
FigureJob = tuple[Experiment, Job]
Launch = Callable[[deque[Work]], Iterator[Event]]
More = Callable[[Mapping[ResultId, Result]], Sequence[FigureJob]]


class Swept(NamedTuple):
    """All results of a folder, and the jobs that failed, with the reason."""

    results: dict[ResultId, Result]
    failed: dict[str, str]


def sweep(
    folder: Path,
    jobs: Sequence[FigureJob],
    launch: Launch,
    *,
    more: More = lambda results: (),
    minutes: float = math.inf,
) -> Swept:
    """Run the jobs that have no result yet.

    Args:
        folder: the sweep's folder; one sweep at a time.
        jobs: figures and their jobs.
        launch: executes the queue.
        more: returns further jobs, given all results; called at the start and after each run.
        minutes: no run starts after this time; running ones finish.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "sweep.lock", f"{folder}: another sweep is at work there; wait for it"):
        return _Sweep(ResultsFile(folder), more).run(jobs, launch, minutes)


class _Sweep:
    """The state of a sweep: finished, queued and running jobs."""

    def __init__(self, file: ResultsFile, more: More) -> None:
        self.file, self.more = file, more
        file.repair()
        self.done = file.by_id()
        self.measured = {key[:3]: result for key, result in self.done.items()}
        """Results regardless of the job's name."""
        self.queue: deque[Work] = deque()
        self.works: dict[str, Work] = {}
        """Everything queued or running."""
        self.later: list[FigureJob] = []
        """Jobs whose run is in progress for others: they measure it afterwards."""
        self.waiting: dict[str, list[Work]] = {}
        """Runs by the key of the run that they start from, until that is trained."""
        self.failed: dict[str, str] = {}
        self.view = View(self.works)

    def run(self, jobs: Sequence[FigureJob], launch: Launch, minutes: float) -> Swept:
        ends = time.monotonic() + 60 * minutes
        self.add([*jobs, *self.more(self.done)])
        if minutes <= 0:
            self.queue.clear()
        with self.view:
            for event in launch(self.queue) if self.queue else ():
                self.handle(event)
                if time.monotonic() > ends:
                    self.queue.clear()
        return Swept(self.done, self.failed)

    def add(self, jobs: Sequence[FigureJob]) -> None:
        """Queue the jobs without a result."""
        missing = self._missing(jobs)
        self.view.expect(len(jobs), len(jobs) - len(missing))
        self._enqueue(missing)

    def _missing(self, jobs: Sequence[FigureJob]) -> list[FigureJob]:
        """The jobs without a result; a run that a figure measured under another name is copied."""
        missing = []
        for figure, job in jobs:
            key = job_id(figure, job)
            twin = self.measured.get(key[:3])
            if twin is None:
                missing.append((figure, job))
            elif key not in self.done:
                self._save(replace(twin, job=job.name, tags=dict(job.tags)))
        return missing

    def _save(self, result: Result) -> None:
        self.file.append(result)
        self.done[id_of(result)] = result
        self.measured[id_of(result)[:3]] = result

    def _enqueue(self, jobs: Sequence[FigureJob]) -> None:
        """Queue jobs, most urgent first."""
        self.later += [(figure, job) for figure, job in jobs if job.key in self.works]
        new = collect((figure, job) for figure, job in jobs if job.key not in self.works)
        self.works |= {work.key: work for work in new}
        starts = {}
        for work in new:
            if work.start is not None:
                self.waiting.setdefault(work.start.key, []).append(work)
                if work.start.key not in self.works:  # even if trained: its weights may be gone
                    starts.setdefault(work.start.key, work.start)
        self.works |= starts
        self._put_in_queue([*(work for work in new if work.start is None), *starts.values()])

    def _put_in_queue(self, works: Sequence[Work]) -> None:
        ordered = sorted([*self.queue, *works], key=urgency, reverse=True)
        self.queue.clear()
        self.queue.extend(ordered)

    def handle(self, event: Event) -> None:
        self.view.show(event)
        if isinstance(event, Progress):
            return
        work = self.works.pop(event.key)
        waiting = self.waiting.pop(event.key, [])
        if isinstance(event, Failed):
            self.failed[work.name] = event.message
            for one in waiting:
                message = f"{work.title}, from which it starts, failed"
                self.view.show(Failed(one.key, message))
                del self.works[one.key]
                self.failed[one.name] = message
        else:
            for result in event.results:
                if id_of(result) not in self.done:
                    self._save(result)
            self._put_in_queue(waiting)
        later, self.later = self.later, []
        missing = self._missing(later)
        self.view.expect(0, len(later) - len(missing))
        self._enqueue(missing)
        self.add(self.more(self.done))


def results_of(
    results: Mapping[ResultId, Result], figure: Experiment, jobs: Iterable[Job]
) -> list[Result]:
    """The available results of a figure's jobs, in the jobs' order, with the jobs' own tags."""
    pairs = [(results.get(job_id(figure, job)), job) for job in jobs]
    return [replace(found, tags=dict(job.tags)) for found, job in pairs if found is not None]


# ---------------------------------------------------------------------------------------- order


def urgency(work: Work) -> tuple[bool, int, int]:
    """Sort key of the queue: runs that follow-ups wait for, then the lowest rank, then the longest.

    A long run that starts last would finish alone while other processes are idle.
    """
    cost = rough_cost(work.config) if work.train else 0
    done = rough_cost(work.start.config) if work.start else 0
    return work.awaited, -work.rank, cost - done


def rough_cost(config: RunConfig) -> int:
    """Roughly the number of layers that a run evaluates in sequence: the time of a small model."""
    kind = type(config.data)
    own = TASKS[kind](config.data).sequence_length if kind in TASKS else 0
    stacked = {"gru": config.cell.memory_tokens, "lstm": config.cell.memory_tokens // 2}
    cell = stacked.get(config.cell.kind, config.cell.layers)
    teacher = config.teacher.encoder_layers + config.teacher.decoder_layers
    rollout = own or config.dmt.rollout_length or STREAM_ROLLOUT
    through = rollout if config.dmt.through_time else min(config.dmt.segment, rollout)
    pretrain = (FORWARD + BACKWARD) * teacher
    smt = pretrain + (FORWARD + BACKWARD) * cell
    dmt = FORWARD * (teacher + cell * rollout) + BACKWARD * cell * through
    bptt = (FORWARD + BACKWARD) * cell * (own or config.bptt.sequence_length)
    of_teacher, of_smt = config.pretrain.steps * pretrain, config.smt.steps * smt
    return of_teacher + of_smt + config.dmt.steps * dmt + config.bptt.steps * bptt


# ------------------------------------------------------------------------------------- progress


class View:
    """Shows a sweep's progress on stderr: bars in a terminal, plain lines elsewhere.

    Use it as a context.
    """

    def __init__(self, works: Mapping[str, Work], *, seconds: float = 10.0) -> None:
        self.total = self.done = self.first = self.failed = 0
        self.works = works
        self.active: dict[str, Progress] = {}
        self.resumed: dict[str, float] = {}
        """The fraction of each run that was done when it started here."""
        self.eta = ETA(0, 0)
        """Counts thousandths of a job."""
        self.console = Console(stderr=True, highlight=False)
        self.bars = None
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self.bars = Bars(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self.console,
            )
        self.rows: dict[str, TaskID] = {}
        self.stage_etas: dict[tuple[str, str], ETA] = {}
        self.seconds, self.printed = seconds, time.monotonic()

    def expect(self, jobs: int, done: int) -> None:
        """Add jobs, some of which may be done already."""
        self.total += jobs
        self.done += done
        self.first += done

    def __enter__(self) -> "View":
        if self.bars:
            self.bars.start()
            self.overall = self.bars.add_task(
                "jobs", total=self.total, completed=self.done, left=""
            )
        elif self.works:
            self._print(f"{self.done} of {self.total} jobs done, {len(self.works)} runs to go")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()

    def show(self, event: Event) -> None:
        work = self.works[event.key]
        if isinstance(event, Progress):
            self.active[event.key] = event
            self.resumed.setdefault(event.key, self._fraction(event))
        else:
            self.active.pop(event.key, None)
            self.done += len(work.requests) * isinstance(event, Done)
            self.failed += len(work.requests) * isinstance(event, Failed)
        if isinstance(event, Failed):
            self._print(printable(f"failed: {work.title}: {event.message}"))
        left = self._time_left()
        if self.bars:
            self.bars.update(self.overall, total=self.total, completed=self.done, left=left)
            self._update_row(self.bars, event, work)
        elif time.monotonic() - self.printed > self.seconds:
            self.printed = time.monotonic()
            now = "; ".join(
                f"{self.works[key].title} {at.stage} {at.step}/{at.steps}"
                for key, at in list(self.active.items())[:4]
            )
            self._print(f"{self.done}/{self.total} jobs  {left}  {now}")

    def _time_left(self) -> str:
        """The time left, from what this command has done so far, parts of runs included."""
        running = sum(map(self._fraction, self.active.values()))
        new = self.done - self.first + running - sum(self.resumed.values())
        remaining = self.total - self.done - self.failed - running
        self.eta.steps = round(1000 * (new + remaining))
        return _left(self.eta, round(1000 * new))

    def _fraction(self, at: Progress) -> float:
        """The fraction of its run's steps that is done."""
        steps = {name: stage.steps for name, stage in self.works[at.key].config.stages().items()}
        names = list(steps)
        before = sum(steps[name] for name in names[: names.index(at.stage)])
        return (before + at.step) / sum(steps.values())

    def _update_row(self, bars: Bars, event: Event, work: Work) -> None:
        if isinstance(event, Progress):
            if event.key not in self.rows:
                self.rows[event.key] = bars.add_task("", left="")
            title = escape(printable(f"  {work.title} {event.stage}"))
            eta = self.stage_etas.setdefault((event.key, event.stage), ETA(event.step, event.steps))
            bars.update(
                self.rows[event.key],
                description=title,
                completed=event.step,
                total=event.steps,
                left=_left(eta, event.step),
            )
        elif event.key in self.rows:
            bars.remove_task(self.rows.pop(event.key))

    def _print(self, message: str) -> None:
        self.console.print(message, soft_wrap=True, markup=False)


def _left(eta: ETA, step: int) -> str:
    forecast = eta.at(step)
    return f"left {format_time(forecast.left) if forecast.rate > 0 else '?'}"
