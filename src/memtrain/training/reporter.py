"""What receives a run's progress, and how the time that is left is predicted."""

import time
from collections import deque
from typing import NamedTuple

from memtrain.evaluation.evaluate import Evaluation


class Reporter:
    """Receives how a run proceeds and shows nothing: the base class of all reporters.

    Derive from it to log a run elsewhere, or pass one to `Run.train` to silence it.
    """

    def stage(self, name: str, step: int, steps: int) -> None:
        """A stage begins, or continues, at a step."""

    def clock(self, left: float) -> None:
        """The stage ends after this many more seconds of training, if its steps take longer."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """A step of the stage is done; called every `log.every` steps."""

    def evaluated(self, step: int, evaluation: Evaluation, unit: str) -> None:
        """Held-out sequences were scored after a step; `unit` is what a token of them is."""

    def say(self, message: str) -> None:
        """Something a person should know."""

    def close(self) -> None:
        """Training has ended, or stopped."""


class Forecast(NamedTuple):
    """How fast a stage runs, how many steps it will have and how many seconds are left."""

    rate: float
    steps: int
    left: float


class ETA:
    """Predicts a stage's end from its last minute, or its second half if that is longer: a slow
    start, or an hour in which the machine slept, is soon forgotten."""

    def __init__(self, step: int, steps: int) -> None:
        self.steps = steps
        self.began = time.monotonic()
        self.marks = deque([(self.began, step)])
        """Moments, a second or more apart, and the steps that were done by then."""
        self.clock: float | None = None

    def limit(self, left: float) -> None:
        """The clock ends the stage in this many seconds."""
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
        """Steps per second; 0 where the clock says nothing, as after it was set back."""
        now = time.monotonic()
        since = now - max(60.0, (now - self.began) / 2)
        while len(self.marks) > 1 and self.marks[1][0] <= since:
            self.marks.popleft()
        if now - self.marks[-1][0] >= 1:
            self.marks.append((now, step))
        moment, before = self.marks[0]
        return max(0, step - before) / (now - moment) if now > moment else 0.0
