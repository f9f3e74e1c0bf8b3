"""metrics.jsonl."""

import os
from pathlib import Path

import pytest

from memtrain.errors import MemtrainError
from memtrain.training.metrics import MetricsFile


def line(step: int) -> dict:
    return {"stage": "smt", "step": step, "total_steps": step}


def test_lines_come_back_in_order(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    for step in range(3):
        metrics.append(line(step))
    assert [record["step"] for record in metrics.read()] == [0, 1, 2]


def test_cutting_back_forgets_what_came_after_even_half_a_line(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    length = metrics.length()
    metrics.append(line(2))
    with metrics.path.open("a") as file:
        file.write('{"step": 3, "lo')
    metrics.cut(length)
    metrics.append(line(4))
    assert [record["step"] for record in metrics.read()] == [1, 4]


def test_syncing_forces_the_lines_to_disk(tmp_path: Path, monkeypatch):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    metrics.sync()
    assert metrics.path.stat().st_ino in synced


def test_cutting_back_to_the_end_leaves_every_byte(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    before = metrics.path.read_bytes()
    assert metrics.cut(metrics.length()) == "" and metrics.path.read_bytes() == before


@pytest.mark.parametrize("text", ["7", "[]", "{}", '{"stage": "smt", "step": "1"}'])
def test_lines_that_are_no_metrics_are_refused_by_number(tmp_path: Path, text: str):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    with metrics.path.open("a") as file:
        file.write(text + "\n")
    with pytest.raises(MemtrainError, match="line 2 has no stage or no step"):
        metrics.read()
