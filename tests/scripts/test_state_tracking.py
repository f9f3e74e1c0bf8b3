"""State tracking: rates are chosen apart, the methods have equal steps, and the plan continues."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from conftest import load_script_inline


@pytest.fixture
def script(monkeypatch):
    return load_script_inline("state_tracking", monkeypatch)


def line(task="parity", method="smt-dmt", rate=1e-3, seed=0, choice=0.5, **rest):
    at = {"lengths": [16, 32, 64, 128, 256, 1024], "steps": 3, "seconds": 1.5}
    scores = {"rnn": [1.0, 1.0, 1.0, 0.95, 0.9, 0.8], "teacher": [0.9, 0.7, 0.6, 0.5, 0.5, 0.5]}
    return dict(task=task, method=method, rate=rate, seed=seed, choice=choice) | at | scores | rest


def test_both_sides_have_the_same_steps_and_sequences(script):
    scale = script.SCALES["cpu"]
    for task in script.TASKS:
        for method in script.METHODS:
            config = script.config_of(
                script.Plan(task=task, method=method, rate=1e-3, seed=1), scale
            )
            stages = [stage for stage in config.stages().values() if stage.steps]
            assert sum(one.steps for one in stages) == scale.smt_steps + scale.dmt_steps
            assert {one.batch_size for one in stages} == {scale.batch_size}
            assert bool(config.bptt.steps) == method.startswith("bptt")
            assert config.seed == 1 and config.data == script.TASKS[task].data


def test_smt_begins_with_shorter_sequences(script):
    plan = script.Plan(task="parity", method="smt-dmt", rate=1e-3, seed=0)
    curricula = {
        name: script.config_of(plan, scale).smt.curriculum for name, scale in script.SCALES.items()
    }
    assert curricula == {
        "smoke": (),
        "cpu": ((4, 300), (8, 500)),
        "gpu": ((4, 1200), (8, 2000)),
    }


def test_lengths_are_multiples_of_the_trained_one_and_two_long_ones(script):
    assert script.lengths("parity") == [16, 32, 64, 128, 256, 1024]
    assert script.lengths("retrieval") == [32, 64, 128, 256, 1024, 4096]


def test_the_best_rate_is_that_of_seed_0_on_the_other_sequences(script):
    low, high = script.RATES["smt-dmt"]
    first = line(rate=low, choice=0.6)
    assert script.best_rates([first]) == {}, "the other rate is not done"
    second = line(rate=high, choice=0.7)
    assert script.best_rates([first, second]) == {("parity", "smt-dmt"): high}
    misleading = line(rate=low, choice=0.9, seed=1)
    assert script.best_rates([first, second, misleading]) == {("parity", "smt-dmt"): high}
    failed = {key: second[key] for key in ("task", "method", "rate", "seed")} | {"failed": "died"}
    assert script.best_rates([first, failed]) == {("parity", "smt-dmt"): low}


def test_other_seeds_wait_for_the_rate_and_failed_runs_are_tried_again(script):
    options = Namespace(tasks=["parity"], methods=["smt-dmt"], seeds=3)
    low, high = script.RATES["smt-dmt"]

    def open_plans(results):
        return [(plan.rate, plan.seed) for plan in script.plans(options, results)]

    assert open_plans([]) == [(low, 0), (high, 0)]
    assert open_plans([line(rate=low), line(rate=high, failed="died")]) == [
        (high, 0),
        (low, 1),
        (low, 2),
    ]
    both = [line(rate=low), line(rate=high, choice=0.6)]
    assert open_plans(both) == [(high, 1), (high, 2)]
    assert open_plans([*both, line(rate=high, seed=1), line(rate=high, seed=2)]) == []


def test_the_table_has_means_the_teacher_and_the_seeds_that_track(script):
    low, high = script.RATES["smt-dmt"]
    results = [line(rate=low, choice=0.1), line(rate=high)]
    results += [line(rate=high, seed=1, rnn=[1.0, 1.0, 1.0, 0.85, 0.6, 0.5])]
    text = script.table(results)
    rows = [row for row in text.splitlines() if row.startswith("| SMT") or "teacher" in row]
    assert rows == [
        f"| SMT → DMT, Transformer cell | {high:g} | 1.000 | 1.000 | 1.000 | 0.900 | 0.750 | "
        "0.650 | 0.95, 0.85 | 3 | 2 |",
        f"| {script.TEACHER} | {high:g} | 0.900 | 0.700 | 0.600 | 0.500 | 0.500 | 0.500 | "
        "0.50, 0.50 | 3 | 2 |",
    ]
    assert "Chance 0.5. Seeds of at least 0.9 at 8T: SMT → DMT, Transformer cell 1." in text


def test_a_length_at_which_the_teacher_was_not_scored_is_left_empty(script):
    rate, results = script.RATES["smt-dmt"][0], []
    for one in script.RATES["smt-dmt"]:
        found = line("retrieval", rate=one, choice=1 if one == rate else 0)
        found |= {"lengths": script.lengths("retrieval"), "teacher": [1.0] * 5 + [None]}
        results.append(found)
    rows = [row for row in script.table(results).splitlines() if "teacher" in row]
    assert rows == [f"| {script.TEACHER} | {rate:g} |{' 1.000 |' * 5}  | 1.00 | 3 | 2 |"]


@pytest.mark.slow
def test_a_plan_is_trained_scored_and_continued(script, tmp_path: Path, monkeypatch, capsys):
    command = f"state_tracking --folder {tmp_path} --processes 1 --scale smoke --seeds 2"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--tasks", "parity"])
    assert script.main() == 0
    lines = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 5 * 3, "five methods: two rates with seed 0, and seed 1"
    assert all("failed" not in one and one["steps"] == 3 for one in lines)
    assert {one["method"]: one["teacher"][0] is None for one in lines} == {
        "smt-dmt": False,
        "smt-dmt-gru": False,
        "bptt-gru": True,
        "bptt-lstm": True,
        "bptt-attention": True,
    }
    shown = capsys.readouterr().out
    assert script.main() == 0  # nothing is left to train
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(lines)
    assert capsys.readouterr().out == shown == (tmp_path / "table.md").read_text()
