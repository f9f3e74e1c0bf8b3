"""Why the Hopper kernels are off."""

import sys
from types import ModuleType

import pytest
import torch

from memtrain.accel import hopper


@pytest.fixture(autouse=True)
def fresh_answers():
    hopper.why_off.cache_clear()
    yield
    hopper.why_off.cache_clear()


def test_off_without_a_cuda_device():
    assert hopper.why_off(torch.device("cpu")) == "no CUDA device"
    assert not hopper.serves(torch.zeros(16, dtype=torch.bfloat16))


def test_off_on_another_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert hopper.why_off(torch.device("cuda", 0)) == "NVIDIA A100 is not a Hopper GPU"


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.6.0", None),
        ("3.7.1", "Triton 3.7.1, written for 3.6"),
        (None, "Triton is not installed"),
    ],
    ids=str,
)
def test_off_with_another_triton(monkeypatch, version, reason):
    triton = ModuleType("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "find_spec", lambda name: version)
    monkeypatch.setattr(triton, "__version__", version, raising=False)
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert hopper.why_off(torch.device("cuda", 0)) == reason
