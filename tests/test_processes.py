"""Ctrl-C in the first moments of a process, and how many processes there are."""

import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.processes import size_of_group

SCRIPT = """
import multiprocessing
import os
import signal
import sys

from memtrain.processes import hear_interrupts, start_process


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


@pytest.mark.parametrize(("said", "size"), [("8", 8), ("1", 1), ("0", 1), ("", 1), ("many", 1)])
def test_a_variable_that_torchrun_did_not_set_is_one_process(monkeypatch, said: str, size: int):
    monkeypatch.setenv("WORLD_SIZE", said)
    assert size_of_group() == size
    monkeypatch.delenv("WORLD_SIZE")
    assert size_of_group() == 1
