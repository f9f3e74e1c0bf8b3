"""One view over all runs of a sweep: a bar and the runs at work, or plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Mapping

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

from memtrain.errors import printable
from memtrain.paper.job import Done, Event, Failed, Progress, Work


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
