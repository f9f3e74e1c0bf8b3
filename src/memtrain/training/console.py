"""Progress on the console: a live bar in a terminal, plain lines in logs and notebooks."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from memtrain.evaluation.evaluate import Evaluation
from memtrain.training.callbacks import Callback, Metrics

SHORTEST_BAR, LONGEST_BAR = 8, 24
"""Columns of a terminal."""
LOG_WIDTH = 100
"""Columns of a line in a log or notebook."""


class Reporter(Callback):
    """The callback that shows a run's progress. This one shows nothing: it silences `Run.train`.

    To log a run elsewhere, derive from `Callback`. Derive from this class for another display: it
    gets what a line needs, also of work that is not a run, such as drawing images.
    """

    def on_stage_start(self, stage: str, step: int, steps: int) -> None:
        self.stage(stage, step, steps)

    def on_step(self, metrics: Metrics) -> None:
        if metrics.seconds_left is not None:
            self.clock(metrics.seconds_left)
        self.advance(metrics.step, metrics.losses)

    def on_evaluation(self, metrics: Metrics) -> None:
        assert metrics.evaluation is not None
        self.evaluated(metrics.step, metrics.evaluation, metrics.unit)

    def on_end(self) -> None:
        self.close()

    def stage(self, name: str, step: int, steps: int) -> None:
        """A stage starts, or continues, at a step."""

    def clock(self, left: float) -> None:
        """The stage ends after this many more seconds of training, if its steps take longer."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """A step of the stage is done."""

    def evaluated(self, step: int, evaluation: Evaluation, unit: str) -> None:
        """Held-out sequences were scored after a step; `unit` names one of their targets, and
        `evaluation.loss_name` the loss."""

    def say(self, message: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """Training has ended, or stopped."""


class Forecast(NamedTuple):
    """Steps per second, the number of steps at the end, and the seconds left."""

    rate: float
    steps: int
    left: float


class ETA:
    """Predicts the end of some work from the rate of its last minute, or of its second half if that
    is longer: a slow start, or an hour in which the machine slept, is soon forgotten.

    Args:
        step: the steps done so far.
        steps: the steps of the whole work.
    """

    def __init__(self, step: int, steps: int) -> None:
        self.steps = steps
        self.began = time.monotonic()
        self.marks = deque([(self.began, step)])
        """Times, at least a second apart, with the steps done by then."""
        self.clock: float | None = None

    def limit(self, left: float) -> None:
        """A time limit ends the work in this many seconds."""
        self.clock = left

    def at(self, step: int) -> Forecast:
        """The forecast after a step."""
        rate = self._rate(step)
        steps = max(step, self.steps)
        left = (steps - step) / max(1e-3, rate)
        if self.clock is not None and self.clock < left:
            left, steps = self.clock, min(steps, step + round(self.clock * rate))
        return Forecast(rate, steps, left)

    def _rate(self, step: int) -> float:
        """Steps per second; 0 if no time has passed."""
        now = time.monotonic()
        since = now - max(60.0, (now - self.began) / 2)
        while len(self.marks) > 1 and self.marks[1][0] <= since:
            self.marks.popleft()
        if now - self.marks[-1][0] >= 1:
            self.marks.append((now, step))
        moment, before = self.marks[0]
        return max(0, step - before) / (now - moment) if now > moment else 0.0


@dataclass
class Shown:
    """The state of a stage, formatted to fit a line."""

    name: str
    step: int
    steps: int
    pace: ETA
    forecast: Forecast | None = None
    spent: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    held_out: tuple[float, float | None, str] | None = None
    """Losses of the RNN and of its teacher, and what they are, such as nats per pixel."""

    def note(self, evaluation: Evaluation, unit: str) -> None:
        teacher = evaluation.teacher.nats if evaluation.teacher is not None else None
        self.held_out = (evaluation.rnn.nats, teacher, f"{evaluation.loss_name} per {unit}")

    def advance(self, step: int, metrics: dict[str, float]) -> Forecast:
        """Record a step; returns the forecast. (A live bar is drawn by another thread.)"""
        forecast = self.pace.at(step)
        self.spent = time.monotonic() - self.pace.began
        self.step, self.steps, self.metrics = step, forecast.steps, metrics
        self.forecast = forecast
        return forecast

    def parts(self, width: int) -> list[str]:
        """The parts of a line of at most `width` columns: step, time left and the loss always, the
        others by importance while there is room."""
        losses = [f"{key} {value:.3f}" for key, value in self.metrics.items() if "norm" not in key]
        forecast = self.forecast
        left = f"left {format_time(forecast.left) if forecast is not None else '-:--'}"
        ended = self.step >= self.steps
        line = {
            "step": f"{self.step}/{self.steps}",
            "time": f"took {format_time(self.spent)}" if ended else left,
            "rate": "",
            "loss": losses[0] if losses else "",
            "held": "",
        }
        options = [("held", words) for words in self.held_out_words()]
        options += [("rate", f"{forecast.rate:.1f} steps/s")] if forecast is not None else []
        options += [("loss", "  ".join(losses[:n])) for n in range(2, len(losses) + 1)]
        for key, words in options:
            longer = {**line, key: words}
            if len("  ".join(filter(None, longer.values()))) <= width:
                line = longer
        return [words for words in line.values() if words]

    def held_out_words(self) -> list[str]:
        """The held-out losses, from the shortest form to the longest."""
        if self.held_out is None:
            return []
        loss, teacher, measure = self.held_out
        compared = f" (teacher {teacher:.3f})" if teacher is not None else ""
        short = f"held-out {loss:.3f}"
        return [short, short + compared, f"{short} {measure}{compared}"]


class _Bar(ProgressColumn):
    """One line per stage that is never wider than the terminal."""

    max_refresh = None

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def render(self, task: Task) -> Text:
        shown: Shown = task.fields["shown"]
        width = self.console.width - 1  # some terminals wrap a line that fills them
        room = width - len(shown.name) - 1
        words = "  ".join(shown.parts(room - SHORTEST_BAR - 1))
        bar = min(LONGEST_BAR, room - len(words) - 1)
        line = Text(shown.name, style="bold", no_wrap=True, overflow="crop", end="")
        if bar >= SHORTEST_BAR:
            full = round(bar * min(1.0, shown.step / max(1, shown.steps)))
            sign = "-" if self.console.options.ascii_only else "━"
            line.append(" ").append(full * sign, "green")
            line.append((bar - full) * sign, "bright_black")
        line.append(f" {words}", "default not bold")
        return line


class TerminalReporter(Reporter):
    """A live bar per stage with time left and losses, fitted to the terminal."""

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        self.progress = Progress(
            _Bar(console), console=console, transient=transient, refresh_per_second=4
        )
        self.shown = Shown("", 0, 0, ETA(0, 0))

    def stage(self, name: str, step: int, steps: int) -> None:
        self.shown = Shown(name, step, steps, ETA(step, steps))
        self.progress.add_task(name, total=None, shown=self.shown)
        self.progress.start()

    def clock(self, left: float) -> None:
        self.shown.pace.limit(left)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        self.shown.advance(step, metrics)

    def evaluated(self, step: int, evaluation: Evaluation, unit: str) -> None:
        self.shown.note(evaluation, unit)

    def say(self, message: str) -> None:
        self.progress.console.print(message, highlight=False, markup=False)

    def close(self) -> None:
        self.progress.stop()
        for bar in self.progress.task_ids:  # else they are drawn again when training continues
            self.progress.remove_task(bar)


class LineReporter(Reporter):
    """A plain line every few seconds and per evaluation, for logs, pipes and notebooks."""

    def __init__(self, console: Console, seconds: float = 5.0) -> None:
        self.console = console
        self.seconds = seconds
        self.shown = Shown("", 0, 0, ETA(0, 0))
        self.printed_at = 0.0

    def stage(self, name: str, step: int, steps: int) -> None:
        self.shown = Shown(name, step, steps, ETA(step, steps))
        self.printed_at = time.monotonic()

    def clock(self, left: float) -> None:
        self.shown.pace.limit(left)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        forecast = self.shown.advance(step, metrics)
        if 0 <= now - self.printed_at < self.seconds and step < forecast.steps:
            return
        self.printed_at = now
        name = self.shown.name
        self.say("  ".join([name, *self.shown.parts(LOG_WIDTH - len(name) - 2)]))

    def evaluated(self, step: int, evaluation: Evaluation, unit: str) -> None:
        self.shown.note(evaluation, unit)
        self.say(f"{self.shown.name}  step {step}: {self.shown.held_out_words()[-1]}")
        self.shown.held_out = None  # has its own line

    def say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)


def make_reporter(*, transient: bool = False) -> Reporter:
    """A live bar in a terminal, else plain lines; on stderr, in a notebook in the cell's output.

    Args:
        transient: remove the bars at the end.
    """
    if _in_kernel():
        return LineReporter(Console(file=sys.stdout, force_jupyter=False), seconds=10.0)
    console = Console(stderr=True)
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not _below_notebook()
    return TerminalReporter(console, transient=transient) if live else LineReporter(console)


def _in_kernel() -> bool:
    """Whether this process is a notebook's kernel."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return getattr(find() if find else None, "kernel", None) is not None


def _below_notebook() -> bool:
    """Whether a notebook's kernel started this process (`!memtrain ...`).

    Its stderr is a terminal then, but each refresh of a live bar would be printed as a new line.
    The second rule is the environment that ipykernel sets.
    """
    environment = os.environ
    kernel = environment.get("TERM") == "xterm-color" and environment.get("GIT_PAGER") == "cat"
    return "JPY_PARENT_PID" in environment or kernel


@contextmanager
def drawing(count: int, length: int) -> Iterator[Callable[[Int64[np.ndarray, "B K"]], None]]:
    """Show the progress of `count` images of `length` tokens; yields a `listen` for `generate`.

    A terminal shows a bar, removed at the end; a log a line every few seconds.
    """
    reporter, done = make_reporter(transient=True), 0

    def listen(tokens: Int64[np.ndarray, "B K"]) -> None:
        nonlocal done
        done += tokens.shape[1]
        if done < length:
            reporter.advance(done, {})

    reporter.stage("1 picture" if count == 1 else f"{count} pictures", 0, length)
    try:
        yield listen
    finally:
        reporter.close()


def format_time(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    hours, minutes = divmod(int(seconds) // 60, 60)
    long = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{long}:{int(seconds) % 60:02d}"
