"""The plans of runs for a GPU: their configs build, and their first steps are finite."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import TINY, load_script
from memtrain.config import EngineConfig, RunConfig
from memtrain.training.run import Run
from memtrain.training.step import Trainer

PLANS = sorted((Path(__file__).parents[2] / "scripts" / "plans").glob("*.py"))
LONG = runpy.run_path(str(next(path for path in PLANS if path.stem == "retrieval_long")))
SMALLEST = {}
for _name, _config in LONG["RUNS"].items():
    SMALLEST.setdefault(_name.rsplit("-", 1)[0], _config)


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_a_plan_is_a_dict_of_configs(plan: Path):
    runs = runpy.run_path(str(plan))["RUNS"]
    assert runs and all(isinstance(config, RunConfig) for config in runs.values())


@pytest.mark.parametrize("name", SMALLEST)
def test_a_run_on_long_sequences_takes_a_step_of_each_stage(name: str):
    """At the shortest length of its curriculum (of DMT, 8 tokens) and two sequences per step; its
    other lengths are checked when the run is built."""
    config = replace(SMALLEST[name], engine=EngineConfig(device="cpu"))
    run, lengths = Run(config), {}
    for stage in run.stages:
        small = replace(config.stages()[stage], batch_size=2, seconds=0.0, curriculum=((8, 1),))
        trainer = Trainer(run.objective(stage), small, run.task, run.engine, seed=0)
        with trainer.frozen_rest():
            assert float(trainer.train_step()["loss"]) > 0
        lengths[stage] = trainer.length
    assert set(lengths.values()) == {8}


def test_both_sides_of_the_long_plan_have_the_same_lengths_and_steps():
    runs = LONG["RUNS"]
    for length in (256, 1024, 4096):
        ours = runs[f"smt-dmt-T{length}-seed0"]
        for cell in ("transformer-T{}-0.0003", "gru-T{}-0.001", "lstm-T{}-0.001"):
            other = runs[f"bptt-{cell.format(length)}"]
            assert other.bptt.curriculum == ours.smt.curriculum
            assert other.bptt.steps == ours.smt.steps + ours.dmt.steps
            assert other.data == ours.data and other.data.sequence_length == length


def test_runs_of_a_plan_are_scored_after_each_stage_and_resumed(tmp_path: Path):
    script = load_script("many_runs")
    config = replace(TINY, log=replace(TINY.log, evaluate_every=0))
    Run.create(config, tmp_path / "one").train(until="smt")
    result = script._attempt("one", config, tmp_path, 8)
    assert list(result["scores"]) == ["dmt", "bptt"]
    assert [stage["steps"] for stage in result["stages"]] == [12, 8, 4]
    assert "| one | dmt |" in script.table([result])
    broken = replace(config, name="x", data=replace(TINY.data, vocab_size=9))
    (tmp_path / "two").write_text("a file")
    assert "failed" in script._attempt("two", broken, tmp_path, 8)


def test_a_run_that_the_plan_does_not_have_is_refused(monkeypatch, capsys):
    plan = next(path for path in PLANS if path.stem == "retrieval_long")
    arguments = ["many_runs.py", str(plan), "--only", "smt-dmt-T256-seed9"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        load_script("many_runs").main()
    assert "has no such run; did you mean smt-dmt-T256-seed" in capsys.readouterr().err
