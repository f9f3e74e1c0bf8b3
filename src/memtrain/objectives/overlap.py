"""Two parts of a step that do not need each other may run at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager


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


NO_OVERLAP = Overlap()
