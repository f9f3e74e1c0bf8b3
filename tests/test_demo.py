"""The demo in miniature: its table, its page, its fairness."""

from dataclasses import replace
from pathlib import Path

import pytest

import memtrain.demo
from conftest import TINY
from memtrain.config import RunConfig
from memtrain.demo import run_demo
from memtrain.train.metrics import Reporter


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


def test_the_page_asks_nobody_for_anything(demo):
    _, _, page = demo
    assert "http://" not in page and "https://" not in page
    for title in ("Accuracy against training seconds", "sequential operations", "1 − R²"):
        assert title in page


def test_a_second_demo_replaces_the_first(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(memtrain.demo, "recipe", tiny_recipe)
    run_demo(tmp_path, 0, 6, Reporter)
    run_demo(tmp_path, 1, 6, Reporter)
    assert "Seed 1" in (tmp_path / "index.html").read_text()
