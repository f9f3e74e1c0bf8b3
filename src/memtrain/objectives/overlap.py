"""Two parts of a step that do not need each other may run at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Overlap:
    """`with objective.beside():` marks work that need not be done before `beside.join()`.

    Here it is simply done at once. What is `urgent`, because it takes longest, and what is not do
    not wait for each other either.
    """

    @contextmanager
    def __call__(self, urgent: bool = False) -> Iterator[None]:
        yield

    def join(self) -> None:
        """Wait for it."""


class StreamOverlap(Overlap):
    """Streams of their own: short kernels fill what long ones leave idle, urgent ones go first."""

    def __init__(self) -> None:
        self.lanes: dict[bool, torch.cuda.Stream] = {}

    @contextmanager
    def __call__(self, urgent: bool = False) -> Iterator[None]:
        if urgent not in self.lanes:
            self.lanes[urgent] = torch.cuda.Stream(priority=-3 if urgent else 0)
        stream = self.lanes[urgent]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        for stream in self.lanes.values():
            torch.cuda.current_stream().wait_stream(stream)


NO_OVERLAP = Overlap()
