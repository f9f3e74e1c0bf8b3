"""Kernels that are launched before the one in front of them has ended."""

from functools import cache

import torch
from torch import Tensor

from memtrain.accel.triton_rollout import limits


def chain(weight: Tensor, rows: int, first: bool = False) -> dict[str, bool]:
    """Programmatic dependent launch: a kernel waits inside, after it has asked for its weights.

    A first one is launched after all before it have ended, since they may be what made its
    weights, and only lets the next one start early.
    """
    if rows > limits.CHAINED_ROWS or not weight.is_cuda or not _can_chain(weight.device):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": not first}


@cache
def _can_chain(device: torch.device) -> bool:
    """Hopper was the first that can."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
