"""Runs are listed from their files: state, progress, losses; damaged ones with the reason."""

import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import memtrain
from conftest import TINY
from memtrain.errors import MemtrainError
from memtrain.models.teacher import count_parameters
from memtrain.runs.listing import is_training, list_runs, summarize
from memtrain.runs.processes import Interrupted
from memtrain.runs.run_folder import held
from memtrain.training.run import Run
from run_testing import StopAt

OLD = Path(__file__).parents[1] / "fixtures" / "run-9b37a44"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, trained_tiny: Run) -> Path:
    """A finished run, one stopped in its second stage, one in a subfolder without any step."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(trained_tiny.folder, folder / "whole")
    with suppress(Interrupted):
        Run.create(TINY, folder / "half").train(StopAt("dmt", 4))
    Run.create(replace(TINY, name="new"), folder / "deep" / "er" / "new")
    return folder


def test_a_finished_run_is_described(runs: Path):
    found, run = summarize(runs / "whole"), Run.open(runs / "whole")
    assert (found.state, found.method, found.cell) == ("finished", "smt-dmt-bptt", "transformer")
    assert (found.data, found.loss, found.stage) == ("retrieval", "nats per target", "bptt")
    assert found.parameters == count_parameters(run.rnn)
    assert (found.steps, found.planned) == (24, 24)
    totals = run.totals()
    assert found.tokens == totals["total_tokens"] and found.seconds == totals["total_seconds"]
    assert found.sequential_ops == totals["total_sequential_ops"]
    last = [line for line in run.metrics.read() if "evaluation" in line][-1]["evaluation"]
    assert (found.rnn, found.teacher) == (last["rnn"]["nats"], last["teacher"]["nats"])
    assert found.best is not None and found.rnn is not None and found.best <= found.rnn


def test_a_stopped_run_names_its_stage_and_a_new_one_has_no_loss(runs: Path):
    half = summarize(runs / "half")
    assert (half.state, half.stage, half.steps) == ("stopped", "dmt", 16)
    new = summarize(runs / "deep" / "er" / "new")
    assert (new.state, new.steps, new.rnn, new.parameters, new.loss) == (
        "stopped",
        0,
        None,
        None,
        "",
    )


def test_a_run_is_running_while_its_lock_is_held(runs: Path):
    assert not is_training(runs / "half")
    with held(runs / "half"):
        assert is_training(runs / "half")
        assert summarize(runs / "half").state == "running"
    assert not is_training(runs / "half")


def test_looking_at_a_run_does_not_change_it(runs: Path):
    before = {path: path.stat().st_mtime_ns for path in (runs / "half").rglob("*")}
    list_runs(runs)
    assert before == {path: path.stat().st_mtime_ns for path in (runs / "half").rglob("*")}


def test_all_runs_are_found_and_the_last_changed_comes_first(runs: Path):
    found = list_runs(runs)
    assert [one.folder.name for one in found] == ["new", "half", "whole"]
    assert list_runs(runs / "whole")[0].name == "tiny"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", b"{", "not a config"),
        ("metrics.jsonl", b"no line\n", "line 1"),
        ("checkpoints/00000024/state.json", b'{"progress": 3}', "progress: must be an object"),
    ],
)
def test_a_damaged_run_is_listed_with_the_reason(runs, tmp_path, file, content, problem):
    shutil.copytree(runs / "whole", tmp_path / "run")
    for other in (tmp_path / "run" / "checkpoints").iterdir():
        if file.startswith("checkpoints") and other.name != "00000024":
            shutil.rmtree(other)
    (tmp_path / "run" / file).write_bytes(content)
    (found,) = list_runs(tmp_path)
    assert found.state == "damaged" and problem in found.problem


def test_runs_of_older_versions_are_listed():
    found = {one.name: one for one in list_runs(OLD)}
    assert found["digits"].loss == "nats per pixel" and found["digits"].state == "finished"
    assert found["gru"].cell == "gru" and found["gru"].parameters == 1776


def test_a_frame_has_a_row_per_run(runs: Path):
    frame = memtrain.runs(runs)  # type: ignore[operator]
    assert list(frame["name"]) == ["new", "tiny", "tiny"]
    assert {"folder", "rnn", "teacher", "steps", "state", "seconds"} <= set(frame.columns)
    assert frame["steps"].sum() == 40


def test_the_module_of_runs_can_still_be_imported_from():
    from memtrain.runs.progress import Progress

    assert Progress().step == 0 and callable(memtrain.runs)


def test_a_missing_folder_and_a_missing_package_are_named(tmp_path: Path, monkeypatch):
    with pytest.raises(MemtrainError, match="no such folder; memtrain train makes runs"):
        memtrain.runs(tmp_path / "nothing")  # type: ignore[operator]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MemtrainError, match=r'pip install "memtrain\[frames\]"'):
        memtrain.runs(tmp_path)  # type: ignore[operator]
