"""Devices and precision."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memtrain.accel
from memtrain.accel.engine import Engine, pick_device
from memtrain.accel.fast_paths import triton_off
from memtrain.config import EngineConfig
from memtrain.errors import MemtrainError
from memtrain.models.layers import Block, Rotary


def test_auto_picks_the_available_device():
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


def test_threads_do_not_exceed_cores(monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    Engine(EngineConfig(device="cpu", threads=4096)).apply_globals()
    Engine(EngineConfig(device="cpu", threads=1)).apply_globals()
    assert threads == [os.cpu_count(), 1]


class Kernels:
    """A fast path of a block."""

    def serves(self, length: int) -> bool:
        return True

    def attend(self, x, update, rotary, queries, causal):
        return x + 1, x

    def finish(self, x, attended):
        return x + 1, attended

    def end(self, layer, x, update):
        return x


def test_block_uses_the_attached_fast_path():
    block, rotary, x = Block(8, 2, 4), Rotary(4), torch.zeros(2, 3, 8)
    block.fast = Kernels()
    stream, update = block(x, None, rotary)
    assert torch.equal(stream, x + 2) and torch.equal(update, x)
    hidden = torch.ones(2, 3, dtype=torch.bool)
    stream, _ = block(x, None, rotary, mask=hidden)  # attention with a mask is the reference's
    assert torch.equal(stream, x + 1)


def test_reference_has_no_fast_paths():
    models = torch.nn.ModuleList([Block(8, 2, 4), torch.nn.Linear(2, 2)])
    block = models[0]
    assert isinstance(block, Block)
    block.fast = given = Kernels()
    engine = Engine(EngineConfig(device="cpu"))
    with pytest.raises(KeyError), engine.reference(models):
        assert block.fast is None
        raise KeyError
    assert block.fast is given


def test_deterministic_configures_torch_and_cublas(monkeypatch):
    """In a separate process, because the setting is permanent."""
    code = """
import os, torch
from memtrain.config import EngineConfig
from memtrain.accel.engine import Engine
import torch._inductor.config as inductor
Engine(EngineConfig(device="cpu", deterministic=True, compile=True)).apply_globals()
assert torch.are_deterministic_algorithms_enabled() and inductor.deterministic
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
"""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    engine = Engine(EngineConfig(device="cpu", deterministic=True))
    with pytest.raises(MemtrainError, match="CUBLAS_WORKSPACE_CONFIG=:0:0: must be :4096:8"):
        engine.apply_globals()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("capability", "hip", "triton", "precision", "reason"),
    [
        ((9, 0), None, True, "bf16", None),
        ((8, 0), None, True, "bf16", "GPU X is not a Hopper GPU"),
        ((10, 0), None, True, "bf16", "GPU X is not a Hopper GPU"),
        ((9, 0), "6.0", True, "bf16", "GPU X is not a Hopper GPU"),  # some of AMD's report 9.0
        ((9, 0), None, False, "bf16", "Triton is not installed"),
        ((9, 0), None, True, "fp32", "fp32; bf16 needed"),
    ],
)
def test_kernels_need_hopper_and_triton(capability, hip, triton, precision, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("memtrain.accel.fast_paths.find_spec", lambda name: triton or None)
    assert triton_off(Engine(EngineConfig(device="cpu", precision=precision))) == reason


def test_no_kernel_uses_atomics_or_autotuning():
    """Atomics and tiles chosen by timing would make a run differ from itself."""
    kernels = list(Path(memtrain.accel.__file__).parent.glob("**/*.py"))
    assert kernels
    for path in kernels:
        assert not re.search(r"atomic|autotune", path.read_text()), path


FAULTS = """
import resource
from pathlib import Path
from memtrain.recipes import recipe
from memtrain.training.run import Run
from memtrain.training.step import Trainer

run = Run(recipe("retrieval"), Path("nowhere"))
trainer = Trainer(run.objective("smt"), run.config.smt, run.task, run.engine, 0)
faults = []
for _ in range(24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    trainer.train_step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults[-9:])[4])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_training_step_reuses_its_memory_pages():
    """Without the setting it is 2,000 to 5,000 pages."""
    command = [sys.executable, "-c", FAULTS]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(found.stdout) < 300
