"""A sweep: many runs, each once, whatever happens in between.

FOLDER/results.jsonl   a line a finished job, never two of one
       runs/           the run folders; equal runs of several figures are one
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memtrain.errors import MemtrainError
from memtrain.files import locked
from memtrain.paper.base import Job, Result
from memtrain.paper.job import Event, Failed, Progress, Work, collect
from memtrain.paper.order import urgency
from memtrain.paper.progress import View
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
