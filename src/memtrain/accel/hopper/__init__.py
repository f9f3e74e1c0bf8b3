"""Gluon kernels for NVIDIA Hopper GPUs, at the shapes where most of the time goes: a block of the
teacher's encoder, and a block of the cell or the readout when generating very many rows.

Gluon is Triton's lower-level language: memory transfers and overlap are written out instead of left
to the compiler. It changes between Triton releases, so import the modules here only where `why_off`
returns None.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

TRITON = "3.6"
"""The Triton release that these kernels are written for."""


def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device is an NVIDIA Hopper GPU."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def why_off(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return "no CUDA device"
    if not is_hopper(device):
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU"
    if find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if not triton.__version__.startswith(f"{TRITON}."):
        return f"Triton {triton.__version__}, written for {TRITON}"
    return None


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels run on these tensors: bf16, 16-byte aligned, on a supported device."""
    aligned = all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in tensors)
    return aligned and why_off(tensors[0].device) is None
