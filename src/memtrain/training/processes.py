"""Processes: how many there is room for, how ours begin and end with this one, how one ends."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NoReturn

PARENT = os.getppid()
"""The process that started this one, which is not its parent any more once it has died."""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def start_process(process: BaseProcess) -> None:
    """Start a spawned process in which Ctrl-C waits until it calls `hear_interrupts`.

    It would otherwise end with a traceback somewhere in its imports. Nothing is lost: a blocked
    signal stays pending, here for the moment of the start, there until it is heard.
    """
    resource_tracker.ensure_running()  # its own start, if within ours, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()  # which inherits what is blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_interrupts(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> None:
    """In a process of `start_process`: from here on the handler gets Ctrl-C, an earlier one too.

    Where Ctrl-C is ignored, as for a command in a shell's background, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def die_with_parent(grace: float = 0.0) -> None:
    """End this spawned process when its parent is gone, so that no process is left that trains.

    Args:
        grace: seconds in which a training may save itself first, as after SIGTERM.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        if grace:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def stop_with_parent() -> None:
    """Stop this process as SIGTERM does when the launcher that started it is gone."""

    def watch() -> None:
        while os.getppid() == PARENT:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher watch").start()


def size_of_group() -> int:
    """How many processes torchrun has started; 1 without it, whatever the variable says then."""
    size = os.environ.get("WORLD_SIZE", "")
    return max(1, int(size)) if size.isdecimal() else 1


def end_process(status: int) -> NoReturn:
    """End this process at once, with what it has printed, but without Python's own end.

    torch's threads may still run while Python takes itself down, which now and then ended a
    process with a traceback or SIGABRT, whatever its status was.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


def end_if_one_of_several(status: int) -> None:
    """End this process at once, if torchrun started it as one of several: were it to end with
    SIGABRT, torchrun would start all of them again."""
    if size_of_group() > 1:
        end_process(status)
