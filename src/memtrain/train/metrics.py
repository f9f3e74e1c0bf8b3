"""What a run says while it runs: metrics.jsonl for programs, progress for people."""

import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from memtrain.errors import MemtrainError
from memtrain.files import open_append, open_regular, sync

MAX_METRICS_BYTES = 2**28
MAX_LINE_BYTES = 2**22


def _counted(record: dict) -> bool:
    """Whether it says where it belongs."""
    counters = (record.get("step"), record.get("total_steps"))
    return isinstance(record.get("stage"), str) and all(type(one) is int for one in counters)


class MetricsFile:
    """One JSON object a line, appended; cut back to a checkpoint's length on resume.

    Only a regular file is read or written, and no link is followed to write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        """Bytes of lines that were there and are gone: somebody deleted or cut the file."""
        self._end: int | None = None

    def append(self, record: dict) -> None:
        try:
            with open_append(self.path) as file:
                there = os.fstat(file.fileno()).st_size
                if self._end is not None:
                    self.lost += max(0, self._end - there)
                file.write((json.dumps(record) + "\n").encode())
                file.flush()
                self._end = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise MemtrainError(f"{self.path}: {error.strerror}; mend that, then resume") from None

    def length(self) -> int:
        """The file's length in bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> None:
        """Force all lines to disk."""
        if self.path.exists():
            sync(self.path)

    def cut(self, length: int) -> str:
        """Forget what was written after a checkpoint: it will be written again.

        Returns:
            What is wrong with the lines before, in words; nothing if all are there.
        """
        self._end = None
        if not self.path.is_symlink() and not self.path.exists():
            return f"{self.path}: is gone, {length:,} bytes of lines with it" if length else ""
        with open_append(self.path) as file:
            found = os.fstat(file.fileno()).st_size
            whole = self._last_line_end(min(found, length))
            os.ftruncate(file.fileno(), whole)
        if found == 0 and length:
            return f"{self.path}: is gone, {length:,} bytes of lines with it"
        if whole == length:
            return ""
        return f"{self.path}: {length - whole:,} bytes of lines before the checkpoint are lost"

    def _last_line_end(self, end: int) -> int:
        """Where the last line that ends before `end` does, without reading all of the file."""
        with open_regular(self.path) as file:
            while end > 0:
                begin = max(0, end - 2**16)
                file.seek(begin)
                at = file.read(end - begin).rfind(b"\n")
                if at >= 0:
                    return begin + at + 1
                end = begin
        return 0

    def read(self) -> list[dict]:
        """All whole lines; one that is being written, or was torn, is not there yet.

        Raises:
            MemtrainError: a line is not JSON, or not a line of metrics; the file is too large.
        """
        if not self.path.exists():
            return []
        records = []
        with open_regular(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_METRICS_BYTES:
                raise MemtrainError(
                    f"{self.path}: has {size:,} bytes; at most {MAX_METRICS_BYTES:,} are read"
                )
            number = 0
            while (line := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
                number += 1
                records.append(self._parsed(line, number))
        if len(line) > MAX_LINE_BYTES:
            raise MemtrainError(f"{self.path}: line {number + 1} is too long for a line of metrics")
        return records

    def _parsed(self, line: bytes, number: int) -> dict:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise MemtrainError(f"{self.path}: line {number} is not JSON") from None
        if not isinstance(record, dict) or not _counted(record):
            raise MemtrainError(f"{self.path}: line {number} has no stage or no step")
        return record


class Reporter:
    """Hears how a run goes. This one keeps it to itself; the others tell a person."""

    def stage(self, name: str, step: int, steps: int) -> None:
        """A stage begins, or goes on, at a step."""

    def clock(self, left: float) -> None:
        """The stage ends after so many more seconds of training, if its steps take longer."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """A step of the stage is done."""

    def say(self, message: str) -> None:
        """Something a person should know."""

    def close(self) -> None:
        """No more will come."""


class Forecast(NamedTuple):
    """How fast a stage goes, how many steps it will have and how many seconds are left."""

    rate: float
    steps: int
    left: float


class Pace:
    """Foretells a stage's end from its last minute, or its second half if that is longer: a start
    that took long, or an hour in which the machine slept, is soon forgotten."""

    def __init__(self, step: int, steps: int) -> None:
        self.steps = steps
        self.began = time.monotonic()
        self.marks = deque([(self.began, step)])
        """Moments, a second or more apart, and the steps that were done by then."""
        self.clock: float | None = None

    def limit(self, left: float) -> None:
        """The clock ends the stage in so many seconds."""
        self.clock = left

    def at(self, step: int) -> Forecast:
        """What is to be expected after a step."""
        rate = self._rate(step)
        steps = max(step, self.steps)
        left = (steps - step) / max(1e-3, rate)
        if self.clock is not None and self.clock < left:
            left, steps = self.clock, min(steps, step + round(self.clock * rate))
        return Forecast(rate, steps, left)

    def _rate(self, step: int) -> float:
        """Steps a second; 0 where the clock says nothing, as after it was set back."""
        now = time.monotonic()
        since = now - max(60.0, (now - self.began) / 2)
        while len(self.marks) > 1 and self.marks[1][0] <= since:
            self.marks.popleft()
        if now - self.marks[-1][0] >= 1:
            self.marks.append((now, step))
        moment, before = self.marks[0]
        return max(0, step - before) / (now - moment) if now > moment else 0.0


class TerminalReporter(Reporter):
    """A live bar a stage with rate and time left."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            TextColumn("{task.fields[metrics]}"),
            console=console,
        )
        self.bar: TaskID | None = None
        self.pace = Pace(0, 0)

    def stage(self, name: str, step: int, steps: int) -> None:
        self.progress.start()
        self.bar = self.progress.add_task(
            name, total=steps, completed=step, metrics="", rate="", left="-:--"
        )
        self.pace = Pace(step, steps)

    def clock(self, left: float) -> None:
        self.pace.limit(left)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        assert self.bar is not None
        pace = self.pace.at(step)
        self.progress.update(
            self.bar,
            total=pace.steps,
            completed=step,
            rate=f"{pace.rate:.1f}/s",
            left=_clock(pace.left),
            metrics=_brief(metrics),
        )

    def say(self, message: str) -> None:
        self.progress.console.print(message, highlight=False, markup=False)

    def close(self) -> None:
        self.progress.stop()


class LineReporter(Reporter):
    """A plain line every few seconds, for logs and pipes."""

    def __init__(self, console: Console, seconds: float = 5.0) -> None:
        self.console = console
        self.seconds = seconds
        self.name = ""
        self.pace = Pace(0, 0)
        self.spoke = 0.0

    def stage(self, name: str, step: int, steps: int) -> None:
        self.name = name
        self.pace = Pace(step, steps)
        self.spoke = time.monotonic()

    def clock(self, left: float) -> None:
        self.pace.limit(left)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        pace = self.pace.at(step)
        if 0 <= now - self.spoke < self.seconds and step < pace.steps:
            return
        self.spoke = now
        self.say(
            f"{self.name}  {step}/{pace.steps}  {pace.rate:.1f} steps/s  "
            f"left {_clock(pace.left)}  {_brief(metrics)}"
        )

    def say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)


def make_reporter() -> Reporter:
    """Progress on stderr, so that stdout stays clean for results."""
    console = Console(stderr=True)
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return TerminalReporter(console) if live else LineReporter(console)


def _clock(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    long = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{long}:{int(seconds) % 60:02d}"


def _brief(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in metrics.items() if "norm" not in name)
