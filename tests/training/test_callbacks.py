"""Callbacks: what they receive, how they stop a run, and early stopping."""

from dataclasses import replace
from pathlib import Path

import pytest

import memtrain
from conftest import TINY
from memtrain.errors import EndStage, MemtrainError
from memtrain.runs.distributed import Group
from memtrain.runs.progress import StageProgress
from memtrain.training.callbacks import Callback, Hooks, Metrics, check_callbacks
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from run_testing import CountingReporter, assert_same_weights, comparable

SMT = replace(
    TINY,
    smt=replace(TINY.smt, steps=12),
    dmt=replace(TINY.dmt, steps=0),
    bptt=replace(TINY.bptt, steps=0),
)


class Log(Callback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.metrics: list[Metrics] = []

    def on_start(self, run: Run) -> None:
        self.calls.append(("start", run.progress.global_step))

    def on_stage_start(self, stage: str, step: int, steps: int) -> None:
        self.calls.append(("stage", stage, step, steps))

    def on_step(self, metrics: Metrics) -> None:
        self.calls.append(("step", metrics.stage, metrics.step))
        self.metrics.append(metrics)

    def on_evaluation(self, metrics: Metrics) -> None:
        self.calls.append(("evaluation", metrics.stage, metrics.step))

    def on_checkpoint(self, path: Path) -> None:
        assert (path / "state.json").is_file()
        self.calls.append(("checkpoint", path.name))

    def on_stage_end(self, stage: str, step: int) -> None:
        self.calls.append(("stage end", stage, step))

    def on_end(self) -> None:
        self.calls.append(("end",))


def test_a_callback_sees_the_run_in_order(tmp_path: Path):
    log = Log()
    run = Run.create(TINY, tmp_path / "run").train(Reporter(), callbacks=[log], until="dmt")
    plain = [call for call in log.calls if call[0] != "checkpoint"]
    assert plain[:3] == [("start", 0), ("stage", "smt", 0, 12), ("step", "smt", 2)]
    assert plain[4:6] == [("evaluation", "smt", 5), ("step", "smt", 5)]
    assert ("stage end", "smt", 12) in plain and ("stage", "dmt", 0, 8) in plain
    assert plain[-2:] == [("stage end", "dmt", 8), ("end",)]
    saved = [call[1] for call in log.calls if call[0] == "checkpoint"]
    assert saved == sorted(set(saved)) and saved[-1] == "00000020"
    assert run.progress.global_step == 20


def test_the_metrics_of_a_step_are_its_line_and_the_newest_held_out_losses(tmp_path: Path):
    log = Log()
    run = Run.create(SMT, tmp_path / "run").train(Reporter(), callbacks=[log])
    assert [one.record for one in log.metrics] == run.metrics.read()
    before, after = log.metrics[0], log.metrics[-2]
    assert before.held_out is None and not before.evaluated
    assert after.step == 10 and after.evaluated and after.evaluation is not None
    assert after.held_out == after.record["evaluation"]["rnn"]["nats"]
    assert after.held_out_teacher == after.record["evaluation"]["teacher"]["nats"]
    between = next(one for one in log.metrics if one.step == 6)
    assert not between.evaluated and between.held_out == log.metrics[2].held_out is not None
    assert between.loss == between.record["loss"] and between.unit == "target"
    assert between.steps == 12 and between.total_steps == 6


@pytest.mark.parametrize("error", [MemtrainError("disk quota: 9 of 10 GB"), KeyError("x")])
def test_an_error_of_a_callback_saves_the_run_and_stops_it_in_words(
    tmp_path: Path, error: Exception
):
    class Fails(Log):
        def on_step(self, metrics: Metrics) -> None:
            super().on_step(metrics)
            if metrics.step == 8:
                raise error

    whole = Run.create(SMT, tmp_path / "whole").train(Reporter())
    fails = Fails()
    words = (
        "disk quota" if isinstance(error, MemtrainError) else "callback Fails.on_step raised Key"
    )
    with pytest.raises(MemtrainError, match=words):
        Run.create(SMT, tmp_path / "run").train(Reporter(), callbacks=[fails])
    assert fails.calls[-1] == ("end",)
    resumed = Run.open(tmp_path / "run")
    assert resumed.progress.step == 8
    resumed.train(Reporter())
    assert_same_weights(whole, resumed)
    assert comparable(whole) == comparable(resumed)


def test_a_callback_ends_a_stage_and_the_next_one_starts(tmp_path: Path):
    class Ends(Callback):
        def on_step(self, metrics: Metrics) -> None:
            if (metrics.stage, metrics.step) == ("smt", 4):
                raise EndStage("enough")

    reporter, log = CountingReporter(), Log()
    run = Run.create(TINY, tmp_path / "run").train(reporter, callbacks=[Ends(), log], until="dmt")
    smt, dmt = run.progress.stages
    assert (smt.steps, dmt.steps) == (5, 8)  # one more step, which is evaluated
    assert ("evaluation", "smt", 5) in log.calls and ("stage end", "smt", 5) in log.calls
    assert any("smt: ends after step 5 of 12: enough" in line for line in reporter.messages)
    reopened = Run.open(tmp_path / "run")
    assert reopened.progress.stage == 2 and reopened.stages == ["smt", "dmt", "bptt"]
    finished = Run.create(SMT, tmp_path / "short").train(reporter, callbacks=[Ends()])
    assert finished.finished and Run.open(tmp_path / "short").finished


def test_only_the_main_process_calls_callbacks():
    log = Log()
    for group in (Group(1, 1), Group(0, 1)):
        Hooks([log], group).tell("on_end")
    assert log.calls == [("end",)]


# -------------------------------------------------------------------------------- early stopping

STALE = replace(
    TINY,
    smt=replace(TINY.smt, steps=400, learning_rate=1e-9, patience=3),
    log=replace(TINY.log, evaluate_every=2),
)


def test_patience_ends_a_stage_in_words_and_keeps_the_best(tmp_path: Path):
    """At no learning rate to speak of, the held-out loss does not fall."""
    reporter = CountingReporter()
    run = Run.create(STALE, tmp_path / "run").train(reporter, until="smt")
    smt = run.progress.stages[0]
    assert smt.since_lowest == 3 and smt.steps < 40
    (line,) = [line for line in reporter.messages if "ends after" in line]
    assert f"smt: ends after step {smt.steps} of 400: no lower held-out loss than" in line
    best = run.progress.best
    assert best is not None and "in 3 evaluations; the best checkpoint is of step" in line
    assert (tmp_path / "run" / "checkpoints" / f"{best.global_step:08d}").is_dir()
    resumed = Run.open(tmp_path / "run").train(Reporter())  # continues with DMT
    assert [stage.name for stage in resumed.progress.stages] == ["smt", "dmt", "bptt"]
    assert resumed.progress.stages[0].steps == smt.steps


def test_an_early_stop_comes_at_the_same_step_after_a_resume(tmp_path: Path):
    whole = Run.create(STALE, tmp_path / "whole").train(Reporter(), until="smt")

    class Fails(Callback):
        def on_step(self, metrics: Metrics) -> None:
            if metrics.step == 4:
                raise MemtrainError("stop here")

    with pytest.raises(MemtrainError, match="stop here"):
        Run.create(STALE, tmp_path / "cut").train(Reporter(), callbacks=[Fails()])
    resumed = Run.open(tmp_path / "cut").train(Reporter(), until="smt")
    assert resumed.progress.stages[0].steps == whole.progress.stages[0].steps
    assert_same_weights(whole, resumed)


def test_counters_of_early_stopping_ignore_losses_that_are_not_finite():
    stage = StageProgress("smt", 1)
    assert [stage.note_loss(x) for x in (2.0, 1.0, 1.0, float("nan"), 0.5)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert (stage.lowest, stage.since_lowest) == (0.5, 0)


# --------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (Callback(), "callbacks=Callback: must be a list"),
        ([Log], r"Log is a class; pass an object, Log\(...\)"),
        ([print], "is not a memtrain.Callback; derive from it"),
    ],
)
def test_wrong_callbacks_are_refused(callbacks: object, words: str):
    with pytest.raises(MemtrainError, match=words):
        check_callbacks(callbacks)


def test_callbacks_are_public():
    assert memtrain.Callback is Callback and memtrain.EndStage is EndStage
    assert issubclass(memtrain.Reporter, Callback)
