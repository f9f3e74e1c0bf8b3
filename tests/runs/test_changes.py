"""Longer runs, and what a run may change when it continues."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import TINY
from memtrain.config import RunConfig
from memtrain.errors import MemtrainError
from memtrain.runs.changes import ENGINE_FIELDS, LOG_FIELDS, STAGE_FIELDS, apply_changes
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from run_testing import CountingReporter, assert_same_weights, comparable

SMT = replace(
    TINY,
    smt=replace(TINY.smt, warmup=0.0),
    dmt=replace(TINY.dmt, steps=0),
    bptt=replace(TINY.bptt, steps=0),
    log=replace(TINY.log, evaluate_every=0),
)


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, smt=replace(config.smt, steps=steps))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_finished_run_that_is_lengthened_equals_a_long_one(tmp_path: Path, optimizer: str):
    config = replace(SMT, smt=replace(SMT.smt, optimizer=optimizer))
    long = Run.create(with_steps(config, 20), tmp_path / "long").train(Reporter())
    assert Run.create(with_steps(config, 12), tmp_path / "run").train(Reporter()).finished
    run, reporter = Run.open(tmp_path / "run", changes={"smt.steps": 20}), CountingReporter()
    assert not run.finished and run.progress.step == 12
    run.train(reporter)
    assert_same_weights(long, run)
    assert comparable(run)[-1] == comparable(long)[-1]
    assert f"{tmp_path}/run: smt.steps is now 20, was 12" in reporter.messages
    assert not any("schedule" in message for message in reporter.messages)
    assert Run.open(tmp_path / "run").config.smt.steps == 20 and Run.open(tmp_path / "run").finished


def test_a_longer_cosine_says_how_its_rate_changes(tmp_path: Path):
    config = replace(SMT, smt=replace(SMT.smt, schedule="cosine"))
    Run.create(config, tmp_path / "run").train(Reporter())
    reporter = CountingReporter()
    run = Run.open(tmp_path / "run", changes={"smt.steps": 24}).train(reporter)
    (line,) = [line for line in reporter.messages if "schedule" in line]
    assert "smt: its cosine schedule now ends at step 24; the learning rate continues at" in line
    rates = {one["step"]: one["learning_rate"] for one in run.metrics.read()}
    assert rates[14] > 10 * rates[12]


def test_a_stage_is_added_after_those_that_are_done(tmp_path: Path):
    Run.create(SMT, tmp_path / "run").train(Reporter())
    changes = {"dmt.steps": 4, "dmt.learning_rate": 1e-4, "dmt.batch_size": 2}
    run = Run.open(tmp_path / "run", changes=changes).train(Reporter())
    assert [(stage.name, stage.steps) for stage in run.progress.stages] == [("smt", 12), ("dmt", 4)]


def test_a_killed_lengthening_continues_with_the_new_config(tmp_path: Path):
    Run.create(SMT, tmp_path / "run").train(Reporter())
    path = tmp_path / "run" / "config.json"
    plain = json.loads(path.read_text())
    plain["smt"]["steps"] = 20  # written, and killed before the first checkpoint
    path.write_text(json.dumps(plain))
    run = Run.open(tmp_path / "run")
    assert not run.finished and run.train(Reporter()).progress.stages[0].steps == 20


def test_a_stage_that_stopped_early_continues_with_more_patience(tmp_path: Path):
    smt = replace(SMT.smt, steps=100, learning_rate=1e-9, patience=2)
    config = replace(SMT, smt=smt, log=replace(TINY.log, evaluate_every=2))
    run = Run.create(config, tmp_path / "run").train(Reporter())
    stopped = run.progress.stages[0].steps
    assert stopped < 100 and Run.open(tmp_path / "run").finished
    with pytest.raises(MemtrainError, match="not fallen in 2 evaluations; raise smt.patience, or"):
        Run.open(tmp_path / "run", changes={"smt.steps": 200})
    run = Run.open(tmp_path / "run", changes={"smt.patience": 4, "smt.steps": 50}).train(Reporter())
    assert run.progress.stages[0].steps > stopped and run.finished


def test_intervals_may_change_and_are_written(tmp_path: Path):
    Run.create(TINY, tmp_path / "run").train(Reporter(), until="smt")
    changes = {"log.evaluate_every": 1, "engine.threads": 1, "dmt.accumulate": 2}
    Run.open(tmp_path / "run", changes=changes).train(Reporter(), until="dmt")
    run = Run.open(tmp_path / "run")
    assert (run.config.log.evaluate_every, run.config.dmt.accumulate) == (1, 2)
    lines = [one for one in run.metrics.read() if one["stage"] == "dmt"]
    assert len([one for one in lines if "evaluation" in one]) == 8
    assert set(STAGE_FIELDS + LOG_FIELDS + ENGINE_FIELDS) >= {"seconds", "patience", "keep"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"smt.steps": 20}, "has trained smt and then dmt; only dmt can be changed"),
        ({"dmt.steps": 8}, ""),
        ({"dmt.steps": 5}, "dmt.steps=5: .* has trained 8 steps of dmt already; must be more"),
        ({"dmt.batch_size": 8}, "dmt.batch_size=8: .* without it, .* may change"),
        ({"dmt.schedule": "wsd"}, "a run keeps its config"),
        (
            {"dmt.learning_rate": 1.0},
            "dmt is over, its 8 steps are done; lengthen it with dmt.steps",
        ),
        ({"seed": 3}, "seed=3: the run has seed=0, and a run keeps its config"),
        ({"cell.width": 32}, "cell.width=32: the run has cell.width=16"),
        ({"pretrain.steps": 3}, "a stage that comes before them cannot be added"),
        ({"log.evaluate_sequences": 99}, "the run has log.evaluate_sequences=8"),
        ({"engine.device": "cuda"}, "the run has engine.device=auto"),
        ({"smt.stepz": 3}, "smt.stepz=3: a run has no such field; did you mean smt.steps"),
        ({"steps": 3}, "steps=3: a run has no such field"),
        ({"bptt.steps": -1}, "steps=-1: must be at least 0"),
        ({"bptt.optimizer": "sgd", "bptt.steps": 2}, "must be adamw or muon, or a class"),
    ],
)
def test_other_changes_are_refused(two_stages: Path, changes: dict, words: str):
    before = (two_stages / "config.json").read_text()
    if not words:
        assert Run.open(two_stages, changes=changes).finished
        return
    with pytest.raises(MemtrainError, match=words):
        Run.open(two_stages, changes=changes)
    assert (two_stages / "config.json").read_text() == before


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    Run.create(replace(TINY, bptt=replace(TINY.bptt, steps=0)), folder).train(Reporter())
    return folder


def test_fields_are_changed_by_name():
    assert apply_changes(TINY, {"smt.steps": 3, "seed": 2}) == replace(
        TINY, seed=2, smt=replace(TINY.smt, steps=3)
    )
