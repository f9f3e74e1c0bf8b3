"""A stand-in on the CPU for a training step as a CUDA graph.

A graph captures the operations of one step, then repeats them on the same tensors: Python code is
not run again, and nothing may be read on the host. `RecordedStep` does the same with the
operations that reach PyTorch's dispatcher. So what a graph would get wrong (a count kept in Python,
a tensor replaced instead of overwritten, a number read on the host) goes wrong here, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain.accel.cuda_graphs import WARMUP

aten = torch.ops.aten
READ_ON_THE_HOST = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
    aten.repeat_interleave,
}
"""Operations that wait for a GPU, which a capture forbids."""


class HostRead(AssertionError):
    """A step reads numbers on the host."""


class _Recorder(TorchDispatchMode):
    """Runs operations and writes them down."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Any, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        masks = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in tree_leaves(args[1])
        )
        if func.overloadpacket in READ_ON_THE_HOST or (masks and func.overloadpacket is aten.index):
            raise HostRead(f"{func} in a step that is to be captured")
        out = func(*args, **kwargs)
        self.tape.append((func, args, kwargs, _tensors(out)))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _storages(tensors: list[Tensor]) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in tensors}


class RecordedStep:
    """Like `GraphedStep`: a few steps are taken as they are, one is recorded, the rest repeat it.

    The generator is a graph's: here operations draw from it as they are repeated.
    """

    def __init__(
        self,
        compute: Callable[[], dict[str, Tensor]],
        generator: torch.Generator,
        warm_up: Callable[[], None] | None = None,
    ) -> None:
        self.compute, self.left, self.warm_up = compute, WARMUP, warm_up
        self.tape: list[tuple[Any, tuple, dict, list[Tensor]]] | None = None
        self.metrics: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, Tensor]:
        if self.left:
            if self.left == WARMUP and self.warm_up is not None:
                self.warm_up()
            self.left -= 1
            return self.compute()
        if self.tape is None:  # unlike a capture, this computes: it is the first replay
            with _Recorder() as recorder:
                self.metrics = self.compute()
            self.tape = recorder.tape
        else:
            self._replay(self.tape)
        return self.metrics

    def _replay(self, tape: list[tuple[Any, tuple, dict, list[Tensor]]]) -> None:
        with torch.no_grad():
            for func, args, kwargs, outs in tape:
                given = _storages(_tensors((args, kwargs)))
                if func.is_view:
                    continue
                found = _tensors(func(*args, **kwargs))
                for old, new in zip(outs, found, strict=True):
                    if old.untyped_storage().data_ptr() not in given:  # not in place, no view
                        old.copy_(new)
