"""The learning rate of a step, by steps and by the clock, and the clock of a stage."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch

from memtrain.config import RunConfig, StageConfig
from memtrain.runs.distributed import Group
from memtrain.runs.progress import Progress

START_STEPS = 5
"""The first steps compile and capture. A schedule by the clock starts after them, so that they do
not use up the warm-up; the limit counts them."""
MAX_STEPS_AHEAD = 4
"""Steps that the host may be ahead of a GPU in a stage with a time limit."""


def learning_rate(stage: StageConfig, step: int, elapsed: float = 0.0) -> float:
    """Linear warm-up, then the stage's schedule.

    Args:
        stage: its peak, schedule and number of steps.
        step: the step to take, from 0.
        elapsed: the fraction of the time limit that is over; counts where it is ahead of the steps.
    """
    peak = stage.learning_rate
    warmup = max(1, math.ceil(stage.warmup * stage.steps))
    at = max(step, elapsed * stage.steps)
    if at < warmup:
        return min(peak, peak * (at + 1) / warmup)
    if stage.schedule == "constant":
        return peak
    falls_from = warmup
    if stage.schedule == "wsd":
        falls_from = max(warmup, stage.steps - math.ceil(stage.decay * stage.steps))
    done = min(1.0, max(0.0, (at - falls_from) / max(1, stage.steps - falls_from)))
    left = 0.5 * (1 + math.cos(math.pi * done)) if stage.schedule == "cosine" else 1 - done
    return peak * (stage.floor + (1 - stage.floor) * left)


def lengths_over(stage: StageConfig, step: int, elapsed: float = 0.0) -> int:
    """How many lengths of a stage's curriculum are over before a step.

    A time limit shortens the curriculum as it does the schedule. Arguments as of `learning_rate`.
    """
    at = max(step, elapsed * stage.steps)
    return sum(at >= end for end in accumulate(steps for _, steps in stage.curriculum))


def _elapsed(limit: float, seconds: float, start_up: float | None) -> float:
    """The fraction of a time limit that is over, for the schedule."""
    if limit and seconds >= limit:
        return 1.0
    if not limit or start_up is None:
        return 0.0
    return (seconds - start_up) / (limit - start_up)


def describe_new_schedule(old: RunConfig, new: RunConfig, progress: Progress) -> list[str]:
    """Says how the learning rate changes where a run continues with a stage of another length.

    Cosine, linear and wsd end at the last step. A longer stage has a higher rate at the same step,
    and continues with that.
    """
    if not progress.step:
        return []
    done = progress.stages[-1]
    before, after = old.stages()[done.name], new.stages()[done.name]
    rates = []
    for stage, step in ((before, min(done.steps, before.steps - 1)), (after, done.steps)):
        elapsed = _elapsed(stage.seconds, done.seconds, done.start_up_seconds)
        rates.append(learning_rate(stage, step, elapsed))
    if math.isclose(*rates, rel_tol=1e-3):
        return []
    return [
        f"{done.name}: its {after.schedule} schedule now ends at step {after.steps}; the learning "
        f"rate continues at {rates[1]:.3g}, it would have been {rates[0]:.3g}"
    ]


class StageClock:
    """The training time of a stage, without evaluations and checkpoints.

    With a limit, process 0 decides how much of it is over. The host never waits until a GPU is
    idle, only for a step a few steps back.
    """

    def __init__(self, limit: float, device: torch.device, group: Group) -> None:
        self.limit = limit
        self.seconds = 0.0
        self.start_up: float | None = None
        """Seconds of the first steps."""
        self.elapsed = 0.0
        """The fraction of the limit that is over, 0 to 1, for the schedule."""
        self._group = group
        self._device = device
        self._launched: deque[torch.cuda.Event] = deque()

    def restore(self, seconds: float, start_up: float | None, step: int) -> None:
        """Continue from a checkpoint's times."""
        self.seconds, self.start_up = seconds, start_up
        self.update(step)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside as training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += max(0.0, time.perf_counter() - began)

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return max(0.0, self.limit - self.seconds)

    def wait_for_device(self) -> None:
        """Keep the host at most a few steps ahead of the GPU, so that its clock is valid."""
        if not self.limit or self._device.type != "cuda":
            return
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        self._launched.append(done)
        if len(self._launched) > MAX_STEPS_AHEAD:
            self._launched.popleft().synchronize()

    def update(self, step: int) -> None:
        """Compute `elapsed` after a step."""
        if not self.limit:
            return
        if self.start_up is None and step >= START_STEPS:
            self.start_up = self.seconds
        self.elapsed = self._group.first(_elapsed(self.limit, self.seconds, self.start_up))
