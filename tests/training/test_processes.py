"""Ctrl-C in the first moments of a process, and how many processes there are."""

import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.training.processes import size_of_group

SCRIPT = """
import multiprocessing
import os
import signal
import sys

from memtrain.training.processes import hear_interrupts, start_process


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
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "the parent hears again"
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(
    "parents, childs", [("default_int_handler", "heard"), ("SIG_IGN", "nothing")]
)
def test_a_starting_process_hears_ctrl_c_when_it_is_ready(
    tmp_path: Path, parents: str, childs: str
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, parents], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, childs, "")


ORPHAN = """
import os
import signal
import sys
import time

from memtrain.training.processes import stop_with_parent

parent = os.getpid()
if not os.fork():
    signal.signal(signal.SIGTERM, lambda number, frame: (print("stopped"), sys.exit()))
    import memtrain.training.processes
    memtrain.training.processes.PARENT = parent  # as if this process had imported it
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

from memtrain.training.processes import die_with_parent
from memtrain.training.signals import stop_signals


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


@pytest.mark.parametrize(("said", "size"), [("8", 8), ("1", 1), ("0", 1), ("", 1), ("many", 1)])
def test_a_variable_that_torchrun_did_not_set_is_one_process(monkeypatch, said: str, size: int):
    monkeypatch.setenv("WORLD_SIZE", said)
    assert size_of_group() == size
    monkeypatch.delenv("WORLD_SIZE")
    assert size_of_group() == 1
