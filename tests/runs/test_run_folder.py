"""A run folder has one owner, is never mixed with another run, and never written through links."""

import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import TINY
from fault_injection import ERRORS, Crash, FaultyFiles
from memtrain import cli
from memtrain.config import Digits
from memtrain.config.serialize import to_json
from memtrain.errors import CheckpointError, MemtrainError
from memtrain.files import Locked
from memtrain.generation.pretrained import load_rnn
from memtrain.runs import checkpoint as checkpoints
from memtrain.runs.checkpoint import latest_checkpoint
from memtrain.runs.distributed import Group
from memtrain.runs.progress import MetricsFile
from memtrain.runs.run_folder import make_folder, read_run_file
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from run_testing import CountingReporter, assert_same_weights, comparable, weights

SHORT = replace(
    TINY,
    smt=replace(TINY.smt, steps=8),
    dmt=replace(TINY.dmt, steps=0),
    bptt=replace(TINY.bptt, steps=0),
    log=replace(TINY.log, checkpoint_every=2, evaluate_every=4),
)
OTHER = replace(SHORT, seed=1)


class At(CountingReporter):
    """Does something after a step."""

    def __init__(self, step: int, act) -> None:
        super().__init__()
        self.step, self.act = step, act

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            self.act()


class Killed(BaseException):
    """As if the process were gone."""


def kill() -> None:
    raise Killed


def killed_at(folder: Path, step: int, config=SHORT) -> Path:
    with pytest.raises(Killed):
        Run.create(config, folder).train(At(step, kill))
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after step 6, with a checkpoint of step 4."""
    return killed_at(tmp_path_factory.mktemp("half") / "run", 6)


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "run"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def refused(capsys, *command: str) -> str:
    assert cli.main(list(command)) == 2
    output = capsys.readouterr().err.strip()
    assert output.startswith("memtrain: ") and "\n" not in output
    return output


# ------------------------------------------------------------------------------------ one owner

TRAIN = """
import sys
from pathlib import Path
from memtrain.config.serialize import read_config
from memtrain.training.run import Run
from memtrain.training.console import Reporter

class Wait(Reporter):
    def advance(self, step, metrics):
        if step == 6:
            print("training", flush=True)
            sys.stdin.readline()

Run.create(read_config(Path("config.json")), "run").train(Wait())
"""


def test_a_second_process_is_refused_while_one_trains(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(to_json(SHORT))
    Path("other.json").write_text(to_json(OTHER))
    command = [sys.executable, "-c", TRAIN]
    source = str(Path(cli.__file__).parents[2])
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    ) as first:
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == "training\n"
        run = tmp_path / "run"
        whole = {"metrics.jsonl", "config.json", "run.json"}
        before = {name: (run / name).read_bytes() for name in whole}
        for second in (
            ["resume", "run"],
            ["train", "config.json", "--folder", "run", "--resume"],
            ["train", "other.json", "--folder", "run", "--overwrite"],
        ):
            message = refused(capsys, *second)
            assert "another process trains or replaces this run" in message
            assert f"(process {first.pid} on " in message
        assert {name: (run / name).read_bytes() for name in whole} == before
        assert cli.main(["eval", "run", "--sequences", "4", "--json"]) == 0  # needs no lock
        first.communicate("\n")
    assert first.returncode == 0
    alone = Run.create(SHORT, tmp_path / "alone").train()
    assert comparable(Run.open("run")) == comparable(alone)


def test_two_trainings_in_one_process_exclude_each_other_too(run: Path):
    second = Run.open(run)

    def train_too() -> None:
        with pytest.raises(Locked, match=f"process {os.getpid()} on "):
            second.train()

    Run.open(run).train(At(6, train_too))


def test_a_run_trained_by_another_process_since_is_not_trained_from_the_old_state(run: Path):
    stale = Run.open(run)
    Run.open(run).train()
    after = files_of(run)
    with pytest.raises(MemtrainError, match="trained it to step 8 since it was opened; open it"):
        stale.train()
    assert files_of(run) == after


def test_a_run_that_was_replaced_since_it_was_opened_is_not_trained(run: Path):
    stale = Run.open(run)
    Run.create(OTHER, run, overwrite=True)
    with pytest.raises(MemtrainError, match="another run was made there since"):
        stale.train()


def test_only_one_of_several_processes_creates_a_folder(tmp_path: Path):
    barrier = threading.Barrier(3)

    def make(folder: Path, made: list[str]) -> None:
        barrier.wait()
        try:
            made.append(make_folder(SHORT, folder, False, {}))
        except MemtrainError as error:
            assert "a run is there already" in str(error) or isinstance(error, Locked)

    for turn in range(40):
        made: list[str] = []
        arguments = (tmp_path / str(turn), made)
        threads = [threading.Thread(target=make, args=arguments) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = read_run_file(tmp_path / str(turn))
        assert found is not None and made == [found.id]


def test_an_indivisible_batch_leaves_no_folder(tmp_path: Path):
    group = Group(0, 3)
    group.from_main = lambda make: make()  # there are no other processes
    with pytest.raises(MemtrainError, match=r"smt\.batch_size=4: 3 processes with accumulate=1"):
        Run.create(SHORT, tmp_path / "run", group=group)
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------- one identity


def test_checkpoints_of_another_run_are_never_read(tmp_path: Path, run: Path):
    """Seed 0 is trained to its end; seed 1 in the same folder to step 4, with seed 0's last."""
    whole = Run.create(OTHER, tmp_path / "whole").train()
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "00000008", run / "checkpoints/00000008")
    reporter = CountingReporter()
    opened = Run.open(run, reporter=reporter)
    assert opened.progress.global_step == 4
    assert reporter.messages == [
        "passed over a checkpoint: checkpoint 00000008: belongs to another run"
    ]
    assert load_rnn(run).trained["stages"][0]["steps"] == 4
    resumed = opened.train()
    assert_same_weights(resumed, Run.create(SHORT, tmp_path / "alone").train())
    assert not torch.equal(resumed.rnn.readout.head.weight, whole.rnn.readout.head.weight)
    assert Run.open(run).finished


def test_later_foreign_checkpoints_do_not_replace_the_runs_own(tmp_path: Path, run: Path):
    Run.create(OTHER, tmp_path / "whole").train()
    for number in ("00000006", "00000008"):
        shutil.copytree(tmp_path / "whole/checkpoints/00000008", run / "checkpoints" / number)
    with pytest.raises(Killed):
        Run.open(run).train(At(8, kill))
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["00000004", "00000006", "00000008"]
    assert Run.open(run).progress.global_step == 6


@pytest.mark.parametrize("relative", [False, True])
def test_overwriting_leaves_nothing_of_the_old_run(run: Path, monkeypatch, relative: bool):
    if relative:
        monkeypatch.chdir(run.parent)
        run = Path(run.name)
    (run / "figures").mkdir()
    (run / "figures" / "old.png").write_bytes(b"old")
    (run / "notes.txt").write_text("mine")
    before = read_run_file(run)
    new = Run.create(OTHER, run, overwrite=True)
    assert sorted(p.name for p in run.iterdir()) == [
        ".lock",
        "config.json",
        "notes.txt",
        "run.json",
    ]
    after = read_run_file(run)
    assert before and after and before.id != after.id == new.id
    assert not Run.open(run).progress.stages


@pytest.mark.parametrize("fault", ["before", "inside", *ERRORS])
def test_a_failed_overwrite_never_mixes_runs(tmp_path: Path, half: Path, fault: str):
    def overwrite(folder: Path, files: FaultyFiles) -> None:
        make_folder(OTHER, folder, True, {}, files)

    def prepared(name: str) -> Path:
        folder = Path(shutil.copytree(half, tmp_path / name))
        (folder / "figures").mkdir()
        (folder / "figures" / "old.png").write_bytes(b"old")
        return folder

    dry = FaultyFiles()
    overwrite(prepared("dry"), dry)
    assert len(dry.operations) >= 16
    seen = set()
    for at in range(len(dry.operations)):
        folder = prepared(str(at))
        with pytest.raises((Crash, OSError, MemtrainError)):
            overwrite(folder, FaultyFiles(at, ERRORS.get(fault, fault)))
        try:
            run = Run.open(folder)
        except MemtrainError as error:
            assert "ended before it was complete" in str(error)
            seen.add("half made")
        else:
            seen.add((run.config.seed, run.progress.global_step))
        Run.create(OTHER, folder, overwrite=True)
        names = {path.name for path in folder.iterdir()}
        assert names == {".lock", "config.json", "run.json"}
        assert Run.open(folder).config == OTHER
    # Never seed 1 with the steps of seed 0.
    assert {(0, 0), "half made"} <= seen <= {(0, 4), (0, 0), "half made", (1, 0)}


def test_an_interrupted_creation_is_repeated_without_overwrite(tmp_path: Path):
    with pytest.raises(Crash):
        make_folder(SHORT, tmp_path / "run", False, {}, FaultyFiles(at=8))
    with pytest.raises(MemtrainError, match="ended before it was complete; train it again"):
        Run.open(tmp_path / "run")
    Run.create(OTHER, tmp_path / "run")
    assert Run.open(tmp_path / "run").config == OTHER


def test_leftovers_of_a_killed_overwrite_are_removed_by_the_next_training(run: Path, outside: Path):
    (run / ".trash-checkpoints-0123" / "00000004").mkdir(parents=True)
    (run / ".draft-config.json-4567").touch()
    (run / ".trash-link").symlink_to(outside)
    before = files_of(outside)
    Run.open(run).train(Reporter())
    assert not [path.name for path in run.iterdir() if path.name.startswith((".trash", ".draft"))]
    assert files_of(outside) == before


def test_checkpoints_that_are_not_a_folder_are_refused_before_training(run: Path):
    opened = Run.open(run)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("not a folder")
    with pytest.raises(MemtrainError, match="checkpoints: is not a folder"):
        opened.train(Reporter())


def test_checkpoints_that_cannot_be_removed_are_named(run: Path, monkeypatch):
    def fails(path: Path, *_, **__) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", fails)
    with pytest.raises(MemtrainError, match=r"could not be removed \(Permission denied\)"):
        Run.create(OTHER, run, overwrite=True)
    monkeypatch.undo()
    opened = Run.open(run)
    assert (opened.config.seed, opened.progress.global_step) == (0, 0)


def test_runs_of_an_older_memtrain_still_open_and_resume(tmp_path: Path, run: Path):
    """Without run.json, and with checkpoints that know neither run nor what it was made of."""
    (run / "run.json").unlink()
    for state in (run / "checkpoints").glob("*/state.json"):
        plain = json.loads(state.read_text())
        for name in ("run", "made_of"):
            del plain["progress"][name]
        del plain["progress_sha256"]
        state.write_text(json.dumps(plain))
    assert Run.open(run).progress.global_step == 4
    resumed = Run.open(run).train()
    assert_same_weights(resumed, Run.create(SHORT, tmp_path / "alone").train())
    assert Run.open(run).finished


def test_a_copy_of_config_and_checkpoints_alone_resumes(tmp_path: Path, run: Path):
    (tmp_path / "copy").mkdir()
    shutil.copy(run / "config.json", tmp_path / "copy")
    shutil.copytree(run / "checkpoints", tmp_path / "copy" / "checkpoints")
    assert Run.open(tmp_path / "copy").id == Run.open(run).id
    assert Run.open(tmp_path / "copy").train().finished


@pytest.mark.parametrize("text", ["[]", "{", '{"id": 3}', '{"id": "a", "version": 9}'])
def test_a_damaged_identity_is_refused_with_a_reason(run: Path, text: str):
    (run / "run.json").write_text(text)
    with pytest.raises(MemtrainError, match=r"run\.json: "):
        Run.open(run)


def test_the_best_is_read_again_when_a_training_moves_it(run: Path, tmp_path: Path, monkeypatch):
    folder = run / "checkpoints"
    names = [path.name for path in checkpoints.numbered(folder)]
    load, failures = checkpoints.load_checkpoint, []

    def moved_once(path: Path, identity: str = ""):
        if not failures and path.name == names[-1]:
            failures.append(path)
            shutil.copytree(path, folder / "00000007")  # a newer one; this one is gone by then
            raise CheckpointError("optimizer.safetensors is missing")
        return load(path, identity)

    monkeypatch.setattr(checkpoints, "load_checkpoint", moved_once)
    for path in folder.iterdir():
        if path.name != names[-1]:
            shutil.rmtree(path)
    found, problems = latest_checkpoint(folder, best=True)
    assert found is not None and failures and not problems


# --------------------------------------------------------------------------------------- links


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "00000001").mkdir(parents=True)
    (folder / ".draft-mine").mkdir()
    for name in ("diary.txt", "00000001/photo.jpg", ".draft-mine/thesis.txt", "rc.txt"):
        (folder / name).write_text(f"{name} " * 1000)
    return folder


def test_metrics_that_are_a_link_are_not_cut_or_appended_to(run: Path, outside: Path, capsys):
    before = files_of(outside)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(outside / "diary.txt")
    assert "metrics.jsonl: is a symbolic link" in refused(capsys, "resume", str(run))
    with pytest.raises(MemtrainError, match="symbolic link"):
        MetricsFile(run / "metrics.jsonl").append({})
    assert files_of(outside) == before


@pytest.mark.parametrize(
    "name", ["evaluation-6.png", "evaluation-6.json", "training.png", "figures"]
)
def test_figures_are_not_drawn_through_links(run: Path, outside: Path, capsys, name: str):
    before = files_of(outside)
    if name == "figures":
        (run / "figures").symlink_to(outside)
    else:
        (run / "figures").mkdir()
        (run / "figures" / name).symlink_to(outside / "diary.txt")
    assert f"{name}: is a symbolic link" in refused(capsys, "eval", str(run), "--sequences", "4")
    assert files_of(outside) == before


@pytest.mark.parametrize("name", ["samples", "2-seed0.png"])
def test_samples_are_not_drawn_through_links(tmp_path: Path, outside: Path, capsys, name: str):
    run = tmp_path / "digits"
    config = replace(SHORT, data=Digits(), smt=replace(SHORT.smt, steps=1))
    Run.create(config, run).train(Reporter())
    before = files_of(outside)
    if name == "samples":
        (run / "samples").symlink_to(outside)
    else:
        (run / "samples").mkdir()
        (run / "samples" / name).symlink_to(outside / "diary.txt")
    assert f"{name}: is a symbolic link" in refused(capsys, "generate", str(run), "--count", "2")
    assert files_of(outside) == before


def test_checkpoints_that_are_a_link_are_neither_trained_nor_replaced(
    run: Path, outside: Path, tmp_path: Path, capsys
):
    """Also where the user moved them to a larger disk: the whole folder can be linked instead."""
    for path in (run / "checkpoints").iterdir():
        path.rename(outside / path.name)
    (run / "checkpoints").rmdir()
    (run / "checkpoints").symlink_to(outside)
    before = files_of(outside)
    (tmp_path / "other.json").write_text(to_json(OTHER))
    overwrite = ["train", str(tmp_path / "other.json"), "--folder", str(run), "--overwrite"]
    for command in (["resume", str(run)], overwrite):
        message = refused(capsys, *command)
        assert "checkpoints: is a symbolic link" in message and "link the whole folder" in message
    assert files_of(outside) == before and Run.open(run).config == SHORT
    (tmp_path / "linked").symlink_to(run)
    (run / "checkpoints").unlink()
    assert Run.open(tmp_path / "linked").train().finished


def test_links_among_checkpoints_are_removed_and_not_followed(run: Path, outside: Path):
    before = files_of(outside)
    for name in (".draft-00000008", ".trash-00000002", "00000008.old", "00000001", ".draft-x"):
        (run / "checkpoints" / name).symlink_to(outside)
    assert Run.open(run).train().finished
    assert files_of(outside) == before


def test_links_in_an_empty_looking_folder_are_not_written_through(tmp_path: Path, outside: Path):
    before = files_of(outside)
    (tmp_path / "run").mkdir()
    for name in (".draft-config.json", "run.json", ".lock"):
        (tmp_path / "run" / name).symlink_to(outside / "rc.txt")
    with pytest.raises(MemtrainError, match=r"\.lock: is a symbolic link"):
        Run.create(SHORT, tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / "run.json").unlink()
    Run.create(SHORT, tmp_path / "run")
    assert files_of(outside) == before


# ------------------------------------------------------------------------- pipes, sizes, weights


@pytest.mark.parametrize("name", ["state.json", "weights.safetensors", "metrics.jsonl", "run.json"])
@pytest.mark.parametrize("command", ["eval", "resume", "generate"])
def test_a_pipe_in_place_of_a_file_does_not_hang(run: Path, name: str, command: str, capsys):
    paths = list((run / "checkpoints").glob(f"*/{name}")) or [run / name]
    for path in paths:
        path.unlink()
        os.mkfifo(path)
    if (command, name) == ("generate", "metrics.jsonl"):
        pytest.skip("not read")
    output = cli.main([command, str(run)]), capsys.readouterr().err
    assert output[0] == 2 and ("not a regular file" in output[1] or "is missing" in output[1])


def test_oversized_metrics_are_not_read(run: Path):
    metrics = MetricsFile(run / "metrics.jsonl")
    os.truncate(metrics.path, 2**40)
    with pytest.raises(MemtrainError, match="has 1,099,511,627,776 bytes; at most"):
        metrics.read()
    metrics.path.write_bytes(b"[" * (2**22 + 2))
    with pytest.raises(MemtrainError, match="line 1 is longer than 4,194,304 bytes"):
        metrics.read()
    metrics.path.unlink()
    metrics.path.symlink_to("/dev/zero")
    with pytest.raises(MemtrainError, match="not a regular file"):
        metrics.read()


def change_weights(run: Path, change) -> None:
    """Apply a change to one weight of the RNN in every checkpoint, with a checksum that fits."""
    for folder in (run / "checkpoints").iterdir():
        tensors = load_file(folder / "weights.safetensors")
        name = "rnn.readout.head.weight"
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / "weights.safetensors")
        state = json.loads((folder / "state.json").read_text())
        state["sha256"]["weights.safetensors"] = checkpoints._sha256(folder / "weights.safetensors")
        (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.fill_(float("nan")), r"not finite \(.*readout\.head\.weight\)"),
        (lambda w: w.index_fill(0, torch.tensor(0), float("inf")), "not finite"),
        (lambda w: w > 0, r"readout\.head\.weight is torch\.bool, not torch\.float32"),
        (lambda w: w.to(torch.int8), r"is torch\.int8, not torch\.float32"),
    ],
    ids=["nan", "inf", "bool", "int8"],
)
def test_weights_that_are_not_finite_numbers_are_refused(run: Path, change, message: str):
    change_weights(run, change)
    for opened in (Run.open, load_rnn):
        with pytest.raises(MemtrainError, match=message):
            opened(run)


# ------------------------------------------------------------------------------ what is deleted


def test_a_config_deleted_during_training_is_written_again(tmp_path: Path):
    folder = tmp_path / "run"
    reporter = At(4, lambda: [(folder / name).unlink() for name in ("config.json", "run.json")])
    run = Run.create(SHORT, folder).train(reporter)
    assert [line.endswith("was gone; written again") for line in reporter.messages] == [True, True]
    assert_same_weights(run, Run.open(folder))


def test_a_folder_taken_by_another_run_stops_the_training(tmp_path: Path):
    """Where locks do not hold, as on some network file systems."""
    folder = tmp_path / "run"

    def replaced() -> None:
        path = folder / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"id": "another"}))

    with pytest.raises(CheckpointError, match="another run was made there"):
        Run.create(SHORT, folder).train(At(4, replaced))
    with pytest.raises(CheckpointError, match=r"another process trains it \(elsewhere 7\)"):
        Run.create(SHORT, tmp_path / "b").train(
            At(4, lambda: (tmp_path / "b" / ".lock").write_text("elsewhere 7\n"))
        )


def test_metrics_deleted_during_training_are_reported_then_and_at_resume(tmp_path: Path):
    folder = tmp_path / "run"

    class Delete(CountingReporter):
        def advance(self, step: int, metrics: dict[str, float]) -> None:
            if step == 4:
                (folder / "metrics.jsonl").unlink()
            if step == 8:
                run.writer.finish()
                raise Killed

    run, reporter = Run.create(SHORT, folder), Delete()
    with pytest.raises(Killed):
        run.train(reporter)
    assert len(reporter.messages) == 1 and "bytes of earlier lines are lost" in reporter.messages[0]
    again = CountingReporter()
    Run.open(folder).train(again)
    assert again.messages == reporter.messages


# ------------------------------------------------------------------------------------- in words


def test_wrong_python_arguments_are_refused_with_a_reason(tmp_path: Path, run: Path):
    create = inspect.unwrap(Run.create.__func__)  # tests check types, users' Python does not
    with pytest.raises(MemtrainError, match=r"config='digits': .* recipe\('digits'\)"):
        create(Run, "digits", tmp_path / "new")
    with pytest.raises(MemtrainError, match=r"cell=Linear: is a class; pass an object"):
        create(Run, SHORT, tmp_path / "new", cell=torch.nn.Linear)
    with pytest.raises(MemtrainError, match="continues it, overwrite=True replaces it"):
        Run.create(SHORT, run)
    with pytest.raises(MemtrainError, match="until='SMT': this run's stages are smt"):
        Run.open(run).train(until="SMT")
    assert not (tmp_path / "new").exists() and Run.open(run).progress.global_step == 4


def test_until_a_finished_stage_trains_nothing(tmp_path: Path):
    config = replace(SHORT, bptt=replace(TINY.bptt, steps=2))
    run = Run.create(config, tmp_path / "run").train(until="smt")
    before = {name: value.clone() for name, value in weights(run).items()}
    run.train(until="smt")
    assert run.progress.stage == 1
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


def test_resume_refuses_options_that_the_run_does_not_have(run: Path, tmp_path: Path, capsys):
    path = str(tmp_path / "c.json")
    Path(path).write_text(to_json(SHORT))
    before = files_of(run)
    again = ["train", path, "--folder", str(run), "--resume"]
    message = refused(capsys, *again, "--smt.batch-size", "100")
    assert "smt.batch_size=100: " in message and "a run keeps its config; leave that" in message
    assert "seed=3: the run has seed=0" in refused(capsys, *again, "--seed", "3")
    message = refused(capsys, "resume", str(run), "--smt.batch-size", "100")
    assert "smt.batch_size=100: " in message and "a run keeps its config" in message
    retrieval = ["train", "digits", "--folder", str(run), "--resume"]
    assert "recipe digits: is of digits, the run of retrieval" in refused(capsys, *retrieval)
    assert files_of(run) == before
    assert cli.main([*again, "--smt.steps", "8"]) == 0


def test_a_received_config_imports_nothing_without_permission(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "import torch\nopen('imported', 'w').close()\n"
    code += "class Cell(torch.nn.GRUCell): pass\nclass Layer(torch.nn.GRU): pass\n"
    Path("evil_cells.py").write_text(code)
    cell = replace(SHORT.cell, kind="evil_cells:Cell")
    Path("config.json").write_text(to_json(replace(SHORT, cell=cell)))
    message = refused(capsys, "train", "config.json", "--folder", "out")
    assert "config.json: imports evil_cells:Cell; pass --allow-code if you trust it" in message
    assert not Path("imported").exists() and not Path("out").exists()
    message = refused(capsys, "train", "config.json", "--cell.kind", "evil_cells:Layer")
    assert "Layer: runs over whole sequences" in message and Path("imported").exists()
    for folder, options in (
        ("allowed", ["--allow-code"]),
        ("named", ["--cell.kind", "evil_cells:Cell"]),
    ):
        Path("imported").unlink()
        del sys.modules["evil_cells"]  # each time it is imported again
        assert cli.main(["train", "config.json", "--folder", folder, *options]) == 0
        assert Path("imported").exists()


def test_a_restarted_training_imports_the_class_that_its_command_names(
    tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("their_cells.py").write_text(
        "import torch\n"
        "class Elman(torch.nn.Module):\n"
        "    memory_tokens, memory_dim = 1, 6\n"
        "    def __init__(self, vocab_size):\n"
        "        super().__init__()\n"
        "        self.embedding = torch.nn.Embedding(vocab_size, 6)\n"
        "        self.recur = torch.nn.Linear(6, 6)\n"
        "    def forward(self, memory, token):\n"
        "        return torch.tanh(self.recur(memory) + self.embedding(token)[:, None])\n"
    )
    Path("config.json").write_text(to_json(SHORT))
    command = ["train", "config.json", "--folder", "out", "--cell.kind", "their_cells:Elman"]
    assert cli.main(command) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert cli.main(command) == 0
    capsys.readouterr()
    assert "pass --allow-code" in refused(capsys, "resume", "out")


def test_a_reporter_gets_no_message_when_nothing_is_wrong(run: Path):
    reporter = CountingReporter()
    Run.open(run, reporter=reporter).train(reporter)
    assert reporter.messages == []
    assert isinstance(reporter, Reporter)
