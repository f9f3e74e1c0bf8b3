"""Helpers of tests that train, stop and compare whole runs."""

import os
import signal

import torch
from torch import Tensor

from memtrain.training.console import Reporter
from memtrain.training.run import Run


class StopAt(Reporter):
    """Sends this process a signal when a stage reaches a step, as Ctrl-C would."""

    def __init__(self, stage: str, step: int, number: int = signal.SIGINT) -> None:
        self.wanted = (stage, step)
        self.number = number
        self.name = ""

    def stage(self, name: str, step: int, steps: int) -> None:
        self.name = name

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if (self.name, step) == self.wanted:
            os.kill(os.getpid(), self.number)


def weights(run: Run) -> dict[str, Tensor]:
    state = {f"rnn.{k}": v for k, v in run.rnn.state_dict().items()}
    if run.teacher is not None:
        state |= {f"teacher.{k}": v for k, v in run.teacher.state_dict().items()}
    return state


def assert_same_weights(one: Run, other: Run) -> None:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def comparable(run: Run) -> list[dict]:
    return [
        {key: value for key, value in record.items() if key != "total_seconds"}
        for record in run.metrics.read()
    ]


class CountingReporter(Reporter):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def say(self, message: str) -> None:
        self.messages.append(message)
