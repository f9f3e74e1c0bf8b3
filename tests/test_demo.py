"""The demo in miniature: its table, its page, its fairness."""

from dataclasses import replace
from pathlib import Path

import pytest

import memtrain.demo
from conftest import TINY
from memtrain.config import RunConfig
from memtrain.demo import BaselineProcess, run_demo
from memtrain.errors import MemtrainError
from memtrain.runs.progress import MetricsFile
from memtrain.training.console import Reporter


def tiny_recipe(name: str) -> RunConfig:
    if name == "retrieval":
        return replace(TINY, bptt=replace(TINY.bptt, steps=0))
    return replace(
        TINY,
        smt=replace(TINY.smt, steps=0),
        dmt=replace(TINY.dmt, steps=0),
        bptt=replace(TINY.bptt, steps=1),
    )


@pytest.fixture
def demo(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(memtrain.demo, "recipe", tiny_recipe)
    rows = run_demo(tmp_path, 0, 6, Reporter)
    return rows, capsys.readouterr().out, (tmp_path / "index.html").read_text()


def test_the_table_has_every_method_with_its_cost(demo):
    rows, printed, page = demo
    names = [row.name for row in rows]
    assert names == ["teacher", "RNN, SMT", "RNN, SMT → DMT", "RNN, BPTT"]
    for row in rows:
        assert f"{row.score.accuracy:.4f}" in printed and f"{row.score.accuracy:.4f}" in page
        assert f"{row.cost['total_sequential_ops']:,}" in page
    assert rows[2].cost["total_steps"] == 12 + 8 and rows[1].cost["total_steps"] == 12


def test_bptt_gets_at_least_equal_steps(demo):
    rows, _, _ = demo
    assert rows[3].cost["total_steps"] >= rows[2].cost["total_steps"]


def test_the_page_loads_nothing_from_elsewhere(demo):
    _, _, page = demo
    assert "http://" not in page and "https://" not in page
    for title in ("Accuracy against training seconds", "sequential operations", "1 − R²"):
        assert title in page


def test_the_page_marks_where_dmt_begins_and_shows_the_measured_numbers(demo, tmp_path: Path):
    _, _, page = demo
    records = MetricsFile(tmp_path / "smt-dmt" / "metrics.jsonl").read()
    evaluations = [record for record in records if "evaluation" in record]
    smt = [record for record in evaluations if record["stage"] == "smt"][-1]
    assert page.count(">DMT begins</text>") == page.count("stroke-dasharray: 2,3") == 2
    assert smt["total_seconds"] < evaluations[-1]["total_seconds"]
    before, after = (one["evaluation"]["rnn"]["accuracy"] for one in (smt, evaluations[-1]))
    assert (
        page.count(f"It is at {before:.3f} where DMT begins and at {after:.3f} at the end. ") == 2
    )
    drifts = [one["evaluation"]["drift"] for one in (smt, evaluations[-1])]
    assert f"leaves {drifts[0]['one_step_unexplained']:.3f} of the variance" in page
    for drift in drifts:
        assert f"ends at {drift['unexplained'][-1]:.3f}." in page
    assert "jumps" not in page and "8 steps after SMT&#x27;s 12" in page


def test_a_second_demo_replaces_the_first(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(memtrain.demo, "recipe", tiny_recipe)
    run_demo(tmp_path, 0, 6, Reporter)
    run_demo(tmp_path, 1, 6, Reporter)
    assert "Seed 1" in (tmp_path / "index.html").read_text()


def test_side_by_side_bptt_gets_the_longer_of_equal_steps_and_seconds(
    tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(memtrain.demo, "recipe", tiny_recipe)
    heard = []

    class Listener(Reporter):
        def stage(self, name: str, step: int, steps: int) -> None:
            heard.append(name)

    rows = run_demo(tmp_path, 0, 6, Listener, alongside=True)
    ours, theirs = rows[2].cost, rows[3].cost
    assert ours["total_steps"] == 12 + 8
    assert theirs["total_steps"] >= ours["total_steps"]
    assert theirs["total_seconds"] >= ours["total_seconds"]
    assert heard[:2] == ["smt", "dmt"]
    assert "side by side" in capsys.readouterr().out
    assert "at the same time" in (tmp_path / "index.html").read_text()


def test_an_error_of_the_baseline_ends_the_demo(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(memtrain.demo, "recipe", tiny_recipe)
    (tmp_path / "bptt").mkdir()
    (tmp_path / "bptt" / "precious.txt").write_text("mine")
    with pytest.raises(MemtrainError, match="holds files that are not a run"):
        run_demo(tmp_path, 0, 6, Reporter, alongside=True)


def test_an_invalid_length_is_refused_before_anything_is_printed(tmp_path: Path, capsys):
    with pytest.raises(MemtrainError, match="sequence_length=0"):
        run_demo(tmp_path, 0, 0, Reporter)
    assert capsys.readouterr().out == ""


def bptt_alone() -> RunConfig:
    nothing = {name: replace(getattr(TINY, name), steps=0) for name in ("smt", "dmt")}
    return replace(TINY, bptt=replace(TINY.bptt, steps=1), **nothing)


def test_a_dead_baseline_process_does_not_hang(tmp_path: Path):
    with BaselineProcess(bptt_alone(), tmp_path / "run", 1000) as baseline:
        baseline.process.kill()
        baseline.process.join()
        with pytest.raises(MemtrainError, match="ended, exit code -9"):
            baseline.finish(1.0, Reporter())


def test_leaving_early_ends_the_baseline_process(tmp_path: Path):
    with (
        pytest.raises(ZeroDivisionError),
        BaselineProcess(bptt_alone(), tmp_path / "run", 5) as baseline,
    ):
        raise ZeroDivisionError
    assert not baseline.process.is_alive()
