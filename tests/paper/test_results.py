"""Reproduce folders from anywhere: they import nothing, write nowhere else, may lie anywhere, and
whatever is wrong with one is a line."""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from memtrain.cli import main
from memtrain.config import Retrieval, Stream
from memtrain.config.serialize import from_json, read_config, to_json
from memtrain.errors import MemtrainError
from memtrain.paper import load
from memtrain.paper.base import ADDED_FIELDS, Experiment, Job, Result, Setup, Verdict
from memtrain.paper.job import Done, Failed, attempt, collect
from memtrain.paper.report import make_report
from memtrain.paper.reproduce import outcome, reproduce
from memtrain.paper.results import ResultsFile, StoredSetup, read_setup, write_setup
from memtrain.paper.toy_data import EVALUATE_LENGTH, located, store
from memtrain.training.run import Run

COST = {"steps": 3, "tokens": 30, "sequential_ops": 300, "seconds": 0.5}
POINT = {"stage": "smt", "rnn_nats": 1.5, "rnn_accuracy": 0.4, **COST}
FIGURE = """
from pathlib import Path
Path("imported").touch()
from memtrain.plotting.style import panels
from memtrain.paper.base import Experiment, Job, Verdict
from memtrain.recipes import recipe

class Figure(Experiment):
    name = "f"
    claim = "It is imported."
    def grid(self, setup):
        return [Job(config=recipe("retrieval"), train=False)]
    def judge(self, setup, results):
        return Verdict(holds=True, sentence="1.", numbers={})
    def plot(self, setup, results):
        return panels(1, 1)[0]
"""


def fill(folder: Path, name: str, **measured: Any) -> Path:
    """A folder with made-up results of a figure, as if its grid had been run."""
    setup = Setup(folder=folder, prepares=False)
    write_setup(
        folder,
        StoredSetup(scale="smoke", data_dir="data", device="cpu", figures=[name], root=setup.root),
    )
    for job in load(name).grid(replace(setup, device="cpu")):
        ResultsFile(folder).append(
            Result(
                figure=name,
                version=1,
                job=job.name,
                key=job.key,
                tags=dict(job.tags),
                measured={"rnn_accuracy": 0.5, "teacher_accuracy": 0.6} | measured,
                cost=dict(COST),
                curve=[dict(POINT), dict(POINT)],
            )
        )
    return folder


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that is refused."""
    assert main(list(arguments)) == 2
    output = capsys.readouterr().err
    assert output.startswith("memtrain: ") and output.count("\n") == 1, output
    return output


# ----------------------------------------------------------------------------------------- code


@pytest.fixture
def own(tmp_path: Path, monkeypatch) -> Path:
    """The current folder holds a class that leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "received", raising=False)
    (tmp_path / "received.py").write_text(FIGURE)
    return tmp_path


def names_also(folder: Path, name: str) -> None:
    stored = read_setup(folder)
    assert stored is not None
    write_setup(folder, replace(stored, figures=[*stored.figures, name]))


def test_a_report_imports_a_figure_that_a_folder_names_only_if_allowed(own: Path, capsys):
    folder = fill(own / "some", "joint")
    names_also(folder, "received:Figure")
    assert main(["report", "some"]) == 0
    assert "left out received:Figure: --allow-code imports it" in capsys.readouterr().err
    assert not (own / "imported").exists() and "received" not in sys.modules
    page = (folder / "report.html").read_text()
    assert "Joint against detached" in page and "received:Figure" in page
    assert main(["report", "some", "--allow-code"]) == 0
    assert (own / "imported").exists()
    assert "It is imported." in (folder / "report.html").read_text()


def test_a_report_of_nothing_but_code_is_refused(own: Path, capsys):
    folder = own / "some"
    write_setup(
        folder,
        StoredSetup(
            scale="smoke", data_dir="d", device="cpu", figures=["received:Figure"], root="r"
        ),
    )
    assert "received:Figure would be imported; --allow-code" in refused(capsys, "report", "some")
    assert not (own / "imported").exists()


@pytest.mark.parametrize("name", ["a:b:c", ":x", "a/../../b:C", "a:", "os:path.join", "a b:C"])
def test_names_that_are_not_classes_are_refused(name: str, tmp_path: Path, capsys):
    assert "package.module:Class" in refused(capsys, "reproduce", name)
    folder = fill(tmp_path, "joint")
    (folder / "setup.json").write_text(
        json.dumps(json.loads((folder / "setup.json").read_text()) | {"figures": [name]})
    )
    assert "figures=" in refused(capsys, "report", str(folder))


def test_a_user_figure_that_cannot_be_built_is_refused(own: Path, capsys):
    (own / "half.py").write_text(FIGURE.replace("def plot", "def draw"))
    assert "cannot be created (Can't instantiate" in refused(capsys, "reproduce", "half:Figure")


class Trains(Experiment):
    """A figure of one short run."""

    name = "test_results:Trains"
    claim = "Nothing."

    def grid(self, setup: Setup) -> list[Job]:
        short = replace(
            TINY,
            smt=replace(TINY.smt, steps=2),
            dmt=replace(TINY.dmt, steps=0),
            bptt=replace(TINY.bptt, steps=0),
        )
        return [Job(config=short)]

    def measure(self, run: Run) -> dict:
        return {"n": 1}

    def judge(self, setup: Setup, results) -> Verdict:
        return Verdict(holds=True, sentence="1.", numbers={})

    def plot(self, setup: Setup, results) -> Any:
        raise KeyError("gone")


@pytest.fixture
def one_run(monkeypatch, tmp_path: Path):
    """Work of one run, and its sweep's folder, in which it was done."""
    monkeypatch.setattr("memtrain.training.stages.sequential_ops", lambda step: 1)
    monkeypatch.setattr("memtrain.paper.job.load", lambda name: Trains())
    (work,) = collect([(Trains(), job) for job in Trains().grid(Setup(folder=tmp_path))])
    assert isinstance(attempt(work, tmp_path, lambda progress: None), Done)
    return work, tmp_path


def test_a_run_with_another_config_than_its_job_is_not_opened(one_run, monkeypatch):
    work, folder = one_run
    monkeypatch.chdir(folder)
    (folder / "evil.py").write_text("open('imported', 'w')")
    path = folder / work.place / "config.json"
    config = read_config(path)
    path.write_text(to_json(replace(config, cell=replace(config.cell, kind="evil:Cell"))))
    failed = attempt(work, folder, lambda progress: None)
    assert isinstance(failed, Failed) and "config.json is not that of the job" in failed.message
    assert not (folder / "imported").exists()


# ---------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("name", ["sweep.lock", "results.jsonl", "setup.json"])
def test_reproduce_does_not_write_through_links(name: str, tmp_path: Path, capsys):
    folder, other = fill(tmp_path / "some", "joint"), tmp_path / "other"
    if (folder / name).exists():
        (folder / name).rename(other)
    other.touch()
    before = other.read_bytes()
    (folder / name).symlink_to(other)
    arguments = ["joint", "--folder", str(folder), "--device", "cpu", "--minutes", "0"]
    assert "symbolic link" in refused(capsys, "reproduce", *arguments)
    assert other.read_bytes() == before


@pytest.mark.parametrize("name", ["figures", "figures/joint.png", "report.html"])
def test_a_report_does_not_write_through_links(name: str, tmp_path: Path, capsys):
    folder, other = fill(tmp_path / "some", "joint"), tmp_path / "other"
    if name == "figures":
        other.mkdir()
    else:
        other.write_text("mine")
        (folder / "figures").mkdir()
    (folder / name).symlink_to(other)
    assert "symbolic link" in refused(capsys, "report", str(folder))
    assert not list(other.iterdir()) if name == "figures" else other.read_text() == "mine"


@pytest.mark.parametrize("ending", [".error.txt", ".lock", ""])
def test_a_worker_does_not_write_through_links(ending: str, one_run):
    work, folder = one_run
    place, other = folder / f"{work.place}{ending}", folder / "other"
    if place.exists():
        place.rename(other)
    elif ending:
        other.write_text("mine")
    place.symlink_to(other)
    before = sorted(other.rglob("*")) if other.is_dir() else other.read_bytes()
    if ending == ".error.txt":  # it is written when a run fails
        (folder / work.place / "config.json").write_text("{")
    failed = attempt(work, folder, lambda progress: None)
    assert isinstance(failed, Failed) and "\n" not in failed.message
    assert before == (sorted(other.rglob("*")) if other.is_dir() else other.read_bytes())


def test_substitute_data_is_not_written_through_links(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "data").symlink_to(tmp_path / "other")
    with pytest.raises(MemtrainError, match="symbolic link"):
        store(Setup(folder=tmp_path / "some"), "sketchy")
    assert not list((tmp_path / "other").iterdir())


def test_a_full_disk_leaves_the_old_page_and_is_named(tmp_path: Path, monkeypatch, capsys):
    folder = fill(tmp_path, "joint")
    (folder / "report.html").write_text("old")
    whole = os.fsync

    def full(descriptor: int) -> None:
        if "report.html" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    message = refused(capsys, "report", str(folder))
    assert message == f"memtrain: {folder}/report.html: No space left on device\n"
    assert (folder / "report.html").read_text() == "old"


# --------------------------------------------------------------------------------------- damage


def edit_line(number: int, **values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "results.jsonl"
        lines = path.read_text().splitlines()
        lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | values)
        path.write_text("\n".join(lines) + "\n")

    return edit


def edit_setup(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "setup.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def written(name: str, content: bytes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return edit


def replaced(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty setup": (written("setup.json", b""), "setup.json: not JSON"),
    "a list": (written("setup.json", b"[]"), "must be a JSON object"),
    "no text": (written("setup.json", b"\xff\xfe"), "not UTF-8"),
    "large setup": (written("setup.json", b" " * 2**17), "larger than"),
    "setup is a pipe": (replaced("setup.json", os.mkfifo), "is not a regular file"),
    "setup is a folder": (replaced("setup.json", os.mkdir), "is not a regular file"),
    "scale": (edit_setup(scale="huge"), "scale='huge'"),
    "no scale": (edit_setup(scale=None), "scale=None"),
    "zero byte": (edit_setup(data_dir="a\0b"), "data_dir="),
    "device": (edit_setup(device="toaster"), "device='toaster'"),
    "device is a number": (edit_setup(device=3), "device=3"),
    "root": (edit_setup(root=[]), "root=[]"),
    "figures": (edit_setup(figures="joint"), "figures='joint'"),
    "a figure": (edit_setup(figures=[["joint"]]), "figures[0]=['joint']"),
    "no figure": (edit_setup(figures=[]), "it names no figure"),
    "results are a pipe": (replaced("results.jsonl", os.mkfifo), "is not a regular file"),
    "results are a folder": (replaced("results.jsonl", os.mkdir), "is not a regular file"),
    "a blank line": (written("results.jsonl", b"\n"), "line 1"),
    "bytes": (written("results.jsonl", b"\xff\n"), "line 1: 'utf-8' codec can't decode"),
    "deep": (written("results.jsonl", b"[" * 10**5 + b"\n"), "line 1"),
    "no object": (written("results.jsonl", b"3\n"), "line 1: damaged: 3: must be a JSON object"),
    "unknown field": (edit_line(2, more=1), "line 2: damaged: more: Result has no such field"),
    "figure": (edit_line(2, figure=[]), "line 2: damaged: figure=[]"),
    "version": (edit_line(2, version=True), "line 2: damaged: version=True"),
    "tags": (edit_line(2, tags={"T": []}), "line 2: damaged: tags['T']=[]"),
    "cost": (edit_line(2, cost={"steps": 1}), "line 2: damaged: cost="),
    "cost is text": (
        edit_line(3, cost=COST | {"steps": "1"}),
        "line 3: damaged: cost['steps']='1'",
    ),
    "huge cost": (edit_line(3, cost=COST | {"steps": 10**400}), "line 3: damaged: cost="),
    "curve": (edit_line(3, curve=[{}]), "line 3: damaged: curve="),
    "curve is text": (edit_line(3, curve=[POINT | {"steps": None}]), "line 3: damaged: curve="),
    "measured": (edit_line(3, measured=[1]), "line 3: damaged: measured="),
    "too deep": (edit_line(3, measured={"a": [[[[[[[[[0]]]]]]]]]}), "line 3: damaged: measured="),
    "text measured": (
        edit_line(3, measured={"rnn_accuracy": "good"}),
        "figure joint: its results are damaged (results.jsonl, lines 1 to 4)",
    ),
    "album": (edit_line(1, measured={"rnn_accuracy": 1, "album": {"samples": 3}}), "figure joint"),
    "mixed": (edit_line(1, measured={"rnn_accuracy": 1, "x": [1], "teacher_accuracy": "a"}), ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line(damage: str, tmp_path: Path, capsys):
    folder = fill(tmp_path, "joint")
    harm, message = DAMAGE[damage]
    harm(folder)
    assert message in refused(capsys, "report", str(folder))


@pytest.mark.parametrize("damage", ["empty setup", "setup is a pipe", "scale", "bytes", "cost"])
def test_reproduce_refuses_damage_too(damage: str, tmp_path: Path, capsys):
    folder = fill(tmp_path, "joint")
    harm, message = DAMAGE[damage]
    harm(folder)
    arguments = ["joint", "--folder", str(folder), "--device", "cpu", "--minutes", "0"]
    assert message in refused(capsys, "reproduce", *arguments)


def test_invalid_numbers_still_give_a_report(tmp_path: Path):
    folder = fill(tmp_path, "joint", rnn_accuracy=float("nan"), teacher_accuracy=float("inf"))
    assert "nan" in make_report([folder]).html


def test_tags_come_from_the_job(tmp_path: Path):
    folder = fill(tmp_path, "joint")
    edit_line(1, tags={"T_f": "many"})(folder)
    assert make_report([folder]).html == make_report([fill(tmp_path / "x", "joint")]).html.replace(
        str(tmp_path / "x"), str(tmp_path)
    )


VALUES = [None, True, -1, 2**63, 0.5, 1e308, float("nan"), "", "evil:Cell", "\x1b[2J", [], {"x": 1}]


def damage_line(line: str, rng: random.Random) -> str:
    """A value anywhere in a line of JSON becomes another."""
    plain = json.loads(line)
    at: Any = {"": plain}
    key: Any = ""
    while isinstance(at[key], dict | list) and at[key] and (key == "" or rng.random() < 0.8):
        at = at[key]
        key = rng.choice(list(at) if isinstance(at, dict) else list(range(len(at))))
    at[key] = rng.choice(VALUES)
    return json.dumps(plain)


def test_any_value_anywhere_is_accepted_or_refused_with_a_reason(
    tmp_path: Path, capsys, monkeypatch
):
    """What a figure does with it is tried where it is judged; drawing each would take minutes."""
    monkeypatch.setattr("memtrain.paper.reproduce.render_figure", lambda figure: b"")
    folder, joint = fill(tmp_path, "joint"), load("joint")
    lines = {name: (folder / name).read_text() for name in ("setup.json", "results.jsonl")}
    taken = 0
    for case in range(150):
        rng = random.Random(case)
        name = rng.choice(list(lines))
        harmed = lines[name].splitlines() if name == "results.jsonl" else [lines[name]]
        index = rng.randrange(len(harmed))
        harmed[index] = damage_line(harmed[index], rng)
        (folder / name).write_text("\n".join(harmed) + "\n")
        try:
            setup = read_setup(folder)
            if setup is not None and "joint" in setup.figures:
                place = Setup(folder=folder, prepares=False, device=setup.device)
                outcome(joint, place, joint.grid(place), ResultsFile(folder).by_id())
                taken += 1
        except MemtrainError as error:
            assert "\n" not in str(error) and "\x1b" not in str(error)
        (folder / name).write_text(lines[name])
    assert 10 < taken < 140 and "evil" not in sys.modules


def test_an_error_in_a_user_figure_is_one_line_with_its_location(tmp_path: Path):
    (job,) = Trains().grid(Setup(folder=tmp_path))
    done = Result(
        figure=Trains.name, version=1, job=job.name, key=job.key, tags={}, measured={}, cost=COST,
        curve=[],
    )  # fmt: skip
    ResultsFile(tmp_path).append(done)
    message = r"lines 1 to 1\), or it cannot handle them: KeyError: 'gone' \(test_results.py:\d+\)"
    with pytest.raises(MemtrainError, match=message):
        outcome(Trains(), Setup(folder=tmp_path), [job], ResultsFile(tmp_path).by_id())


# --------------------------------------------------------------------------------------- places


def keys(name: str, setup: Setup) -> list[str]:
    return [job.key for job in load(name).grid(setup)]


def test_a_key_does_not_depend_on_the_folders_location(tmp_path: Path):
    here, there = (Setup(folder=tmp_path / name, prepares=False) for name in "ab")
    assert keys("memory-scaling", here) == keys("memory-scaling", there)
    assert keys("memory-maps", here) == keys("memory-maps", there)


def test_a_moved_folder_has_all_its_results(tmp_path: Path, monkeypatch):
    fill(tmp_path / "a", "memory-scaling", rnn_nats=1.0, teacher_nats=1.0)
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    for folder in (Path("b"), tmp_path / "b"):
        assert "runs are missing" not in make_report([folder]).html
    assert not (tmp_path / "b" / "data").exists()  # a report makes no data


KEYS = {
    "memory-scaling": "ab1445aac861",
    "mnist-samples": "920bad70ec88",
    "memory-maps": "32a5651a61af",
}
"""Of a job of each figure in runs/reproduce-smoke, as version 0.1 made them."""


@pytest.mark.parametrize("name", KEYS)
def test_a_folder_of_an_earlier_version_keeps_its_keys(name: str, tmp_path: Path):
    """If this fails because a config got a new field, name the field in `ADDED_FIELDS`."""
    root = "runs/reproduce-smoke"
    job = load(name).grid(Setup(folder=tmp_path, prepares=False))[0]
    plain = json.loads(to_json(job.config))
    plain["data"] |= {"path": f"{root}/data/tinystories"} if "path" in plain["data"] else {}
    run = tmp_path / "runs" / "some"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(plain))
    old = {"scale": "smoke", "data_dir": "data", "device": "auto", "figures": [name]}
    (tmp_path / "setup.json").write_text(json.dumps(old))
    stored = read_setup(tmp_path)
    assert stored is not None and stored.root in (root, str(tmp_path))
    found = []
    for job in load(name).grid(Setup(folder=tmp_path, root=root, prepares=False)):
        data = job.config.data
        if isinstance(data, Retrieval):  # the needle stood anywhere then
            job = replace(job, config=replace(job.config, data=replace(data, needle_within=1.0)))
        found.append(job.key)
    assert KEYS[name] in found


def test_new_fields_at_their_default_do_not_change_a_key(monkeypatch):
    plain, threads = Job(config=TINY), replace(TINY, engine=replace(TINY.engine, threads=1))
    before, other = plain.key, Job(config=threads).key
    monkeypatch.setitem(ADDED_FIELDS, "engine.threads", 0)
    assert plain.key != before and Job(config=threads).key == other


def test_a_run_of_a_moved_folder_continues_where_its_data_is_now(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("memtrain.training.stages.sequential_ops", lambda step: 1)
    monkeypatch.setattr("memtrain.paper.job.load", lambda name: Trains())
    setup = Setup(folder=tmp_path / "a")
    path, length = store(setup, "sketchy")
    short = Trains().grid(setup)[0].config
    config = replace(short, data=Stream(path=path, evaluate_length=length))
    (work,) = collect([(Trains(), Job(config=config))])
    assert isinstance(attempt(work, setup.folder, lambda progress: None), Done)
    setup.folder.rename(tmp_path / "b")
    done = attempt(work, tmp_path / "b", lambda progress: None)
    assert isinstance(done, Done), done
    found = from_json((tmp_path / "b" / work.place / "config.json").read_text()).data
    assert isinstance(found, Stream) and found.path == str(tmp_path / "b" / "data" / "sketchy")


@pytest.mark.parametrize("name", EVALUATE_LENGTH)
def test_substitute_data_keeps_the_held_out_lengths(name: str, tmp_path: Path):
    from memtrain.data.store_reader import open_store

    setup = Setup(folder=tmp_path)
    path, length = store(setup, name)
    where = located(replace(TINY, data=Stream(path=path)), setup.root, tmp_path).data
    assert isinstance(where, Stream)
    stored = open_store(Path(where.path)).meta.document_length
    assert length == (stored - 1 if stored else 48)


def test_setup_keeps_the_figures_of_a_folder(tmp_path: Path):
    setup = Setup(folder=tmp_path, device="cpu")
    reproduce([load("gradients")], setup, lambda queue: iter(()))
    reproduce([load("joint")], setup, lambda queue: iter(()))
    stored = read_setup(tmp_path)
    assert stored is not None and stored.figures == ["gradients", "joint"]
    with pytest.raises(MemtrainError, match="device=auto: .* was made with cpu"):
        reproduce([load("joint")], replace(setup, device="auto"), lambda queue: iter(()))
