"""Shared by all kernels: GELU, the launch of large matrix products, and compiling ahead of time."""

import os
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.accel import hopper

DESCRIPTORS: tuple[type, ...] = (TensorDescriptor,)
try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
except ImportError:  # a Triton release whose Gluon is not used
    pass
else:
    DESCRIPTORS += (GluonDescriptor,)

HIDE = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether to pass loop bounds at run time. Triton 3.6 unrolls a loop of one iteration and then
reads beyond shared memory, so the compiler must not know the bound; the interpreter has to."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_DENSITY_AT_ZERO = tl.constexpr(-1.3257480647361595)


@triton.jit
def _tail(distance):
    """The normal distribution's mass beyond a distance d >= 0, that is erfc(d / sqrt(2)) / 2.

    2^p(d) with a polynomial p that is minimax-fitted to the result times max(1, d). The maximum
    error of GELU is 8e-7 (torch in fp32: 1e-6, for large x), at a quarter of erf's instructions.
    """
    p = -0.000500261027 * distance + 0.00728238747
    p = p * distance - 0.0523432605
    p = p * distance - 0.459414065
    p = p * distance - 1.151052
    p = p * distance - 1.0000019
    return tl.exp2(p)


@triton.jit
def gelu(x):
    distance = tl.abs(x)
    return tl.maximum(x, 0.0) - distance * _tail(distance)


@triton.jit
def gelu_slope(x):
    tail = _tail(tl.abs(x))
    density = tl.exp2((-0.5 * LOG2_E) * (x * x) + LOG2_DENSITY_AT_ZERO)
    return tl.where(x < 0.0, tail, 1.0 - tail) + x * density


# ---------------------------------------------------------------------------------------- launch


def processors(device: torch.device) -> int:
    """The number of multiprocessors; 2 in the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


class MatmulLaunch:
    """Grid and constants of an (R, I) by (I, O) product in tiles of BR x BO, summed in steps of
    BI."""

    def __init__(self, x: Tensor, outer: int, tile: dict[str, int]) -> None:
        self.rows, self.inner = x.shape
        self.outer = outer
        self.BR, self.BI, self.BO = tile["BR"], tile["BI"], tile["BO"]
        self.row_tiles = triton.cdiv(self.rows, self.BR)
        self.column_tiles = triton.cdiv(outer, self.BO)
        self.grid = (self.row_tiles * self.column_tiles,)
        self.constants = {"INNER": self.inner, "OUTER": outer, **tile}


def hopper_serves_matmul(x: Tensor, weight: Tensor, columns: int) -> bool:
    """Whether `hopper.linear` can multiply x, (R, I), in groups of `columns` output columns: it
    expects many rows of the paper's width."""
    contiguous = x.is_contiguous() and weight.is_contiguous()
    large = x.shape[0] > 4096 and x.shape[1] == 256 and columns % 256 == 0
    return large and contiguous and hopper.serves(x, weight)


# ------------------------------------------------------------------------------------ precompile


@contextmanager
def precompile(kernels: type = JITFunction, *, wait: bool = False) -> Iterator[None]:
    """Compile all kernels called inside in background threads, instead of launching them.

    Results computed inside are meaningless. Compilation continues after the context ends, unless
    `wait`; Triton's compiler releases Python's lock.
    """
    cuda = torch.cuda.is_available()
    pool = ThreadPoolExecutor(
        os.cpu_count(),
        initializer=torch.cuda.set_device if cuda else None,
        initargs=(torch.cuda.current_device(),) if cuda else (),
    )
    launch = kernels.run  # type: ignore[attr-defined]
    seen: set[Hashable] = set()

    def run(self, *args, grid, warmup, **options):
        key = (id(self), *map(_kind, args), *((name, _kind(v)) for name, v in options.items()))
        if key not in seen:
            seen.add(key)
            pool.submit(launch, self, *args, grid=grid, warmup=True, **options)

    kernels.run = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kernels.run = launch  # type: ignore[attr-defined]
        pool.shutdown(wait)


def _kind(argument: Any) -> Hashable:
    """The properties of an argument that a compiled kernel may depend on."""
    if isinstance(argument, DESCRIPTORS):
        return _kind(argument.base), tuple(argument.block_shape)
    if isinstance(argument, Tensor):
        return argument.dtype, argument.shape, argument.stride(), argument.data_ptr() % 16
    return argument
