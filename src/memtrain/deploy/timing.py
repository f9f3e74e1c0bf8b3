"""Time a step at batch size 1 in ONNX Runtime and in torch, with one thread and with several."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import torch

from memtrain.accel.engine import Engine
from memtrain.config import EngineConfig
from memtrain.deploy.onnx_file import onnx_step
from memtrain.deploy.step import RunStep
from memtrain.deploy.torch_export import torch_step
from memtrain.generation.pretrained import Pretrained
from memtrain.models.check_cell import sample_token

TIMED_STEPS = 64
"""Steps that are timed together, each from the memory of the one before."""
WARM_UP, ROUNDS = 2, 15
"""Every case has its turn in every round, so that other programs disturb all of them alike."""

Case = Callable[[], object]
"""Takes `TIMED_STEPS` steps."""


def time_steps(model: Pretrained, onnx: Path | None, pt2: Path | None) -> list[str]:
    """A table of microseconds per step: the median of several rounds, and the fastest, which other
    programs disturbed least.

    Args:
        model: the network, on the CPU; the fast paths of its engine are attached to it.
        onnx: an ONNX file of its step, if it is to be timed.
        pt2: a file of torch.export of its step, if it is to be timed.
    """
    threads = sorted({1, os.cpu_count() or 1})
    taken: dict[tuple[str, int], list[float]] = {}
    cases = {number: _cases(model, onnx, pt2, number) for number in threads}
    for round_number in range(WARM_UP + ROUNDS):
        for number, some in cases.items():
            with _threads(number), torch.no_grad():
                for name, case in some.items():
                    began = time.perf_counter()
                    case()
                    spent = time.perf_counter() - began
                    if round_number >= WARM_UP:
                        taken.setdefault((name, number), []).append(spent)
    heads = [f"{number} thread{'s' * (number > 1)}" for number in threads]
    lines = [_line("microseconds per step, batch 1: median (fastest)", heads)]
    for name in cases[1]:
        rounds = [[1e6 * one / TIMED_STEPS for one in taken[name, number]] for number in threads]
        lines.append(_line(name, [f"{median(some):,.0f} ({min(some):,.0f})" for some in rounds]))
    return lines


def _line(name: str, columns: list[str]) -> str:
    return name.ljust(50) + "".join(f"{one:>18}" for one in columns)


def _cases(model: Pretrained, onnx: Path | None, pt2: Path | None, threads: int) -> dict[str, Case]:
    tokens = sample_token(model.space, TIMED_STEPS, torch.Generator().manual_seed(0))
    cases: dict[str, Case] = {}
    if onnx is not None:
        cases["ONNX Runtime"] = _stepping(model, onnx_step(onnx.read_bytes(), threads), tokens)
    if pt2 is not None:
        cases["torch.export"] = _stepping(model, torch_step(pt2.read_bytes()), tokens)

    def step_by_step() -> None:
        memory = model.empty_memory(1)
        for token in tokens.split(1):
            _, memory = model.step(memory, token)

    engine = Engine(EngineConfig(device="cpu"))
    engine.prepare(model)
    cases["torch"] = step_by_step
    cases["torch, a known text at once"] = lambda: model.read(tokens[None])
    return cases


def _stepping(model: Pretrained, step: RunStep, tokens: torch.Tensor) -> Case:
    given = [one.numpy() for one in tokens.split(1)]
    empty: np.ndarray = model.empty_memory(1).numpy()

    def run() -> None:
        memory = empty
        for token in given:
            _, memory = step(memory, token)

    return run


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
