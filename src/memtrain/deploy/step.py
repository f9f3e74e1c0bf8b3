"""One step of a network, (memory, token) -> (logits, next memory), traced for other programs."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.fx import GraphModule

from memtrain import __version__
from memtrain.config import CELLS
from memtrain.errors import MemtrainError, describe_error
from memtrain.generation.pretrained import Pretrained
from memtrain.models.check_cell import memory_shape, sample_token
from memtrain.models.rnn import RNN
from memtrain.shapes import Space, Token, Values

INPUTS, OUTPUTS = ("memory", "token"), ("logits", "next_memory")
"""Names in an exported file."""
STEP_VERSION = "1"
TOLERANCE = 1e-4
"""The largest difference of a number between an exported step and the network's own."""
CHECKED_STEPS, CHECKED_ROWS = 64, (1, 3)
"""Steps from the empty memory with which a written file is checked, and the batch sizes."""

RunStep = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""An exported step: from a memory and a token per row to logits and the next memory."""


class Step(nn.Module):
    """One step of a network without its checks of arguments, which cannot be traced."""

    def __init__(self, rnn: RNN) -> None:
        super().__init__()
        self.cell, self.readout = rnn.cell, rnn.readout

    def forward(
        self, memory: Float[Tensor, "B M D"], token: Token
    ) -> tuple[Float[Tensor, "B V"], Float[Tensor, "B M D"]]:
        memory = self.cell(memory, token)
        return self.readout(memory)[:, 0], memory


def trace(model: Pretrained) -> torch.export.ExportedProgram:
    """Trace one step by `torch.export`, for any batch size.

    Raises:
        MemtrainError: the cell does something that cannot be traced.
    """
    batch = torch.export.Dim("batch")
    example = (model.empty_memory(2), sample_token(model.space, 2, torch.Generator()))
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(
                Step(model).eval(), example, dynamic_shapes=({0: batch}, {0: batch})
            )
    except Exception as error:  # torch has no common class of these, and a user's cell any error
        raise MemtrainError(
            f"{model.name}: torch.export cannot trace its cell, "
            f"{type(model.cell).__name__}{_whose(model)} ({describe_error(error)})"
        ) from error
    for part in program.graph_module.modules():  # else the file names paths of this machine
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _whose(model: Pretrained) -> str:
    if model.config.cell.kind in CELLS:
        return ""
    return "; a step must be tensor operations without Python branches on their values"


def describe_step(model: Pretrained) -> dict[str, str]:
    """What a program needs to know of an exported step, as text: JSON but for format and name."""
    space = model.space
    card: dict[str, object] = {
        "memtrain": __version__,
        "memory_shape": list(memory_shape(model.cell)),
        "parameters": sum(value.numel() for value in model.state_dict().values()),
    }
    if isinstance(space, Values):
        card["values"] = asdict(space)
    else:
        card["vocab_size"] = space
    if model.series is not None:
        card["series"] = asdict(model.series)
    if (codec := model.spelling) is not None:
        card |= {"start_token": codec.start_token, "codec": asdict(codec)}
    plain = {"format": "memtrain-step", "version": STEP_VERSION, "name": model.name}
    return plain | {name: json.dumps(value) for name, value in card.items()}


def check_step(model: Pretrained, step: RunStep, what: str) -> float:
    """Compare an exported step with the network on random tokens, each following its own memory.

    Args:
        model: the network.
        step: the exported step.
        what: the file, for the error.

    Returns:
        The largest difference of a logit or a number of the memory.

    Raises:
        MemtrainError: they differ by more than `TOLERANCE`.
    """
    largest = 0.0
    for rows in CHECKED_ROWS:
        generator = torch.Generator().manual_seed(rows)
        expected = model.empty_memory(rows)
        memory = expected.numpy()
        for number in range(CHECKED_STEPS):
            token = sample_token(model.space, rows, generator)
            with torch.no_grad():
                wanted, expected = model.step(expected, token)
            logits, memory = step(memory, token.numpy())
            for one, other in ((wanted, logits), (expected, memory)):
                found = _difference(one, other)
                if not found <= TOLERANCE:  # also NaN
                    raise MemtrainError(
                        f"{what}: not written: after {number + 1} steps its numbers differ from "
                        f"the network's by {found:.1e}, more than {TOLERANCE:.0e}"
                    )
                largest = max(largest, found)
    return largest


def _difference(expected: Tensor, found: np.ndarray) -> float:
    """The largest difference, relative to the largest number where that is above 1."""
    if tuple(expected.shape) != found.shape:
        return float("inf")
    wanted = expected.numpy()
    return float(np.abs(wanted - found).max() / max(1.0, np.abs(wanted).max()))


def signature(model: Pretrained) -> str:
    """Inputs and outputs of a step, in words."""
    tokens, dim = memory_shape(model.cell)
    return f"({', '.join(INPUTS)}) -> ({', '.join(OUTPUTS)}), memory {tokens} x {dim}"


def token_type(space: Space) -> type[np.generic]:
    """The type of a step's second input: whole numbers, or floats if it reads numbers."""
    return np.float32 if isinstance(space, Values) else np.int64


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and the log of torch's exporters, which are about their own code."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
