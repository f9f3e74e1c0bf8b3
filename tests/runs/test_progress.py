"""A run's counters in checkpoints, and metrics.jsonl."""

import json
import math
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from memtrain.config import RunConfig, SMTConfig
from memtrain.errors import CheckpointError, MemtrainError
from memtrain.runs.progress import (
    Best,
    MetricsFile,
    Progress,
    StageProgress,
    read_progress,
)


def line(step: int) -> dict:
    return {"stage": "smt", "step": step, "total_steps": step}


def test_lines_are_read_in_order(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    for step in range(3):
        metrics.append(line(step))
    assert [record["step"] for record in metrics.read()] == [0, 1, 2]


def test_truncating_removes_later_and_partial_lines(tmp_path: Path):
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


def test_truncating_at_the_end_changes_no_byte(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    before = metrics.path.read_bytes()
    assert metrics.cut(metrics.length()) == "" and metrics.path.read_bytes() == before


@pytest.mark.parametrize("text", ["7", "[]", "{}", '{"stage": "smt", "step": "1"}'])
def test_invalid_metrics_lines_are_refused_by_number(tmp_path: Path, text: str):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    with metrics.path.open("a") as file:
        file.write(text + "\n")
    with pytest.raises(MemtrainError, match="line 2 has no stage or no step"):
        metrics.read()


# ------------------------------------------------------------------------------------- progress

STAGE = {"name": "smt", "tokens": 8, "seconds": 0.5, "sequential_ops_a_step": 7}


@pytest.mark.parametrize(
    "progress, named",
    [
        ([], "progress"),
        ({"stage": -1}, "progress.stage=-1"),
        ({"step": "7"}, "progress.step='7'"),
        ({"global_step": 1e9}, "progress.global_step"),
        ({"metrics_bytes": True}, "progress.metrics_bytes=True"),
        ({"metrics_lost": -1}, "progress.metrics_lost=-1"),
        ({"stages": 1}, "progress.stages"),
        ({"stages": [1]}, "progress.stages"),
        ({"stages": [STAGE | {"name": 3}]}, "progress.stages: name=3"),
        ({"stages": [STAGE | {"tokens": "many"}]}, "progress.stages: tokens='many'"),
        ({"stages": [{"name": "smt"}]}, "progress.stages: tokens: is missing"),
        ({"stages": [STAGE | {"skipped_in_a_row": 2**70}]}, "skipped_in_a_row=.*: must be a non-"),
        ({"stages": [STAGE | {"skipped": 0.5}]}, "progress.stages: skipped=0.5: must be a non-neg"),
        ({"stages": [STAGE | {"lengths_over": -1}]}, "lengths_over=-1: must be a non-neg"),
        ({"best": {"global_step": "../../etc"}}, "progress.best"),
        ({"best": {"global_step": "../../etc", "nats": 1}}, "progress.best.global_step"),
        ({"data": 7}, "progress.data"),
        ({"run": 7}, "progress.run"),
        ({"spelling": 7}, "progress.spelling"),
    ],
)
def test_progress_of_another_shape_is_refused_by_name(progress, named: str):
    with pytest.raises(CheckpointError, match=named):
        read_progress(progress)


def test_progress_of_another_version_is_read_and_saved_again():
    old = read_progress(
        {"stage": 1, "step": 0, "stages": [STAGE | {"watts": 3.5}], "colour": "red"}
    )
    assert (old.stage, old.spelling, old.made_of, old.run) == (1, "unknown", None, "")
    assert old.stages[0] == StageProgress(**STAGE, other={"watts": 3.5})
    plain = old.to_json()
    assert plain["colour"] == "red" and plain["stages"][0]["watts"] == 3.5
    assert {"spelling", "made_of", "best", "metrics_lost"}.isdisjoint(plain)
    assert read_progress(json.loads(json.dumps(plain))) == old


def test_progress_beyond_the_curriculum_does_not_fit(tmp_path: Path):
    smt = SMTConfig(steps=9, curriculum=((4, 2),))
    for over in (0, 1, 2):
        progress = Progress(step=5, stages=[StageProgress("smt", 1, lengths_over=over)])
        with nullcontext() if over < 2 else pytest.raises(CheckpointError, match="does not fit"):
            progress.check_fits(RunConfig(smt=smt), tmp_path)
    stage = json.loads(json.dumps(progress.to_json()))["stages"][0]
    assert stage["lengths_over"] == 2


def test_the_best_is_the_lowest_finite_loss():
    progress = Progress(stages=[StageProgress("smt", 7)])
    noted = []
    for nats in (math.nan, 2.0, 1.0, math.nan, 3.0, -math.inf, 0.5, 0.5):
        progress.global_step += 1
        if progress.is_best(nats):
            assert progress.best is not None
            noted.append(progress.best.nats)
    assert noted == [2.0, 1.0, 0.5]
    assert progress.best == Best(global_step=7, nats=0.5, stage="smt", step=0)
