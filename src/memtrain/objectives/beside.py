"""Two parts of a step that do not need each other may run at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """`with objective.beside():` marks work that need not be done before `beside.join()`.

    Here it is simply done at once.
    """

    @contextmanager
    def __call__(self) -> Iterator[None]:
        yield

    def join(self) -> None:
        """Wait for it."""


class SideStream(Beside):
    """The work goes to a stream of its own: short kernels fill what long ones leave idle."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


INLINE = Beside()
