"""`memtrain env`, and `memtrain bench --explain`: what an issue report needs."""

import json
from types import SimpleNamespace

import pytest
import torch

from memtrain import __version__
from memtrain.cli import env as command
from memtrain.cli import main


def test_env_names_versions_hardware_and_fast_paths(capsys):
    assert main(["env", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    lines = [line.split(None, 1) for line in text.splitlines()]
    assert lines[0] == ["memtrain", __version__]
    assert ["torch", torch.__version__] in lines
    names = [name for name, *_ in lines]
    assert {"python", "triton", "numpy", "safetensors", "os", "cpu", "cores", "memory"} <= {*names}
    assert "cell: fused unroll (CPU)" in text and "gpus" in text


def test_env_prints_json(capsys):
    assert main(["env", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memtrain"] == __version__ and found["fast_paths"][0].startswith("encoder: ")


def test_env_describes_gpus(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA X", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    done = SimpleNamespace(stdout="570.86.15\n570.86.15\n")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: done)
    found = command.facts("cpu")
    assert found["gpus"] == ["NVIDIA X, 80.0 GiB"] * 2 and found["driver"] == "570.86.15"


def test_env_reports_a_missing_device_package_and_driver(monkeypatch, capsys):
    monkeypatch.setattr(command, "PACKAGES", ("torch", "no-such-package"))

    def fail(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(command.subprocess, "run", fail)
    assert command._driver() == "unknown"
    assert main(["env", "--device", "cuda:99"]) == 0
    text = capsys.readouterr().out
    assert "no-such-package" in text and "not installed" in text and "device=cuda:99" in text


@pytest.mark.parametrize("suite", ["all", "growth"])
def test_bench_explains_the_fast_paths_and_times_nothing(suite, monkeypatch, capsys):
    monkeypatch.setattr("memtrain.bench.measure.time_case", None)
    assert main(["bench", suite, "--explain", "--size", "tiny", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "decoder: projected vocabulary (CPU)" in lines and len(lines) == 7
    assert main(["bench", suite, "--explain", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == {"size": "tiny", "fast_paths": lines}
