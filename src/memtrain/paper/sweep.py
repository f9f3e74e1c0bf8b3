"""A sweep: many runs, each once, whatever happens in between.

FOLDER/results.jsonl   a line a finished job, never two of one
       runs/           the run folders; equal runs of several figures are one
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from memtrain.config import RunConfig
from memtrain.config.stages import STREAM_ROLLOUT
from memtrain.data.synthetic import TASKS
from memtrain.errors import MemtrainError, printable
from memtrain.files import locked
from memtrain.paper import load
from memtrain.paper.base import Job, Result
from memtrain.paper.job import Done, Event, Failed, Progress, Work, collect
from memtrain.paper.results import ResultsFile

Place = tuple[str, int, str, str]
Launch = Callable[[deque[Work]], Iterator[Event]]
More = Callable[[Mapping[Place, Result]], Sequence[tuple[str, Job]]]


def sweep(
    folder: Path,
    jobs: Sequence[tuple[str, Job]],
    launch: Launch,
    *,
    more: More = lambda results: (),
    minutes: float = math.inf,
) -> dict[str, str]:
    """Run the jobs that have no result yet; returns what failed, with the reason.

    Args:
        folder: the sweep's folder; one sweep at a time.
        jobs: (figure, job) pairs.
        launch: where runs happen.
        more: the jobs that are due now, given all results by their place (`place_of`); asked at
            the beginning and after each run.
        minutes: after that many no run is begun; those at work are finished.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "sweep.lock", f"{folder}: another sweep is at work there; wait for it"):
        return _Sweep(ResultsFile(folder), more).run(jobs, launch, minutes)


class _Sweep:
    """A sweep at work: what is done, what waits, what is being done."""

    def __init__(self, file: ResultsFile, more: More) -> None:
        self.file, self.more = file, more
        file.mend()
        self.done = {_identity(result): result for result in file.read()}
        self.measured = {place[:3]: result for place, result in self.done.items()}
        self.queue: deque[Work] = deque()
        self.works: dict[str, Work] = {}
        """All that waits or is being done."""
        self.later: list[tuple[str, Job]] = []
        """Jobs whose run is being done for others: they measure it afterwards."""
        self.failed: dict[str, str] = {}
        self.view = View(self.works)

    def run(
        self, jobs: Sequence[tuple[str, Job]], launch: Launch, minutes: float
    ) -> dict[str, str]:
        ends = time.monotonic() + 60 * minutes
        self.add([*jobs, *self.more(self.done)])
        if minutes <= 0:
            self.queue.clear()
        with self.view:
            for event in launch(self.queue) if self.queue else ():
                self.take(event)
                if time.monotonic() > ends:
                    self.queue.clear()
        return self.failed

    def add(self, jobs: Sequence[tuple[str, Job]]) -> None:
        """Queue what has no result."""
        missing = self._missing(jobs)
        self.view.expect(len(jobs), len(jobs) - len(missing))
        self._queue(missing)

    def _missing(self, jobs: Sequence[tuple[str, Job]]) -> list[tuple[str, Job]]:
        """Those without a result. What a figure measured under another name need not be again."""
        missing = []
        for figure, job in jobs:
            place = place_of(figure, job)
            twin = self.measured.get(place[:3])
            if twin is None:
                missing.append((figure, job))
            elif place not in self.done:
                self._note(replace(twin, job=job.name, tags=dict(job.tags)))
        return missing

    def _note(self, result: Result) -> None:
        self.file.append(result)
        self.done[_identity(result)] = result
        self.measured[_identity(result)[:3]] = result

    def _queue(self, jobs: Sequence[tuple[str, Job]]) -> None:
        """The most urgent run is the next to begin."""
        self.later += [(figure, job) for figure, job in jobs if job.key in self.works]
        new = collect([(figure, job) for figure, job in jobs if job.key not in self.works])
        self.works |= {work.key: work for work in new}
        waiting = sorted([*self.queue, *new], key=urgency, reverse=True)
        self.queue.clear()
        self.queue.extend(waiting)

    def take(self, event: Event) -> None:
        self.view.show(event)
        if isinstance(event, Progress):
            return
        work = self.works.pop(event.key)
        if isinstance(event, Failed):
            self.failed[work.asked[0].job] = event.message
        else:
            for result in event.results:
                if _identity(result) not in self.done:
                    self._note(result)
        later, self.later = self.later, []
        missing = self._missing(later)
        self.view.expect(0, len(later) - len(missing))
        self._queue(missing)
        self.add(self.more(self.done))


def _identity(result: Result) -> Place:
    return result.figure, result.version, result.key, result.job


def place_of(figure: str, job: Job) -> Place:
    """By which a job's result is known."""
    from memtrain.paper import load

    return figure, load(figure).version, job.key, job.name


def results_of(folder: Path, jobs: Iterable[tuple[str, Job]]) -> list[Result]:
    """The results of these jobs, as far as there are any, in the jobs' order.

    Tags are the jobs' own: a name tells them apart, whatever the file says.
    """
    found = {_identity(result): result for result in ResultsFile(folder).read()}
    places = [(place_of(figure, job), job) for figure, job in jobs]
    return [replace(found[place], tags=dict(job.tags)) for place, job in places if place in found]


def results_frame(folder: Path | str) -> Any:
    """All results of a folder as a pandas DataFrame: a row a job, tags and numbers as columns."""
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MemtrainError("a DataFrame needs pandas: pip install pandas") from None
    rows = []
    for result in ResultsFile(Path(folder)).read():
        numbers = {
            name: value
            for name, value in result.measured.items()
            if isinstance(value, int | float | str)
        }
        costs = {f"cost_{name}": value for name, value in result.cost.items()}
        rows.append({"figure": result.figure, "key": result.key, **result.tags, **numbers, **costs})
    return pandas.DataFrame(rows)


FORTH, BACK = 1, 2
"""What a step of a rollout costs, and what its gradient costs beside it."""


def urgency(work: Work) -> tuple[bool, int]:
    """The larger, the sooner: a long run that begins last keeps all others waiting at the end."""
    awaited = any(load(asked.figure).follows_up for asked in work.asked)
    return awaited, rough_cost(work.config) if work.train else 0


def rough_cost(config: RunConfig) -> int:
    """About how many layers a run goes through one after another, which is what takes time in
    small models."""
    kind = type(config.data)
    own = TASKS[kind](config.data).sequence_length if kind in TASKS else 0
    cell = config.cell.memory_tokens if config.cell.kind == "gru" else config.cell.layers
    teacher = config.teacher.encoder_layers + config.teacher.decoder_layers
    rollout = own or config.dmt.rollout_length or STREAM_ROLLOUT
    through = rollout if config.dmt.through_time else min(config.dmt.segment, rollout)
    smt = (FORTH + BACK) * (teacher + cell)
    dmt = FORTH * (teacher + cell * rollout) + BACK * cell * through
    bptt = (FORTH + BACK) * cell * (own or config.bptt.sequence_length)
    return config.smt.steps * smt + config.dmt.steps * dmt + config.bptt.steps * bptt


class View:
    """Shows events on stderr. Use it as a context."""

    def __init__(self, works: Mapping[str, Work], *, seconds: float = 10.0) -> None:
        self.total = self.done = self.first = self.failed = 0
        self.works = works
        self.active: dict[str, Progress] = {}
        self.begun: dict[str, float] = {}
        """How much of a run was done when it was first heard of."""
        self.console = Console(stderr=True, highlight=False)
        live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.bars = self._bars() if live else None
        self.lines: dict[str, int] = {}
        self.seconds, self.spoke, self.began = seconds, time.monotonic(), time.monotonic()

    def expect(self, jobs: int, done: int) -> None:
        """So many more, of which some are done already."""
        self.total += jobs
        self.done += done
        self.first += done

    def _bars(self) -> Bars:
        return Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )

    def __enter__(self) -> "View":
        if self.bars:
            self.bars.start()
            self.overall = self.bars.add_task("jobs", total=self.total, completed=self.done)
        elif self.works:
            self._say(f"{self.done} of {self.total} jobs done, {len(self.works)} runs to go")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()

    def show(self, event: Event) -> None:
        work = self.works[event.key]
        if isinstance(event, Progress):
            self.active[event.key] = event
            self.begun.setdefault(event.key, self._share(event))
        else:
            self.active.pop(event.key, None)
            self.done += len(work.asked) * isinstance(event, Done)
            self.failed += isinstance(event, Failed)
        if isinstance(event, Failed):
            self._say(printable(f"failed: {_title(work)}: {event.message}"))
        if self.bars:
            self._draw(event, work)
        elif time.monotonic() - self.spoke > self.seconds:
            self._line()

    def _say(self, message: str) -> None:
        (self.bars.console if self.bars else self.console).print(
            message, soft_wrap=True, markup=False
        )

    def _line(self) -> None:
        self.spoke = time.monotonic()
        at_work = sum(map(self._share, self.active.values()))
        new = self.done - self.first + at_work - sum(self.begun.values())
        still = self.total - self.done - self.failed - at_work
        seconds = (self.spoke - self.began) / new * still if new > 0 else None
        left = "?" if seconds is None else f"{int(seconds // 60)}:{int(seconds % 60):02d}"
        now = "; ".join(
            f"{_title(self.works[key])} {at.stage} {at.step}/{at.steps}"
            for key, at in list(self.active.items())[:4]
        )
        self._say(f"{self.done}/{self.total} jobs  left {left}  {now}")

    def _share(self, at: Progress) -> float:
        """How much of its run's steps is done, 0 to 1."""
        steps = {name: stage.steps for name, stage in self.works[at.key].config.stages().items()}
        names = list(steps)
        before = sum(steps[name] for name in names[: names.index(at.stage)])
        return (before + at.step) / sum(steps.values())

    def _draw(self, event: Event, work: Work) -> None:
        assert self.bars is not None
        self.bars.update(self.overall, total=self.total, completed=self.done)
        if isinstance(event, Progress):
            if event.key not in self.lines:
                self.lines[event.key] = self.bars.add_task("", total=event.steps)
            self.bars.update(
                self.lines[event.key],  # type: ignore[arg-type]
                description=escape(printable(f"  {_title(work)} {event.stage}")),
                completed=event.step,
                total=event.steps,
            )
        elif event.key in self.lines:
            self.bars.remove_task(self.lines.pop(event.key))  # type: ignore[arg-type]


def _title(work: Work) -> str:
    return f"{work.asked[0].figure}: {work.asked[0].job}"
