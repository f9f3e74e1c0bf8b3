"""Stopping when asked: a first signal ends the run after the step, a second one at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(Exception):
    """Someone asked to stop; everything is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopRequest:
    """Which signal asked to stop, if any did."""

    signal_number = 0


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """A request that Ctrl-C or SIGTERM sets; a second one stops at once, as usual."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: object) -> None:
        stop.signal_number = number
        for name, handler in before.items():
            signal.signal(name, handler)

    before = {name: signal.signal(name, request) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
