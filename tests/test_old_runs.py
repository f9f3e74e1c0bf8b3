"""Run folders of an older memtrain (commit 9b37a44): they open, resume, evaluate and write as they
did. fixtures/run-9b37a44/make.py made them with that memtrain, and recorded what it got of them."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memtrain
from conftest import TINY
from memtrain.cli import main

OLD = Path(__file__).parent / "fixtures" / "run-9b37a44"
EXPECTED = json.loads((OLD / "expected.json").read_text())
INTERRUPTED = ("task", "gru")
CLOCK = {"total_seconds"}
"""What differs from one training to the next."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the run that the test names."""
    return shutil.copytree(OLD / request.param, tmp_path / request.param)


def all_runs(test: Any) -> Any:
    return pytest.mark.parametrize("folder", list(EXPECTED), indirect=True)(test)


def interrupted_runs(test: Any) -> Any:
    return pytest.mark.parametrize("folder", INTERRUPTED, indirect=True)(test)


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """The same keys, and numbers equal to 1e-5; keys that are new since then are let pass."""
    if isinstance(expected, dict):
        for key in expected.keys() - CLOCK:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-7), (where, found, expected)
    else:
        assert found == expected, where


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints."""
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out


@all_runs
def test_an_old_run_opens_and_evaluates_to_the_recorded_scores(folder: Path):
    run = memtrain.Run.open(folder)
    expected = EXPECTED[folder.name]["opened"]["evaluation"]
    assert run.finished == (folder.name not in INTERRUPTED)
    assert_close(asdict(run.evaluate(expected["sequences"])), expected)


@interrupted_runs
def test_an_interrupted_old_run_resumes_to_the_recorded_result(folder: Path):
    before, expected = metrics(folder), EXPECTED[folder.name]
    run = memtrain.Run.open(folder).train(memtrain.Reporter())
    assert run.finished
    after = metrics(folder)
    assert after[: len(before)] == before
    assert_close(after[len(before) :], expected["resumed"])
    evaluation = expected["finished"]["evaluation"]
    found = memtrain.Run.open(folder).evaluate(evaluation["sequences"])
    assert_close(asdict(found), evaluation)


@all_runs
def test_the_network_of_an_old_run_loads_and_reads(folder: Path):
    tokens = torch.tensor([[1, 2, 0, 3, 0]])
    with torch.no_grad():
        logits = memtrain.load_rnn(folder).rnn(tokens)
        expected = memtrain.Run.open(folder).rnn(tokens)
    torch.testing.assert_close(logits, expected)


@all_runs
def test_the_best_checkpoint_of_an_old_run_loads(folder: Path):
    memtrain.Run.open(folder, best=True)
    memtrain.load_rnn(folder, best=True)


def test_an_old_run_of_images_generates_the_recorded_samples():
    model = memtrain.load_rnn(OLD / "digits")
    written = memtrain.generate(model, temperature=0.0)
    assert np.array_equal(written.tokens[0], EXPECTED["digits"]["opened"]["written"])


@pytest.mark.parametrize("folder", ["task"], indirect=True)
def test_the_command_line_resumes_and_evaluates_an_old_run(folder: Path, capsys):
    before, expected = len(metrics(folder)), EXPECTED[folder.name]
    command(capsys, "resume", str(folder))
    assert_close(metrics(folder)[before:], expected["resumed"])
    sequences = expected["finished"]["evaluation"]["sequences"]
    output = command(capsys, "eval", str(folder), "--json", "--sequences", str(sequences))
    assert_close(json.loads(output), expected["finished"]["evaluation"])


@pytest.mark.parametrize("folder", ["digits", "gru"], indirect=True)
def test_the_command_line_evaluates_old_runs_finished_and_interrupted(folder: Path, capsys):
    output = json.loads(command(capsys, "eval", str(folder), "--json", "--sequences", "8"))
    assert math.isfinite(output["rnn"]["nats"])


def test_a_retrieval_run_that_is_older_than_the_needles_field_keeps_its_task(tmp_path: Path):
    config = replace(TINY, data=replace(TINY.data, needle_within=1.0))
    run = memtrain.Run.create(config, tmp_path / "run")
    scores = run.train(memtrain.Reporter()).evaluate(64)
    path = tmp_path / "run" / "config.json"
    plain = json.loads(path.read_text())
    del plain["data"]["needle_within"]
    path.write_text(json.dumps(plain))
    opened = memtrain.Run.open(tmp_path / "run")
    assert opened.config == config
    assert asdict(opened.evaluate(64)) == asdict(scores)
