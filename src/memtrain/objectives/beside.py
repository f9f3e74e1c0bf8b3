"""Two parts of a step that do not need each other may run at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """`with objective.beside():` marks work that need not be done before `beside.join()`.

    Here it is simply done at once. What has another `lane` does not wait for it either.
    """

    @contextmanager
    def __call__(self, lane: int = 0) -> Iterator[None]:
        yield

    def join(self) -> None:
        """Wait for it."""


class SideStream(Beside):
    """A lane is a stream of its own: short kernels fill what long ones leave idle."""

    def __init__(self) -> None:
        self.lanes: dict[int, torch.cuda.Stream] = {}

    @contextmanager
    def __call__(self, lane: int = 0) -> Iterator[None]:
        stream = self.lanes.setdefault(lane, torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        for stream in self.lanes.values():
            torch.cuda.current_stream().wait_stream(stream)


INLINE = Beside()
