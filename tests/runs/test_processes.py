"""Processes and signals."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import TINY
from memtrain.cli import COMMANDS, main
from memtrain.config.serialize import to_json
from memtrain.runs import processes as stopping
from memtrain.runs.processes import command_signals, size_of_group, stop_signals
from memtrain.training.console import Reporter
from memtrain.training.run import Interrupted, Run
from run_testing import StopAt, assert_same_weights, comparable

pytestmark = pytest.mark.usefixtures("default_signals")

SCRIPT = """
import multiprocessing
import os
import signal
import sys

from memtrain.runs.processes import hear_interrupts, start_process


def child():
    try:
        hear_interrupts(signal.default_int_handler)
        print("nothing")
    except KeyboardInterrupt:
        print("heard")


if __name__ == "__mp_main__":  # the child, while it imports
    os.kill(os.getpid(), signal.SIGINT)
if __name__ == "__main__":
    signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
    process = multiprocessing.get_context("spawn").Process(target=child)
    start_process(process)
    process.join()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "the parent receives signals again"
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(
    "parents, childs", [("default_int_handler", "heard"), ("SIG_IGN", "nothing")]
)
def test_a_starting_process_gets_ctrl_c_when_it_is_ready(tmp_path: Path, parents: str, childs: str):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, parents], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, childs, "")


ORPHAN = """
import os
import signal
import sys
import time

from memtrain.runs.processes import stop_with_parent

parent = os.getpid()
if not os.fork():
    signal.signal(signal.SIGTERM, lambda number, frame: (print("stopped"), sys.exit()))
    import memtrain.runs.processes
    memtrain.runs.processes.PARENT = parent  # as if this process had imported it
    stop_with_parent()
    print("waiting", flush=True)
    while True:
        time.sleep(0.1)
signal.pause()
"""


def test_a_worker_whose_launcher_was_killed_stops_as_after_sigterm():
    launcher = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert launcher.stdout is not None and launcher.stdout.readline() == "waiting\n"
    launcher.kill()
    assert launcher.communicate(timeout=60)[0] == "stopped\n"


SAVING = """
import multiprocessing
import os
import signal
import sys
import time

from memtrain.runs.processes import die_with_parent
from memtrain.runs.processes import stop_signals


def child():
    die_with_parent(60.0)
    with stop_signals() as stop:
        print("training", flush=True)
        while not stop.signal_number:
            time.sleep(0.1)
        signal.raise_signal(signal.SIGTERM)  # by another way: the same request
        print("saved", flush=True)
        os._exit(0)


if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=child).start()
    signal.pause()
"""


def test_a_process_whose_parent_was_killed_saves_first(tmp_path: Path):
    (tmp_path / "script.py").write_text(SAVING)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stdout.readline() == "training\n"
    parent.kill()
    assert parent.communicate(timeout=60)[0] == "saved\n"


@pytest.mark.parametrize(("value", "size"), [("8", 8), ("1", 1), ("0", 1), ("", 1), ("many", 1)])
def test_world_size_is_read_from_torchruns_variable(monkeypatch, value: str, size: int):
    monkeypatch.setenv("WORLD_SIZE", value)
    assert size_of_group() == size
    monkeypatch.delenv("WORLD_SIZE")
    assert size_of_group() == 1


STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 75}
"""What a command that a signal ended returns; 75 asks a scheduler for a requeue."""
SIGNALS = list(STATUS)


# ----------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_saves_and_is_named(tmp_path: Path, number: int):
    with pytest.raises(Interrupted) as caught:
        Run.create(TINY, tmp_path / "run").train(StopAt("smt", 4, number))
    assert caught.value.signal_number == number
    assert Run.open(tmp_path / "run").progress.step == 4


class SignalledRun(Run):
    """Gets a signal during one of its evaluations."""

    at: tuple[int, int] = (0, 0)

    def evaluate(self, *arguments, **options):
        if (self.progress.stage, self.progress.step) == self.at:
            signal.raise_signal(signal.SIGTERM)
        return super().evaluate(*arguments, **options)


LAST = {"smt": 12, "dmt": 8, "bptt": 4}


@pytest.mark.parametrize("during", ["step", "evaluation"])
@pytest.mark.parametrize("stage", list(LAST))
def test_a_signal_in_the_last_step_of_a_stage_stops_the_run(
    trained_tiny: Run, tmp_path: Path, stage, during
):
    run = SignalledRun.create(TINY, tmp_path / "cut")
    if during == "evaluation":
        assert isinstance(run, SignalledRun)
        run.at = (list(LAST).index(stage), LAST[stage])
        reporter = Reporter()
    else:
        reporter = StopAt(stage, LAST[stage], signal.SIGTERM)
    with pytest.raises(Interrupted, match=f"after step {LAST[stage]} of {stage}") as caught:
        run.train(reporter)
    assert caught.value.signal_number == signal.SIGTERM
    assert run.finished == (stage == "bptt")
    resumed = Run.open(tmp_path / "cut")
    assert resumed.progress == run.progress
    assert_same_weights(trained_tiny, resumed.train())
    assert comparable(trained_tiny) == comparable(resumed)


def test_a_signal_before_the_first_step_stops_the_run_there(tmp_path: Path, monkeypatch):
    def stop(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    run = Run.create(TINY, tmp_path / "run")
    monkeypatch.setattr(run.engine, "precompile", stop)
    monkeypatch.setattr(run, "config", replace(TINY, engine=replace(TINY.engine, compile=True)))
    with pytest.raises(Interrupted, match="before its next step"):
        run.train()
    assert Run.open(tmp_path / "run").train().finished


def test_a_signal_that_stopped_nothing_is_sent_again(heard: list[int]):
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_number == signal.SIGTERM and not heard
    assert heard == [signal.SIGTERM]


def test_a_second_signal_gets_the_previous_handler(heard: list[int]):
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        stop.taken = True
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    assert heard == [signal.SIGTERM]


def test_repeated_signals_to_a_worker_count_once(heard: list[int], monkeypatch):
    """From a scheduler, and passed on by the launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with stop_signals() as stop:
        stop.taken = True
        signal.raise_signal(signal.SIGTERM)
        now[0] = 1.0
        signal.raise_signal(signal.SIGTERM)
        assert not heard
        now[0] = 60.0
        signal.raise_signal(signal.SIGTERM)
        assert heard


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that reach the handler outside."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.signal_number
    finally:
        signal.signal(signal.SIGHUP, before)


# ------------------------------------------------------------------------------------- commands


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(to_json(replace(TINY, dmt=replace(TINY.dmt, steps=0))))
    return "tiny.json"


def signalled_in_evaluation(monkeypatch, number: int, nth: int) -> None:
    """Send a signal during the nth evaluation."""
    evaluations = []
    original = Run.evaluate

    def evaluate(self: Run, *arguments, **options):
        evaluations.append(arguments)
        if len(evaluations) == nth:
            signal.raise_signal(number)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Run, "evaluate", evaluate)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stopped_training_ends_with_the_signals_status(config, monkeypatch, capsys, number):
    signalled_in_evaluation(monkeypatch, number, 3)  # the last of smt
    assert main(["train", config, "--folder", "run"]) == STATUS[number]
    *_, line = capsys.readouterr().err.splitlines()
    message = "memtrain: stopped after step 12 of smt, all is saved; "
    assert line == message + "continue with: memtrain resume run"
    assert main(["resume", "run"]) == 0


@pytest.mark.parametrize("nth", [4, 5], ids=["last of the last stage", "table"])
def test_a_stop_at_the_very_end_reports_a_finished_run(config, monkeypatch, capsys, nth):
    signalled_in_evaluation(monkeypatch, signal.SIGTERM, nth)
    assert main(["train", config, "--folder", "run"]) == 143
    *_, line = capsys.readouterr().err.splitlines()
    assert line.endswith("all is saved; the run is finished: memtrain eval run")
    assert Run.open("run").finished


@pytest.mark.parametrize("number", SIGNALS)
def test_another_command_ends_in_one_line(config, monkeypatch, capsys, number):
    Run.create(TINY, "run").train(Reporter(), until="smt")
    signalled_in_evaluation(monkeypatch, number, 1)
    assert main(["eval", "run"]) == STATUS[number]
    assert capsys.readouterr().err == "memtrain: stopped\n"


def test_a_signal_that_a_library_converts_to_another_exception_prints_no_traceback(
    monkeypatch, capsys
):
    def command(arguments: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise SystemError("a result with an exception set") from None
        return 0

    monkeypatch.setattr("memtrain.cli.data.data", command)
    assert main(["data"]) == 143
    assert capsys.readouterr().err == "memtrain: stopped\n"


def test_a_second_signal_ends_a_training_at_once(config, monkeypatch):
    class Ended(BaseException):
        pass

    def end(number: int) -> None:
        raise Ended(number)

    def evaluate(self: Run, *arguments: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(stopping, "end_by_signal", end)
    monkeypatch.setattr(Run, "evaluate", evaluate)
    with pytest.raises(Ended, match="15"), command_signals():
        Run.create(TINY, "run").train()


PRESSED = """
import signal, sys
from memtrain import __main__, cli

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "memtrain.cli.data":
            signal.raise_signal(int(sys.argv[2]))  # the import lasts as long as this

sys.meta_path.insert(0, Finder())
sys.argv[0] = "memtrain"
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_an_import_ends_the_command_in_one_line(tmp_path: Path, number):
    assert COMMANDS["data"] == "data:data"
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, "data", str(int(number))], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (STATUS[number], "memtrain: stopped\n")


def test_a_signal_in_a_destructor_still_ends_the_command(tmp_path: Path):
    script = """
import signal, sys
from types import SimpleNamespace
from memtrain import cli

class Closing:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def command(arguments):
    Closing()
    return 0

cli.import_module = lambda name: SimpleNamespace(data=command)
sys.exit(cli.main(["data"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "memtrain: stopped\n")
