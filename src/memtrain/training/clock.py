"""A stage's clock: how long it has trained, and how much of its time is over."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memtrain.training.distributed import Group

START_STEPS = 5
"""The first steps compile and capture. A schedule by the clock begins after them, so that they do
not use up the warm-up; the limit counts them."""
AHEAD = 4
"""Steps that the host may be ahead of a GPU when a stage goes by the clock."""


class StageClock:
    """Seconds of training; evaluation and saving are left out.

    With a limit, process 0 says how much of it is over, and all go by that. A GPU is never waited
    for until it is idle: the host waits for a step that lies a few steps back.
    """

    def __init__(self, limit: float, device: torch.device, group: Group) -> None:
        self.limit = limit
        self.seconds = 0.0
        self.start_up: float | None = None
        """Seconds that the first steps took."""
        self.over = 0.0
        """How much of the limit is over, 0 to 1, for the schedule."""
        self._group = group
        self._device = device
        self._launched: deque[torch.cuda.Event] = deque()

    def go_on(self, seconds: float, start_up: float | None, step: int) -> None:
        """Take up what a checkpoint says."""
        self.seconds, self.start_up = seconds, start_up
        self.look(step)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is done inside is training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += max(0.0, time.perf_counter() - began)

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return max(0.0, self.limit - self.seconds)

    def keep_up(self) -> None:
        """Let the host's clock be the GPU's, give or take a few steps."""
        if not self.limit or self._device.type != "cuda":
            return
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        self._launched.append(done)
        if len(self._launched) > AHEAD:
            self._launched.popleft().synchronize()

    def look(self, step: int) -> None:
        """After a step: how much of the time is over."""
        if not self.limit:
            return
        if self.start_up is None and step >= START_STEPS:
            self.start_up = self.seconds
        over = 0.0
        if self.seconds >= self.limit:
            over = 1.0
        elif self.start_up is not None:
            over = (self.seconds - self.start_up) / (self.limit - self.start_up)
        self.over = self._group.first(over)
