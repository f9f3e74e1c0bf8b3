"""The table of `--time` has every file and every number of threads."""

from pathlib import Path

import pytest
import torch
from test_onnx_file import exported

from memtrain.deploy import timing
from memtrain.deploy.timing import time_steps


def test_the_table_has_a_positive_time_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "TIMED_STEPS", 4)
    monkeypatch.setattr(timing, "ROUNDS", 2)
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 2)
    model, proto = exported("gru")
    path = tmp_path / "step.onnx"
    path.write_bytes(proto.SerializeToString())
    heading, *rows = time_steps(model, path, None)
    assert heading.split()[-4:] == ["1", "thread", "2", "threads"]
    names = ["ONNX Runtime", "torch", "torch, a known text at once"]
    assert [row[:50].strip() for row in rows] == names
    for row in rows:
        times = [float(one.strip("()").replace(",", "")) for one in row[50:].split()]
        assert len(times) == 4 and times[0] >= times[1] > 0 and times[2] >= times[3] > 0
    assert torch.get_num_threads() == 1
    assert len(time_steps(model, None, None)) == 3
