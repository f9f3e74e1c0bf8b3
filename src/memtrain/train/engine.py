"""How a step runs: device, precision, compilation, threads."""

from contextlib import AbstractContextManager, nullcontext

import torch

from memtrain.config import EngineConfig
from memtrain.errors import MemtrainError
from memtrain.objectives.objective import Objective


class Engine:
    """Turns an EngineConfig into what the trainer needs of the machine."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self.bf16 = config.precision == "bf16" or (
            config.precision == "auto" and self.device.type == "cuda"
        )
        if config.threads:
            torch.set_num_threads(config.threads)

    @property
    def synchronous(self) -> bool:
        """Whether reading a number off the device costs nothing."""
        return self.device.type == "cpu"

    def autocast(self) -> AbstractContextManager:
        """The precision of the forward pass; weights and optimizer stay in fp32."""
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def prepare(self, objective: Objective) -> Objective:
        """The objective as it will be called, compiled if asked for."""
        if self.config.compile:
            objective.compile()
        return objective

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)


def pick_device(name: str) -> torch.device:
    """The device a config names, if this machine has it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MemtrainError(f"device={name}: torch sees no CUDA device here; use cpu or auto")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise MemtrainError("device=mps: torch sees no Apple GPU here; use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MemtrainError(f"device={name}: this machine has {torch.cuda.device_count()} GPUs")
    return device
