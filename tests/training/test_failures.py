"""What happens to machines: full disks, lost folders, torn files, bad numbers, odd clocks."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_run import PoisonedTask

from conftest import TINY
from fault_injection import ERRORS, FaultyFiles
from memtrain import cli
from memtrain.accel.engine import Engine, out_of_memory
from memtrain.config import EngineConfig, StageConfig
from memtrain.config.serialize import to_json
from memtrain.errors import CheckpointError, DivergedError, MemtrainError
from memtrain.training.console import Reporter
from memtrain.training.run import Interrupted, Run
from memtrain.training.step import Trainer
from run_testing import CountingReporter, assert_same_weights, comparable

SMALL = replace(
    TINY,
    dmt=replace(TINY.dmt, steps=4),
    bptt=replace(TINY.bptt, steps=0),
    log=replace(TINY.log, checkpoint_every=3),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.create(SMALL, tmp_path_factory.mktemp("whole") / "run").train()


@pytest.mark.parametrize("error", ERRORS)
def test_a_disk_that_fails_stops_the_run_and_loses_nothing(tmp_path: Path, whole: Run, error: str):
    run = Run.create(SMALL, tmp_path / "run")
    run.writer.files = FaultyFiles(at=40, fault=ERRORS[error])
    with pytest.raises(
        CheckpointError, match=r"could not be written \(.*last whole one is step \d"
    ):
        run.train()
    resumed = Run.open(tmp_path / "run").train()
    assert_same_weights(whole, resumed)
    assert comparable(whole) == comparable(resumed)


def test_a_removed_folder_is_named_and_not_recreated(tmp_path: Path):
    class Vanish(Reporter):
        def advance(self, step: int, metrics: dict[str, float]) -> None:
            if step == 4:
                run.writer.finish()
                shutil.rmtree(tmp_path / "run")

    run = Run.create(SMALL, tmp_path / "run")
    with pytest.raises(MemtrainError, match="run/.*No such file"):
        run.train(Vanish())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["torn", "more", "gone", "shorter"])
def test_metrics_are_repaired_on_resume_and_lost_lines_are_reported(
    tmp_path: Path, whole: Run, damage: str
):
    run = Run.create(SMALL, tmp_path / "run").train(until="smt")
    content = run.metrics.path.read_bytes()
    if damage == "torn":
        run.metrics.path.write_bytes(content + b'{"stage": "dmt", "st')
    elif damage == "more":
        run.metrics.path.write_bytes(content + content)
    elif damage == "gone":
        run.metrics.path.unlink()
    else:
        run.metrics.path.write_bytes(content[:-20])
    reporter = CountingReporter()
    resumed = Run.open(tmp_path / "run").train(reporter)
    assert_same_weights(whole, resumed)
    if damage in ("torn", "more"):
        assert comparable(resumed) == comparable(whole) and not reporter.messages
    else:
        assert comparable(resumed) == comparable(whole)[-len(comparable(resumed)) :] or (
            damage == "shorter"
        )
        assert len(reporter.messages) == 1 and "metrics.jsonl" in reporter.messages[0]


# -------------------------------------------------------------------------------- bad numbers


def poisoned(run_of: list[Run], bad: range):
    """Gradients of the cell's embedding are infinite in these steps."""
    now = []

    def poison(batches: int) -> None:
        if not now:
            weight = run_of[0].rnn.cell.get_parameter("embedding.weight")
            weight.register_hook(lambda g: g * (float("inf") if now[-1] in bad else 1.0))
        now.append(batches - 1)

    return poison


def test_bad_steps_are_skipped_and_reported(tmp_path: Path):
    config = replace(SMALL, smt=replace(SMALL.smt, on_nonfinite="skip", skip_limit=2))
    runs: list[Run] = []
    run = Run.create(config, tmp_path / "run", task=PoisonedTask(poisoned(runs, range(3, 5))))
    runs.append(run)
    reporter = CountingReporter()
    run.train(reporter, until="smt")
    assert run.progress.stages[0].skipped == 2
    assert any("2 steps so far" in line and "left out" in line for line in reporter.messages)
    assert all(bool(p.isfinite().all()) for p in run.rnn.parameters())


def test_too_many_bad_steps_in_a_row_stop_training(tmp_path: Path):
    config = replace(SMALL, smt=replace(SMALL.smt, on_nonfinite="skip", skip_limit=2))
    runs: list[Run] = []
    run = Run.create(config, tmp_path / "run", task=PoisonedTask(poisoned(runs, range(3, 9))))
    runs.append(run)
    with pytest.raises(DivergedError, match="smt step 5: gradient_norm_cell is (inf|nan)"):
        run.train()


SKIPPING = replace(SMALL, smt=replace(SMALL.smt, on_nonfinite="skip", skip_limit=2))


def stop_after_two_bad_steps(folder: Path) -> None:
    """SIGTERM in the seventh step, after which nothing else is due; it is bad, and that before."""
    runs: list[Run] = []
    poison = poisoned(runs, range(5, 7))

    def poison_and_stop(batches: int) -> None:
        poison(batches)
        if batches == 7:
            signal.raise_signal(signal.SIGTERM)

    runs.append(Run.create(SKIPPING, folder, task=PoisonedTask(poison_and_stop)))
    with pytest.raises(Interrupted, match="stopped after step 7"):
        runs[0].train()


def resumed(folder: Path, bad: range) -> Run:
    """The resumed run, with bad steps counted from there."""
    runs: list[Run] = []
    runs.append(Run.open(folder, task=PoisonedTask(poisoned(runs, bad))))
    return runs[0]


def test_bad_steps_are_counted_and_reported_across_a_stop(tmp_path: Path):
    stop_after_two_bad_steps(tmp_path / "run")
    run, reporter = resumed(tmp_path / "run", range(1, 2)), CountingReporter()
    assert run.progress.stages[0].skipped == 2
    run.train(reporter, until="smt")
    assert run.progress.stages[0].skipped == 3
    assert ["3 steps so far" in line for line in reporter.messages] == [True]


def test_bad_steps_in_a_row_are_counted_across_a_stop(tmp_path: Path):
    stop_after_two_bad_steps(tmp_path / "run")
    with pytest.raises(DivergedError, match="smt step 7: gradient_norm_cell is (inf|nan)"):
        resumed(tmp_path / "run", range(0, 1)).train()


def test_an_old_checkpoint_without_bad_step_counts_is_accepted(tmp_path: Path):
    stop_after_two_bad_steps(tmp_path / "run")
    run = resumed(tmp_path / "run", range(0, 2))
    run.progress.stages[0].skipped_in_a_row = 0
    assert run.train(until="smt").progress.stages[0].skipped == 4


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_a_skipped_step_changes_no_weight(tmp_path: Path, on_host: bool):
    config = replace(SMALL.smt, on_nonfinite="skip")
    runs: list[Run] = []
    task = PoisonedTask(poisoned(runs, range(0, 1)))
    run = Run.create(SMALL, tmp_path / "run", task=task)
    runs.append(run)
    task.batches = 0
    trainer = Trainer(run.objective("smt"), config, run.task, run.engine, seed=0)
    trainer.check_on_host = on_host
    before = [p.clone() for p in trainer.ordered]
    trainer.train_step()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.ordered, strict=True))
    assert trainer.check() == 1
    trainer.train_step()
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.ordered, strict=True))


# ------------------------------------------------------------------------------- the machine


def test_out_of_memory_names_the_setting_and_the_size(tmp_path: Path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr(Trainer, "train_step", full)
    run = Run.create(SMALL, tmp_path / "run")
    with pytest.raises(MemtrainError) as caught:
        run.train()
    text = str(caught.value)
    assert "Tried to allocate 20.00 GiB" in text and "\n" not in text
    assert """; changes={"smt.accumulate": 2} of Run.open takes 2 at a time""" in text
    assert "optimizer need 0.00 GiB" in text and "--" not in text
    assert "; --smt.accumulate 2 takes 2 at a time" in caught.value.command_line
    again = Run.open(run.folder, changes={"smt.accumulate": 2})  # what the message says
    assert again.config.smt.accumulate == 2


def test_out_of_memory_with_one_sequence_at_a_time_suggests_a_smaller_model():
    stage = StageConfig(batch_size=4, accumulate=4)
    weight = torch.nn.Parameter(torch.zeros(2**20))
    text = str(out_of_memory(torch.OutOfMemoryError(), "smt", stage, [weight]))
    assert "1 sequences at a time" in text and "a smaller model is needed" in text
    assert "need 0.02 GiB" in text  # 2**20 numbers of 4 bytes, four times


def test_a_clock_that_runs_backwards_gives_no_negative_seconds(tmp_path: Path, monkeypatch):
    ticks = iter(range(10**9, 0, -1))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    run = Run.create(SMALL, tmp_path / "run").train(until="smt")
    assert run.totals()["total_seconds"] == 0


def test_deterministic_mode_sets_torchs_flags():
    try:
        engine = Engine(EngineConfig(device="cpu", deterministic=True))
        assert not torch.are_deterministic_algorithms_enabled()  # an engine alone changes nothing
        engine.apply_globals()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


# ---------------------------------------------------------------------------------- the best


def test_the_best_checkpoint_is_the_one_with_the_lowest_held_out_loss(tmp_path: Path):
    log = replace(TINY.log, evaluate_every=1, checkpoint_every=100)
    run = Run.create(replace(SMALL, log=log), tmp_path / "run").train()
    seen = [(r["evaluation"]["rnn"]["nats"], r["total_steps"]) for r in run.metrics.read()]
    nats, step = min(seen)
    assert run.progress.best is not None and run.progress.best.nats == nats
    best = Run.open(tmp_path / "run", best=True)
    assert best.progress.global_step == step
    assert best.evaluate(log.evaluate_sequences).rnn.nats == pytest.approx(nats)


def test_the_command_line_option_best_evaluates_the_best_checkpoint(tmp_path: Path, capsys):
    run = Run.create(SMALL, tmp_path / "run").train()
    best = Run.open(tmp_path / "run", best=True).totals()["total_steps"]
    for arguments, steps in (([], run.totals()["total_steps"]), (["--best"], best)):
        assert (
            cli.main(["eval", str(tmp_path / "run"), "--sequences", "8", "--json", *arguments]) == 0
        )
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["total_steps"] == steps


def test_progress_that_does_not_fit_the_config_is_refused(tmp_path: Path):
    Run.create(SMALL, tmp_path / "run").train(until="smt")
    path = tmp_path / "run" / "config.json"
    stages = {"smt": replace(SMALL.smt, steps=0), "dmt": replace(SMALL.dmt, steps=0)}
    path.write_text(to_json(replace(SMALL, **stages, bptt=replace(SMALL.bptt, steps=3))))
    with pytest.raises(CheckpointError, match="progress does not fit the config"):
        Run.open(tmp_path / "run")


def test_a_checkpoint_that_claims_other_data_is_refused(tmp_path: Path):
    run = Run.create(SMALL, tmp_path / "run")
    run.progress.data = "another"
    run.train(until="smt")
    with pytest.raises(MemtrainError, match="retrieval: is not the data that .* learned from"):
        Run.open(tmp_path / "run")
