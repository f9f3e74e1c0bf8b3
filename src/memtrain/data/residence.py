"""Where the tokens of a store are during training: on the model's device, or on disk.

Both give the same batches. Tokens on a GPU are sampled inside the CUDA graph of a step; those on
disk are read by a background thread, ahead of the steps (training/batches.py).
"""

from typing import Literal

import torch

from memtrain.data.prepare.limits import available_memory
from memtrain.errors import MemtrainError

Resident = Literal["auto", "device", "disk"]
"""The values of `data.resident`."""
GPU_SHARE = 1 / 4
"""`auto` keeps a store on a GPU up to this share of its free memory."""
CPU_SHARE, CPU_BYTES = 1 / 16, 2**30
"""`auto` keeps a store in the CPU's memory up to this share of what is free, and up to 1 GiB: the
system's page cache serves a larger one as fast, and gives way when memory is short."""


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device, as far as known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def auto_limit(device: torch.device) -> int:
    """The bytes of tokens that `auto` keeps on a device at most."""
    if device.type == "cuda":
        return int(GPU_SHARE * free_memory(device))
    return min(CPU_BYTES, int(CPU_SHARE * free_memory(device)))


def stays_on_disk(nbytes: int, resident: Resident, device: torch.device) -> bool:
    """Whether tokens of this size are read from disk during training.

    Raises:
        MemtrainError: they shall be on the device, which has no room.
    """
    if resident == "device" and nbytes > (free := free_memory(device)):
        raise MemtrainError(
            f"data.resident=device: the tokens have {gigabytes(nbytes)}, {device} has "
            f"{gigabytes(free)} free; leave it at auto, or take disk"
        )
    return resident == "disk" or (resident == "auto" and nbytes > auto_limit(device))


def gigabytes(nbytes: int) -> str:
    """A size in words, such as 2.79 GiB."""
    unit, size = next(
        (unit, size)
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
        if nbytes >= size or size == 1
    )
    return f"{nbytes / size:.3g} {unit}"
