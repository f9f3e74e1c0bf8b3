"""Work that nothing waits for until a step ends: the gradients of weights.

On the way back through a network only the gradients of activations are waited for. What is left
to do for the weights fills the moments in which the device has room.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Immediate:
    """`put(work, reads)` is the result of work that reads those tensors."""

    def __call__(self, work: Callable[[], Tensor], reads: Sequence[Tensor]) -> Tensor:
        return work()

    def turn(self) -> None:
        """Said now and then by whoever puts something."""


IMMEDIATE = Immediate()


class DeferredGrads(Immediate):
    """Work goes to a stream beside the current one.

    What it reads is held until it is done: that memory must not be given to others before. Its
    result must not be touched before `join`; so only a step that uses each weight once can have it,
    and only what is begun while it is `allowed` asks for it (`now`).
    """

    def __init__(self) -> None:
        self._allowed = False
        self._sides: dict[int, torch.cuda.Stream] = {}
        self._reads: dict[int, list[Tensor]] = {}
        self._held: dict[int, list[tuple[Any, list[Tensor]]]] = {}

    @contextmanager
    def allowed(self) -> Iterator[None]:
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def now(self) -> Immediate:
        """This, while it is allowed."""
        return self if self._allowed else IMMEDIATE

    def __call__(self, work: Callable[[], Tensor], reads: Sequence[Tensor]) -> Tensor:
        here = torch.cuda.current_stream()
        side = self._sides.setdefault(here.cuda_stream, torch.cuda.Stream())
        side.wait_stream(here)
        with torch.cuda.stream(side):
            result = work()
        self._reads.setdefault(here.cuda_stream, []).extend(reads)
        return result

    def turn(self) -> None:
        """From here on, what was put before the last turn is done, and no longer held."""
        here = torch.cuda.current_stream()
        reads = self._reads.pop(here.cuda_stream, None)
        if reads is None:
            return
        held = self._held.setdefault(here.cuda_stream, [])
        held.append((self._sides[here.cuda_stream].record_event(), reads))
        while len(held) > 1:
            done, _ = held.pop(0)
            here.wait_event(done)

    def join(self) -> None:
        """From here on, everything is done."""
        for side in self._sides.values():
            torch.cuda.current_stream().wait_stream(side)
        self._reads.clear()
        self._held.clear()
