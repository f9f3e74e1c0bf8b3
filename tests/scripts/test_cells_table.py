"""The table of cells: it continues, names what does not wrap, and counts what is solved."""

import json
import sys
from pathlib import Path

import pytest

from conftest import load_script, load_script_inline

FEW = "--processes 1 --tasks retrieval --length 4 --width 8 --sequences 4 --retrieval-steps 2 1"


def test_a_table_is_written_and_continued(tmp_path: Path, monkeypatch, capsys):
    script = load_script_inline("cells_table", monkeypatch)
    only = ["--only", "lstm", "torch.nn:GRUCell", "torch.nn:Linear"]
    monkeypatch.setattr(
        sys, "argv", ["cells_table", "--folder", str(tmp_path), *FEW.split(), *only]
    )
    assert script.main() == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted((one["cell"], one["method"]) for one in lines) == [
        ("lstm", "bptt"),
        ("lstm", "smt-dmt"),
        ("torch.nn:GRUCell", "bptt"),
        ("torch.nn:GRUCell", "smt-dmt"),
    ]
    assert all(one["steps"] == 3 and "failed" not in one for one in lines)
    shown = capsys.readouterr().out
    assert "| torch.nn:Linear | no: " in shown and "2 of 3 cells wrap" in shown
    assert script.main() == 0  # nothing is left to train
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4
    assert capsys.readouterr().out == shown


def test_trained_and_solved_are_judged_by_the_results():
    script = load_script("cells_table")
    one = {"nats": 0.1, "untrained_nats": 2.0, "accuracy": 0.995}
    assert script.is_trained(one) and script.is_solved(one)
    for worse in ({"nats": 2.1}, {"nats": float("nan")}, {"failed": "diverged"}):
        assert not script.is_trained(one | worse)
    assert not script.is_solved(one | {"accuracy": 0.98})


@pytest.mark.parametrize("task", ["retrieval", "digits"])
def test_both_methods_have_the_same_steps_and_seconds(task: str):
    script = load_script("cells_table")
    options = script.argparse.Namespace(
        steps={task: (30, 12)}, seconds=10.0, length=8, width=16, sequences=4
    )
    stages = [
        [*script.config_of("gru", task, method, options).stages().values()]
        for method in script.METHODS
    ]
    assert [sum(one.steps for one in each) for each in stages] == [42, 42]
    assert [sum(one.seconds for one in each) for each in stages] == [10.0, 10.0]
