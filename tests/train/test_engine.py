"""Devices and precision."""

import os

import pytest
import torch

from memtrain.config import EngineConfig
from memtrain.errors import MemtrainError
from memtrain.train.engine import Engine, pick_device


def test_auto_takes_what_there_is():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pick_device("auto").type == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_named_with_a_remedy():
    with pytest.raises(MemtrainError, match="device=cuda: .* use cpu or auto"):
        pick_device("cuda")


def test_bf16_computes_in_bf16_and_fp32_does_not():
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with Engine(EngineConfig(device="cpu", precision="bf16")).autocast():
        assert layer(x).dtype == torch.bfloat16
    with Engine(EngineConfig(device="cpu")).autocast():
        assert layer(x).dtype == torch.float32


def test_no_more_threads_than_cores(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    Engine(EngineConfig(device="cpu", threads=4096))
    Engine(EngineConfig(device="cpu", threads=1))
    assert asked == [os.cpu_count(), 1]
