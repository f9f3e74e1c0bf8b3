"""The command after each checkpoint: it sees whole checkpoints, and never stops or alters a run."""

import shlex
import signal
import sys
from pathlib import Path

import pytest

from conftest import TINY
from memtrain.errors import MemtrainError
from memtrain.runs.processes import Interrupted
from memtrain.training import after_save
from memtrain.training.after_save import AfterSave, read_command
from memtrain.training.run import Run
from run_testing import CountingReporter, StopAt, assert_same_weights, comparable

COPY = """
import shutil, sys

for attempt in range(100):
    try:
        shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)
        break
    except shutil.Error:  # training removes drafts and old checkpoints meanwhile
        if attempt == 99:
            raise
"""


def command(code: str, *arguments: object) -> str:
    """A command that runs Python code."""
    return shlex.join([sys.executable, "-c", code, *map(str, arguments)])


def trained(tmp_path: Path, line: str, name: str = "run") -> tuple[Run, list[str]]:
    """A run with the command, and the messages about it."""
    reporter = CountingReporter()
    hook = AfterSave(line, reporter.say)
    run = Run.create(TINY, tmp_path / name).train(reporter, callbacks=[hook])
    return run, [one for one in reporter.messages if one.startswith("after-save")]


def test_the_copy_is_the_whole_run_at_the_end(tmp_path: Path):
    run, messages = trained(tmp_path, command(COPY, "{folder}", tmp_path / "copies" / "{name}"))
    assert messages == []
    copy = Run.open(tmp_path / "copies" / "run")
    assert copy.finished and comparable(copy) == comparable(run)
    assert_same_weights(copy, run)


def test_a_stopped_run_continues_from_its_copy(trained_tiny: Run, tmp_path: Path):
    hook = AfterSave(command(COPY, "{folder}", tmp_path / "copy"), print)
    with pytest.raises(Interrupted):
        Run.create(TINY, tmp_path / "run").train(StopAt("dmt", 4, signal.SIGUSR1), callbacks=[hook])
    resumed = Run.open(tmp_path / "copy")
    assert resumed.progress.step == 4  # the checkpoint of the stop itself was copied, too
    assert_same_weights(trained_tiny, resumed.train())


def test_the_newest_checkpoint_is_named_and_is_whole(tmp_path: Path):
    code = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); print(p.name, file=open(sys.argv[2], 'a')); assert (p / 'state.json').is_file()"  # noqa: E501
    run, messages = trained(tmp_path, command(code, "{checkpoint}", tmp_path / "log"))
    numbers = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert numbers == sorted(set(numbers)) and numbers[-1] == run.progress.global_step


def test_names_are_arguments_and_never_run(tmp_path: Path):
    name = "a b; touch injected $(touch injected) '\"{name}"
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    trained(tmp_path, command(code, tmp_path / "out", "x{name}y"), name)
    assert (tmp_path / "out").read_text() == f"x{name}y"
    assert not list(tmp_path.rglob("injected"))


def test_a_failure_is_reported_and_stops_nothing(tmp_path: Path):
    code = "import sys; print('no\\x1b[2J credentials', file=sys.stderr); sys.exit(3)"
    run, messages = trained(tmp_path, command(code))
    assert run.finished and messages
    end = " ended with status 3: no\\x1b[2J credentials"
    assert set(messages) == {f"after-save: {sys.executable}{end}"}


def test_a_program_that_is_gone_later_is_reported(tmp_path: Path):
    program = tmp_path / "copy.sh"
    program.write_text("#!/bin/sh\nrm $0\n")
    program.chmod(0o755)
    run, messages = trained(tmp_path, str(program))
    assert run.finished
    assert set(messages) <= {f"after-save: {program}: No such file or directory"}
    assert not program.exists()


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(after_save, "LAST_SECONDS", 0.2)
    run, messages = trained(tmp_path, command("import time; time.sleep(600)"))
    assert run.finished and f"after-save: {sys.executable} was ended after 0.2 s" in messages


def test_much_output_does_not_block_it(tmp_path: Path):
    run, messages = trained(tmp_path, command("print('x' * 10**6); raise SystemExit(1)"))
    assert run.finished and messages and len(messages[0]) < 500


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "must name a program"),
        ("sh 'x", "check its quotes"),
        ("no-such-program {folder}", "there is no program 'no-such-program'"),
        ("sh {foldr}", "did you mean folder"),
        ("sh {}", "is unknown"),
    ],
)
def test_commands_that_cannot_run_are_refused_at_the_start(line: str, words: str):
    with pytest.raises(MemtrainError, match=words):
        read_command(line)
