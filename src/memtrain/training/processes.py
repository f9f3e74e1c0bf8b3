"""Processes and signals: starting and ending processes, and stopping on Ctrl-C, SIGTERM or SIGHUP.

A training run notes the first signal, saves after the step and ends. Any other command ends at
the first signal, in one line. A second signal ends the process at once.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

PARENT = os.getppid()
"""The process that started this one, which is not its parent any more once it has died."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEATED = 5.0
"""Seconds in which one of several processes takes a further signal for the same request: a
scheduler signals the workers and their launcher, which passes it on to the workers."""


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


# ---------------------------------------------------------------------------------------- signals


class Interrupted(Exception):
    """A signal stopped the run; everything is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class Terminated(KeyboardInterrupt):
    """A signal ends a command: raised in its main thread for SIGTERM and SIGHUP, as Python raises
    KeyboardInterrupt for Ctrl-C."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


def exit_status(stopped: Interrupted | KeyboardInterrupt) -> int:
    """The status a shell expects of a command that a signal ended: 130, 143 or 129."""
    return 128 + getattr(stopped, "signal_number", signal.SIGINT)


# ------------------------------------------------------------------------------------- commands


class CommandSignals:
    """The handler of a command's signals: the first one raises, a second one ends the process."""

    def __init__(self) -> None:
        self.first = 0
        """The first signal, here or in a training within the command."""
        self._at = 0.0

    def note(self, number: int) -> None:
        """Take a signal as the first."""
        self.first, self._at = number, time.monotonic()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first and _same_request(self._at):
            return
        # Raised inside an import, an exception may come out as another one, or not at all.
        if self.first or _importing(frame):
            end_by_signal(number)
        self.note(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


@contextmanager
def command_signals() -> Iterator[CommandSignals]:
    """Handle the signals of a command. What is ignored, as SIGHUP under nohup, stays so."""
    handler = CommandSignals()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return

    def unraisable(problem: Any) -> None:
        """A signal that met code which cannot raise, such as a destructor, still ends it."""
        if isinstance(problem.exc_value, KeyboardInterrupt):
            end_by_signal(handler.first or signal.SIGINT)
        hook(problem)

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield handler
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        sys.unraisablehook = hook


def end_by_signal(number: int, frame: object = None) -> None:
    """End this process at once, in one line, as a handler of a signal."""
    shown = b"\x1b[?25h\n" if os.isatty(2) else b""  # a progress bar hides the cursor
    os.write(2, shown + b"memtrain: stopped\n")
    os._exit(128 + number)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _same_request(first_at: float) -> bool:
    """Whether a further signal is the first one, which came by another way.

    A process that we spawned may get it from the terminal and from its parent, which kills it when
    it has waited long enough.
    """
    if multiprocessing.parent_process() is not None:
        return True
    return size_of_group() > 1 and time.monotonic() - first_at < REPEATED


# ------------------------------------------------------------------------------------- training


class StopRequest:
    """Which signal requested a stop, if any did."""

    def __init__(self) -> None:
        self.signal_number = 0
        self.taken = False
        """Whether the stop has been acted upon; else the signal is sent again when
        `stop_signals` ends, so that it is not lost."""


@contextmanager
def stop_signals(*, second_ends: bool = False) -> Iterator[StopRequest]:
    """Note the first signal instead of raising; a second one does what it did before.

    Args:
        second_ends: a second signal ends a command's process at once, without raising.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    first_at = 0.0

    def request(number: int, frame: object) -> None:
        nonlocal first_at
        if not stop.signal_number:
            stop.signal_number, first_at = number, time.monotonic()
            if second_ends and isinstance(
                command := before[signal.Signals(number)], CommandSignals
            ):
                command.note(number)
        elif not _same_request(first_at):
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, previous in before.items():
            signal.signal(number, previous)

    heeded = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, request) for number in heeded}
    try:
        yield stop
    finally:
        restore()
    if stop.signal_number and not stop.taken:
        signal.raise_signal(stop.signal_number)
