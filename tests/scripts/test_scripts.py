"""The scripts that attack the program: that they notice what they are for."""

import ast
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from conftest import TINY, load_script
from memtrain.errors import MemtrainError
from memtrain.runs.checkpoint import latest_checkpoint, save_checkpoint
from memtrain.training.run import Run

SCRIPTS = str(Path(__file__).parents[2] / "scripts")


@pytest.fixture(scope="module", autouse=True)
def siblings() -> Iterator[None]:
    """Scripts import one another."""
    sys.path.insert(0, SCRIPTS)
    yield
    sys.path.remove(SCRIPTS)


# --------------------------------------------------------------------------------------- mutate


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    return load_script("mutate")


def fake(mutate: ModuleType, name: str, find: str, replacement: str, file: str = "sums.py"):
    return mutate.Mutation(name, file, find, replacement, ("test_sums.py", "test_none.py"), "wrong")


def test_a_mutation_is_killed_or_survives_and_the_tree_is_unchanged(
    mutate: ModuleType, tmp_path: Path
):
    (tmp_path / "src" / "memtrain").mkdir(parents=True)
    (tmp_path / "src" / "memtrain" / "__init__.py").write_text("")
    source = tmp_path / "src" / "memtrain" / "sums.py"
    source.write_text("def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from memtrain.sums import add\n\ndef test_adds():\n    assert add(2, 3) == 5\n"
    )
    chosen = [
        fake(mutate, "noticed", "a + b", "a - b"),
        fake(mutate, "not noticed", "2 * a", "3 * a"),
        fake(mutate, "gone", "a / b", "a"),
        fake(mutate, "twice there", "return", "yield"),
    ]
    before = source.read_text()
    found = list(mutate.run(tmp_path, chosen, jobs=2, whole=False))
    assert [(one.mutation.name, one.state, one.by) for one in found] == [
        ("noticed", "killed", "test_sums.py::test_adds"),
        ("not noticed", "survived", ""),
        ("gone", "not found", "sums.py: snippet not found, or in 0 files"),
        ("twice there", "not found", "sums.py: 2 times there, must be once"),
    ]
    assert source.read_text() == before
    moved = fake(mutate, "moved", "a + b", "a * b", file="old/place.py")
    assert mutate.Copy(tmp_path, tmp_path / "copy").place(moved).name == "sums.py"


def test_tests_that_already_fail_give_no_verdict(mutate: ModuleType, tmp_path: Path):
    (tmp_path / "src" / "memtrain").mkdir(parents=True)
    (tmp_path / "src" / "memtrain" / "__init__.py").write_text("x = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text("def test_fails():\n    assert False\n")
    chosen = [fake(mutate, "any", "x = 1", "x = 2", file="__init__.py")]
    with pytest.raises(SystemExit, match="fail without any mutation: test_sums.py::test_fails"):
        list(mutate.run(tmp_path, chosen, jobs=1, whole=False))


def test_every_mutation_matches_the_current_source(mutate: ModuleType):
    tree = object.__new__(mutate.Copy)
    tree.folder = mutate.ROOT
    for mutation in mutate.MUTATIONS:
        source = tree.place(mutation).read_text()  # raises if it is not there once
        ast.parse(source.replace(mutation.find, mutation.replace))
        assert mutate.existing(mutate.ROOT, mutation.tests), mutation.name
    names = [mutation.name for mutation in mutate.MUTATIONS]
    assert len(names) == len(set(names))


# ----------------------------------------------------------------------------------------- fuzz


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    return load_script("fuzz")


@pytest.fixture
def watch(fuzz: ModuleType, tmp_path: Path) -> Iterator:
    (tmp_path / "case").mkdir()
    before = signal.signal(signal.SIGALRM, fuzz.hang)
    watch = fuzz.Watch(tmp_path / "case")
    yield watch
    sys.meta_path.remove(watch)
    signal.signal(signal.SIGALRM, before)


def test_a_case_is_accepted_or_refused_with_a_short_reason(fuzz: ModuleType, watch, tmp_path: Path):
    def refuse(text: str):
        raise MemtrainError(text)

    inside = tmp_path / "case" / "file"
    assert fuzz.one_case(lambda: inside.write_text("fine") and None, watch) == ("taken", "")
    assert fuzz.one_case(lambda: refuse("size=0: must be more"), watch)[0] == "refused"
    assert fuzz.one_case(lambda: refuse(""), watch)[0] == "failed"
    assert fuzz.one_case(lambda: refuse("a\n" * 9), watch)[0] == "failed"
    assert fuzz.one_case(lambda: {}["key"], watch)[0] == "failed"


def test_forbidden_actions_of_a_file_are_detected_and_blocked(
    fuzz: ModuleType, watch, tmp_path: Path
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "diary").write_text("dear")
    (tmp_path / "case" / "link").symlink_to(outside)
    (tmp_path / "case" / "diary").symlink_to(outside / "diary")
    (tmp_path / "case" / "theirs.py").write_text("x = 1")
    deeds = {
        "import evil": lambda: importlib.import_module("evil.cells"),
        "import x": lambda: __import__("x"),
        "runs": lambda: runpy.run_path(str(tmp_path / "case" / "theirs.py")),
        "subprocess.Popen": lambda: subprocess.run(["true"]),
        "writes": lambda: (tmp_path / "case" / "link" / "new").write_text("x"),
        "case/diary": lambda: (tmp_path / "case" / "diary").write_text("x"),
        "os.remove": lambda: os.remove(outside / "diary"),
        "os.truncate": lambda: os.truncate(outside / "diary", 1),
        "os.rename": lambda: os.rename(outside / "diary", tmp_path / "case" / "mine"),
    }
    for name, deed in deeds.items():
        ended, words = fuzz.one_case(deed, watch)
        assert ended == "failed" and name in words, (name, words)
    assert fuzz.hostile.snapshot(outside) == {"diary": b"dear"}


def test_a_hanging_case_is_killed(fuzz: ModuleType, watch, tmp_path: Path):
    os.mkfifo(tmp_path / "case" / "pipe")
    ended, words = fuzz.one_case(lambda: (tmp_path / "case" / "pipe").read_text(), watch, 0.2)
    assert ended == "failed" and words.startswith("hangs")


@pytest.mark.parametrize("deed", ["change", "remove", "add"])
def test_files_outside_a_folder_are_compared(fuzz: ModuleType, tmp_path: Path, deed: str):
    (tmp_path / "file").write_text("as it was")
    deeds = {
        "change": lambda: (tmp_path / "file").write_text("as it is"),
        "remove": lambda: (tmp_path / "file").unlink(),
        "add": lambda: (tmp_path / "new").mkdir(),
    }
    with pytest.raises(AssertionError, match="changed"), fuzz.hostile.untouched(tmp_path):
        deeds[deed]()


def test_hostile_folders_are_accepted_before_they_are_damaged(fuzz: ModuleType, tmp_path: Path):
    fuzz.hostile.make_folders(tmp_path / "made")
    for kind, use in fuzz.hostile.USES.items():
        for seed in range(2):
            shutil.copytree(tmp_path / "made" / kind, tmp_path / f"{seed}" / kind)
            use(tmp_path / f"{seed}" / kind, random.Random(seed))


# ---------------------------------------------------------------------------------------- pairs


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    return load_script("pairs_checks")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "run"
    log = replace(TINY.log, every=1, evaluate_every=1)
    Run.create(replace(TINY, log=log), folder).train()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_an_undisturbed_run_passes(checks: ModuleType, trained: Path, run: Path):
    (run / ".lock").write_text("here 1")
    (run / "run.json").write_text("{}")
    assert checks.check_run(run, {0: checks.result_of(trained)}) == []


def test_a_disturbed_run_is_detected(checks: ModuleType, trained: Path, run: Path):
    alone = checks.result_of(trained)
    lines = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(lines + lines.splitlines(keepends=True)[-1])
    (run / "checkpoints" / ".draft-00000009").mkdir()
    (run / "notes.txt").write_text("foreign")
    message = " ".join(checks.check_run(run, {0: alone}))
    assert "25 lines of metrics, not one for each of 24 steps" in message
    assert "a draft remains: checkpoints/.draft-00000009" in message
    assert "a foreign file: notes.txt" in message
    assert "it was trained on other data" in " ".join(
        checks.check_run(run, {0: alone._replace(data="other")})
    )


def test_weights_and_evaluations_of_another_run_are_detected(
    checks: ModuleType, trained: Path, run: Path
):
    alone = checks.result_of(trained)
    newest, _ = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    name, value = next(iter(newest.weights.items()))
    changed = replace(newest, weights={**newest.weights, name: value + 1e-6})
    save_checkpoint(run / "checkpoints", newest.progress.global_step, changed, keep=2)
    assert checks.check_run(run, {0: alone}) == ["weights are not those of seed 0 trained alone"]
    nats = alone.nats | {7: 0.0}
    problems = checks.check_run(trained, {0: alone._replace(nats=nats)})
    assert len(problems) == 1 and problems[0].startswith("the evaluation at step 7 differs")


def test_an_evaluation_must_match_its_step_and_run(checks: ModuleType, trained: Path):
    alone = checks.result_of(trained)
    record = {"seed": 0, "step": 7, "rnn": {"nats": alone.nats[7]}}
    assert checks.check_evaluation("noise\n" + json.dumps(record), {0: alone}) == []
    assert checks.check_evaluation(json.dumps(record | {"step": 8}), {0: alone})


def test_a_refusal_is_one_line_and_exit_statuses_are_known(checks: ModuleType):
    def problems(status: int, err: str, signalled: bool = False) -> list[str]:
        return checks.check_ending(checks.Ended(["train"], status, "", err, signalled))

    assert problems(0, "smt 3/9\n") == [] and problems(2, "smt 3/9\nmemtrain: no\n") == []
    assert problems(2, "memtrain: no\nmemtrain: really\n") and problems(2, "") and problems(1, "")
    assert problems(0, "Traceback (most recent call last):\nKeyError: 'x'")
    assert (
        problems(143, "")
        and not problems(143, "", signalled=True)
        and not problems(-9, "", signalled=True)
    )


def test_partial_stores_and_drafts_are_detected(
    checks: ModuleType, fuzz: ModuleType, tmp_path: Path
):
    fuzz.damage.make_store(tmp_path / "data" / "book")
    assert checks.check_stores(tmp_path / "data") == checks.check_stores(tmp_path / "none") == []
    (tmp_path / "data" / "book" / "train.bin").unlink()
    (tmp_path / "data" / ".draft-book-1").mkdir()
    message = " ".join(checks.check_stores(tmp_path / "data"))
    assert "an incomplete store" in message and "a draft remains: .draft-book-1" in message


@pytest.mark.slow
def test_eight_pairs_of_concurrent_commands_leave_valid_files():
    environment = {**os.environ, "PYTHONPATH": str(Path(SCRIPTS).parent / "src")}
    command = [sys.executable, "pairs.py", "--pairs", "8", "--seed", "5"]
    done = subprocess.run(command, cwd=SCRIPTS, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 pairs, 0 wrong" in done.stdout
