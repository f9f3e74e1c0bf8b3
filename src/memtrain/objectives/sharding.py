"""One batch, shared out: to several processes, or to one after another on a small device.

An objective computes the loss of its part of the batch. Where a number is a mean or a comparison
over the whole batch, it asks the part: `sum` and `gather` return what the whole batch would give,
on every part the same, while the gradient that flows back is the part's own share. The shares of
all parts add up to the gradient of the whole batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor


@runtime_checkable
class Exchange(Protocol):
    """What a part needs of the processes that share the batch."""

    rank: int
    size: int

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        ...

    def gather(self, value: Tensor) -> Tensor:
        """The values of all processes, one under another on a new first axis."""
        ...


class BatchShard:
    """All of a batch: what there is when nothing is shared out."""

    index = 0
    count = 1

    def whole(self, rows: int) -> int:
        """How many rows the whole batch has when a part has this many."""
        return rows * self.count

    def rows(self, whole: Tensor) -> Tensor:
        """This part's rows of something made for the whole batch."""
        own = len(whole) // self.count
        return whole[self.index * own : (self.index + 1) * own]

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all parts; the gradient is this part's."""
        return value

    def gather(self, value: Tensor) -> Tensor:
        """The rows of all parts, in order; the gradient is this part's."""
        return value


WHOLE = BatchShard()


@dataclass
class Notes:
    """What each part of one process said in turn, while they rehearsed."""

    said: list[list[Tensor]]
    rehearsing: bool = field(default=True)


class Share(BatchShard):
    """One of `accumulate` parts of one of several processes.

    With one part a process, processes talk as they go. With more, the parts come one after
    another, so each has to know what the later ones will say: they rehearse without gradients
    first. What is said may not depend on what was heard.
    """

    def __init__(self, group: Exchange, turn: int, notes: Notes) -> None:
        self.group = group
        self.turn = turn
        self.notes = notes
        self.turns = len(notes.said)
        self.index = group.rank * self.turns + turn
        self.count = group.size * self.turns
        self.heard = 0

    def sum(self, value: Tensor) -> Tensor:
        heard = self._exchange(value, self.group.sum)
        return _Whole.apply(value, torch.stack(heard).sum(dim=0), None)

    def gather(self, value: Tensor) -> Tensor:
        heard = self._exchange(value, self.group.gather)  # of each turn: (processes, rows, ...)
        whole = torch.stack(heard, dim=1).flatten(0, 2)
        own = slice(self.index * len(value), (self.index + 1) * len(value))
        return _Whole.apply(value, whole, own)

    def _exchange(self, value: Tensor, ask: Callable[[Tensor], Tensor]) -> list[Tensor]:
        if self.turns == 1:
            return [ask(value.detach())]
        if self.notes.rehearsing:
            self.notes.said[self.turn].append(ask(value.detach()))
            return [self.notes.said[self.turn][-1]] * self.turns  # the right shape will do
        self.heard += 1
        return [said[self.heard - 1] for said in self.notes.said]


class _Whole(torch.autograd.Function):
    """Forward: what the whole batch gives. Backward: the gradient of this part's rows."""

    @staticmethod
    def forward(ctx, value: Tensor, whole: Tensor, rows: slice | None) -> Tensor:
        ctx.rows = rows
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (gradient,) = gradients
        return gradient if ctx.rows is None else gradient[ctx.rows], None, None


def full_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are spread over processes, each put together; all processes must ask."""
    if not (dist.is_available() and dist.is_initialized()):
        return dict(named)
    from torch.distributed.tensor import DTensor

    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in named.items()
    }
