"""Write one step of a network by torch.export, checked against the network."""

import io
from pathlib import Path

import numpy as np
import torch

from memtrain.deploy.step import (
    CHECKED_STEPS,
    RunStep,
    check_step,
    describe_step,
    quiet,
    signature,
    trace,
)
from memtrain.files import write_output
from memtrain.generation.pretrained import Pretrained


def write_pt2(model: Pretrained, path: Path, options: object) -> list[str]:
    """Write the step of a network as a .pt2 file, after loading and running it.

    Returns:
        What was written and how far it differs from the network, for the console.

    Raises:
        MemtrainError: the cell cannot be traced, or the file differs.
    """
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(trace(model), buffer, extra_files=describe_step(model))
    content = buffer.getvalue()
    largest = check_step(model, torch_step(content), str(path))
    write_output(path, content)
    return [
        f"{path}: {len(content) / 2**20:.2f} MiB, {signature(model)}",
        f"checked: over {CHECKED_STEPS} steps its numbers are the network's to {largest:.1e}",
    ]


def torch_step(content: bytes) -> RunStep:
    """A step of a .pt2 file."""
    with quiet():
        module = torch.export.load(io.BytesIO(content)).module()

    def step(memory: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            logits, following = module(torch.from_numpy(memory), torch.from_numpy(token))
        return logits.numpy(), following.numpy()

    return step
