"""Kernels in Gluon for NVIDIA's Hopper and the shapes where most of the time goes: a block of a
teacher's encoder, and a block of the cell or the readout when very many rows are generated.

Gluon is Triton's lower language: what is brought when, and what runs beside what, is written here
and not left to a compiler. It changes from one Triton to the next, so nothing imports these modules
but what has asked `serves`. `is_hopper` needs no Triton at all.
"""

import torch
from torch import Tensor


def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device is an NVIDIA GPU of that kind."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def serves(*tensors: Tensor) -> bool:
    """Whether this is the GPU and the Triton, and tensors are of the kind, that kernels in here are
    written for. Rows are fetched in pieces that begin at 16 bytes."""
    import triton

    return (
        all(x.is_cuda and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in tensors)
        and triton.__version__.startswith("3.6.")
        and is_hopper(tensors[0].device)
    )
