"""What a stage notes along the way."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from memtrain.runs.async_checkpoint import CheckpointWriter
from memtrain.runs.progress import Progress
from memtrain.training.run import Run


@pytest.fixture
def saved(tmp_path: Path, monkeypatch) -> list[Progress]:
    """The progress in every checkpoint that a run of three stages writes, in order."""
    progress: list[Progress] = []
    save = CheckpointWriter.save

    def note(writer: CheckpointWriter, number: int, checkpoint: Any, *rest: Any) -> None:
        progress.append(copy.deepcopy(checkpoint.progress))
        save(writer, number, checkpoint, *rest)

    monkeypatch.setattr(CheckpointWriter, "save", note)
    # The last step of each stage is one that is due, too.
    config = replace(TINY, log=replace(TINY.log, checkpoint_every=4))
    Run.create(config, tmp_path / "run").train()
    return progress


def test_every_step_is_saved_once_and_the_last_of_a_stage_as_its_end(saved: list[Progress]):
    steps = [progress.global_step for progress in saved]
    assert steps == sorted(set(steps))
    ends = {12: 1, 20: 2, 24: 3}  # after 12, 8 and 4 steps the next stage is due
    found = {p.global_step: (p.stage, p.step) for p in saved if p.global_step in ends}
    assert found == {step: (stage, 0) for step, stage in ends.items()}


def test_due_steps_and_every_new_best_are_saved(saved: list[Progress]):
    steps = {progress.global_step for progress in saved}
    assert {4, 8, 16} <= steps  # every fourth step of a stage
    assert {progress.best.global_step for progress in saved if progress.best} <= steps


def test_a_stage_ends_with_an_evaluation_and_its_lines_are_counted(trained_tiny: Run):
    run = trained_tiny
    lines = run.metrics.read()
    evaluated = [line["total_steps"] for line in lines if "evaluation" in line]
    assert evaluated == [5, 10, 12, 17, 20, 24]
    assert run.progress.metrics_bytes == run.metrics.length()
