"""Complete runs of user cells of every kind: resuming is bit-exact."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from conftest import TINY
from memtrain.training.run import Interrupted, Run
from run_testing import StopAt, assert_same_weights, comparable

CONFIG = replace(TINY, dmt=replace(TINY.dmt, steps=0), bptt=replace(TINY.bptt, steps=0))


class Mixing(nn.Module):
    """The base of the cells below: a memory of one token of width 8."""

    memory_tokens, memory_dim = 1, 8

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        mixed = self.mix(memory[:, 0] + self.embedding(token))
        return F.rms_norm(mixed, (8,))[:, None]

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ChannelsLast(Mixing):
    """A convolution over the memory as a picture, in the layout that torch's guide advises."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.conv.weight = nn.Parameter(
            self.conv.weight.detach().clone(memory_format=torch.channels_last)
        )

    def mix(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, 2, 2)).reshape(-1, 8) + 0.5 * x


class Transposed(Mixing):
    """A matrix whose columns lie one behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8).T * 0.3)
        self.back = nn.Linear(6, 8)

    def mix(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(x @ self.weight)) + 0.5 * x


class WeightNormed(Mixing):
    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(8, 8))

    def mix(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Tied(Mixing):
    """One matrix under two names, part of it also frozen, and some of it in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def mix(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.gain.float())


class Counting(Mixing):
    """Adds less noise over time; its progress is in a buffer, which is saved."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def mix(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            x = x + torch.rand_like(x) / (1 + self.calls)
        return self.linear(x)


def made(cell: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return cell()


@pytest.mark.parametrize(
    "cell", [ChannelsLast, Transposed, WeightNormed, Tied, Counting], ids=lambda c: c.__name__
)
def test_a_resumed_run_is_bit_exact(tmp_path: Path, cell):
    whole = Run.create(CONFIG, tmp_path / "whole", cell=made(cell)).train()
    with pytest.raises(Interrupted):
        Run.create(CONFIG, tmp_path / "cut", cell=made(cell)).train(StopAt("smt", 6))
    resumed = Run.open(tmp_path / "cut", cell=made(cell)).train()
    assert_same_weights(whole, resumed)
    assert comparable(whole) == comparable(resumed)


@pytest.mark.parametrize("cell", [ChannelsLast, Transposed], ids=lambda c: c.__name__)
def test_these_layouts_are_not_contiguous(cell):
    assert not all(parameter.is_contiguous() for parameter in made(cell).parameters())
