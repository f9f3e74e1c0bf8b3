"""Compile kernels all at once, before they are needed one after the other.

In a rehearsal nothing is launched: whatever would be is compiled in the background, in threads
(Triton's compiler lets go of Python's lock). What is computed is meaningless.
"""

import os
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

DESCRIPTORS: tuple[type, ...] = (TensorDescriptor,)
try:
    from triton.experimental.gluon.nvidia import hopper
except ImportError:  # another Triton, whose Gluon we do not use
    pass
else:
    DESCRIPTORS += (hopper.TensorDescriptor,)


@contextmanager
def rehearsal(kernels: type = JITFunction) -> Iterator[None]:
    """Let kernels that are called inside be compiled; they go on compiling after it ends."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    pool = ThreadPoolExecutor(
        os.cpu_count(), initializer=torch.cuda.set_device if device is not None else None,
        initargs=() if device is None else (device,),
    )  # fmt: skip
    launch = kernels.run  # type: ignore[attr-defined]
    met: set[Hashable] = set()

    def run(self, *args, grid, warmup, **options):
        key = (id(self), *map(_kind, args), *((name, _kind(v)) for name, v in options.items()))
        if key not in met:
            met.add(key)
            pool.submit(launch, self, *args, grid=grid, warmup=True, **options)

    kernels.run = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kernels.run = launch  # type: ignore[attr-defined]
        pool.shutdown(wait=False)


def _kind(argument: Any) -> Hashable:
    """What a compilation may depend on."""
    if isinstance(argument, DESCRIPTORS):
        return _kind(argument.base), tuple(argument.block_shape)
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.stride(), argument.data_ptr() % 16
    return argument
