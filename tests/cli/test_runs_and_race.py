"""memtrain runs, compare and race: output, and one line with the remedy for every mistake."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import refused
from matplotlib.image import imread

from conftest import TINY
from memtrain.cli import main
from memtrain.config import BPTTConfig, DMTConfig, SMTConfig
from memtrain.training.console import Reporter
from memtrain.training.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trained_tiny: Run) -> Path:
    """runs/ with two trained runs and one without a step, and some files."""
    folder = tmp_path_factory.mktemp("commands")
    quick = replace(TINY, smt=SMTConfig(), dmt=DMTConfig(), bptt=BPTTConfig(steps=4, batch_size=4))
    shutil.copytree(trained_tiny.folder, folder / "runs/first")
    Run.create(quick, folder / "runs/a-rather-long-name-of-a-run").train(Reporter())
    Run.create(quick, folder / "runs/new")
    (folder / "short.txt").write_text("too short\n" * 60)
    (folder / "empty").mkdir()
    (folder / "mine").mkdir()
    (folder / "mine/notes.txt").write_text("mine")
    (folder / "book.txt").write_text("In the beginning was the word.\n" * 3000)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    return folder


def test_runs_are_listed_in_80_columns(here: Path, capsys):
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "method", "params", "steps", "loss", "sec", "state", "ago"]
    assert lines[1].split()[0] == "new" and len(lines) == 6
    assert lines[2].startswith("a-rather-long-name-of-a-run")
    assert "data retrieval, cell transformer" in lines[4]
    assert lines[5].endswith("nats per target")


def test_runs_are_sorted_as_wished(here: Path, capsys):
    assert main(["runs", "--sort", "steps", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["steps"] for one in found] == [24, 4, 0]
    assert found[0]["state"] == "finished" and found[0]["rnn"] > 0


def test_compare_prints_tables_and_draws_a_figure(here: Path, capsys):
    chosen = ["runs/first", "runs/a-rather-long-name-of-a-run"]
    assert main(["compare", *chosen]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert "settings that differ" in out and "smt.steps" in out
    assert imread("runs/compare.png").ndim == 3
    assert main(["compare", *chosen, "--out", "deep/figure.svg", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["run"] for one in found["runs"]] == ["first", "a-rather-long-name-of-a-run"]
    assert Path("deep/figure.svg").read_text().startswith("<?xml")


def test_help_names_what_a_race_measures(capsys):
    with pytest.raises(SystemExit):
        main(["race", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "PPMd" in out and "--minutes X" in out and "outside of the clock" in out


WRONG = [
    ("runs nowhere", "nowhere: no such folder; memtrain train makes runs in runs/"),
    ("runs empty", "empty: holds no runs; memtrain train makes one"),
    ("runs --sort size", "--sort=size: must be one of changed, name, data, loss, steps, seconds"),
    ("runs --jsn", "--jsn: no such option; did you mean --json?"),
    ("compare", "name at least two run folders; memtrain runs lists them"),
    ("compare runs/first", "runs=1: name at least two run folders"),
    ("compare runs/first runs/first", "runs/first: given twice; leave one out"),
    ("compare first new", "first: no run there; did you mean runs/first?"),
    ("compare runs/first nothing", "nothing: no run there; config.json is missing"),
    ("compare runs/first runs/new", "no held-out loss yet; memtrain resume runs/new trains it"),
    ("compare runs/first runs/new --out x.txt", "--out x.txt: must end in .png, .svg, .pdf"),
    ("race", "DATA: is missing; see memtrain race --help"),
    ("race nothing.txt", "data=nothing.txt: no such file or folder"),
    ("race book.txt --minutes 0", "--minutes=0: must be above 0, for example 10"),
    ("race book.txt --minutes nan", "--minutes=nan: must be above 0"),
    ("race book.txt --minutes ten", "--minutes=ten: must be a number"),
    ("race book.txt --minute 3", "--minute: no such option; did you mean --minutes?"),
    ("race book.txt --size big", "size='big': must be one of medium, paper, small, tiny"),
    ("race book.txt --methods gru", "methods='gru': a race needs at least two; memtrain train"),
    ("race book.txt --methods gru,rnn", "methods='rnn': must be one of attention, bptt, gru"),
    ("race book.txt --methods gru,gru", "methods='gru': given twice; leave one out"),
    ("race book.txt --device gpu", "device='gpu': must be"),
    ("race book.txt --threads -1", "--threads=-1: must be from 0 (one per core)"),
    ("race book.txt --option size 28", "size: text has no such option"),
    ("race book.txt --folder mine", "mine: holds files that are not a race; choose an empty"),
    ("race short.txt", "holds out 0 sequences of 256 tokens, a race needs 10; race with more data"),
    ("race runs/first", "runs/first: is a run; memtrain race takes data, such as book.txt"),
]


@pytest.mark.parametrize(("command", "message"), WRONG, ids=[command for command, _ in WRONG])
def test_a_mistake_is_answered_by_one_line_with_the_remedy(here: Path, capsys, command, message):
    assert message in refused(capsys, *command.split())
    assert not Path("runs/race-book").exists()
