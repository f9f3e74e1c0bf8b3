"""Processes and signals: starting and ending processes, stopping on Ctrl-C, SIGTERM or SIGHUP.

A training run notes the first signal, saves after the step and ends. Any other command ends at
the first signal, with one line of output. A second signal ends the process at once. SIGUSR1, which
a scheduler sends before a time limit, does the same with the exit status that asks for a requeue.
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
"""The process that started this one; the parent changes when it dies."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REQUEUE = 75
"""Exit status after SIGUSR1 (EX_TEMPFAIL of sysexits.h): start the same command again."""
REPEATED = 5.0
"""Seconds within which a second signal counts as the same request under torchrun: a scheduler
signals the workers and also the launcher, which forwards the signal to the workers."""


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def start_process(process: BaseProcess) -> None:
    """Start a spawned process with Ctrl-C blocked until it calls `hear_interrupts`.

    It would otherwise end with a traceback somewhere in its imports. No signal is lost: a blocked
    signal stays pending, in the parent during the start, in the child until it is unblocked.
    """
    resource_tracker.ensure_running()  # its own start, if within ours, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()  # the child inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_interrupts(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Unblock Ctrl-C in a process of `start_process`; the handler also gets a pending one.

    Where Ctrl-C is ignored, as in a shell's background job, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def die_with_parent(grace: float = 0.0) -> None:
    """End this spawned process when its parent is gone, so that no orphan keeps training.

    Args:
        grace: seconds in which a run may save itself first, after SIGTERM.
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
    """Send SIGTERM to this process when the launcher that started it is gone."""

    def watch() -> None:
        while os.getppid() == PARENT:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher watch").start()


def size_of_group() -> int:
    """How many processes torchrun has started; 1 without torchrun."""
    size = os.environ.get("WORLD_SIZE", "")
    return max(1, int(size)) if size.isdecimal() else 1


def end_process(status: int) -> NoReturn:
    """Flush the output and end this process at once, without Python's finalization.

    torch's threads may still run during finalization, which now and then ended a process with a
    traceback or SIGABRT, whatever its status was.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
    os._exit(status)


def end_if_one_of_several(status: int) -> None:
    """`end_process` under torchrun: after a SIGABRT torchrun would restart all processes."""
    if size_of_group() > 1:
        end_process(status)


# ------------------------------------------------------------------------- signals of a command


class Interrupted(Exception):
    """A signal stopped the run; everything is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP ended a command; raised as Python raises KeyboardInterrupt for Ctrl-C."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


def exit_status(stopped: Interrupted | KeyboardInterrupt) -> int:
    """The exit status of a command that a signal ended."""
    return status_of(getattr(stopped, "signal_number", signal.SIGINT))


def status_of(number: int) -> int:
    """The status a shell expects after a signal, 130, 143 or 129; after SIGUSR1 `REQUEUE`."""
    return REQUEUE if number == signal.SIGUSR1 else 128 + number


class CommandSignals:
    """A command's signal handler: the first signal raises, a second one ends the process."""

    def __init__(self) -> None:
        self.first = 0
        """The first signal, here or in a training run within the command."""
        self._at = 0.0

    def note(self, number: int) -> None:
        """Record a signal as the first."""
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
    """Handle the signals of a command. Ignored signals, as SIGHUP under nohup, stay ignored."""
    handler = CommandSignals()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return

    def unraisable(problem: Any) -> None:
        """End also where a signal met code that cannot raise, such as a destructor."""
        if isinstance(problem.exc_value, KeyboardInterrupt):
            end_by_signal(handler.first or signal.SIGINT)
        hook(problem)

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield handler
    finally:
        _restore(before)
        sys.unraisablehook = hook


def end_by_signal(number: int, frame: object = None) -> None:
    """A signal handler that ends this process at once, with one line of output."""
    shown = b"\x1b[?25h\n" if os.isatty(2) else b""  # a progress bar hides the cursor
    os.write(2, shown + b"memtrain: stopped\n")
    os._exit(status_of(number))


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, previous in handlers.items():
        signal.signal(number, previous)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _same_request(first_at: float) -> bool:
    """Whether a second signal is the first one, delivered a second time.

    A process that we spawned may get it from the terminal and from its parent, which kills it if
    it takes too long.
    """
    if multiprocessing.parent_process() is not None:
        return True
    return size_of_group() > 1 and time.monotonic() - first_at < REPEATED


# ---------------------------------------------------------------------- signals during training


class StopRequest:
    """The signal that requested a stop, if any did."""

    def __init__(self) -> None:
        self.signal_number = 0
        self.taken = False
        """Whether the run stopped because of it; if not, `stop_signals` sends the signal again."""


@contextmanager
def stop_signals(*, second_ends: bool = False) -> Iterator[StopRequest]:
    """Note the first signal instead of raising; a second one gets the handler of before.

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
            command = before[signal.Signals(number)]
            if second_ends and isinstance(command, CommandSignals):
                command.note(number)
        elif not _same_request(first_at):
            _restore(before)
            signal.raise_signal(number)

    heeded = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, request) for number in heeded}
    try:
        yield stop
    finally:
        _restore(before)
    if stop.signal_number and not stop.taken:
        signal.raise_signal(stop.signal_number)
