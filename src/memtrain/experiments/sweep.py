"""A sweep: many runs, each once, whatever happens in between.

FOLDER/results.jsonl   a line a finished job, never two of one
       runs/           the run folders; equal runs of several figures are one
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memtrain.errors import MemtrainError
from memtrain.experiments.experiment import Job, Result
from memtrain.experiments.progress import View
from memtrain.experiments.work import Done, Event, Failed, Work, collect, locked

Launch = Callable[[Sequence[Work]], Iterator[Event]]


class ResultsFile:
    """results.jsonl: appended line by line, each forced to disk before the next."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"

    def read(self) -> list[Result]:
        """All whole lines. A last line cut short by a crash is no result."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        try:
            return [Result(**json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            raise MemtrainError(f"{self.path}: not a file of results ({error})") from None

    def append(self, result: Result) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(asdict(result)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def mend(self) -> None:
        """Cut off the line that a crash left unfinished."""
        if self.path.exists():
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)


def sweep(folder: Path, jobs: Sequence[tuple[str, Job]], launch: Launch) -> dict[str, str]:
    """Run the jobs that have no result yet; returns what failed, with the reason.

    Args:
        folder: the sweep's folder; one sweep at a time.
        jobs: (figure, job) pairs.
        launch: where runs happen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / "sweep.lock", wait=False):
            return _sweep(folder, jobs, launch)
    except BlockingIOError:
        raise MemtrainError(f"{folder}: another sweep is at work there; wait for it") from None


def _sweep(folder: Path, jobs: Sequence[tuple[str, Job]], launch: Launch) -> dict[str, str]:
    file = ResultsFile(folder)
    file.mend()
    done = {_identity(result) for result in file.read()}
    left = [(figure, job) for figure, job in jobs if _job_identity(figure, job) not in done]
    works = {work.key: work for work in collect(left)}
    failed = {}
    with View(len(jobs), len(jobs) - len(left), works) as view:
        for event in launch(list(works.values())) if works else ():
            if isinstance(event, Done):
                for result in event.results:
                    if _identity(result) not in done:
                        file.append(result)
                        done.add(_identity(result))
            elif isinstance(event, Failed):
                failed[works[event.key].asked[0].job] = event.message
            view.show(event)
    return failed


def _identity(result: Result) -> tuple:
    return result.figure, result.version, result.key, result.job


def _job_identity(figure: str, job: Job) -> tuple:
    from memtrain.experiments import load

    return figure, load(figure).version, job.key, job.name


def results_of(folder: Path, jobs: Iterable[tuple[str, Job]]) -> list[Result]:
    """The results of these jobs, as far as there are any, in the jobs' order."""
    found = {_identity(result): result for result in ResultsFile(folder).read()}
    places = [_job_identity(figure, job) for figure, job in jobs]
    return [found[place] for place in places if place in found]


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
