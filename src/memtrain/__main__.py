"""The command `memtrain`, also as `python -m memtrain`."""

import os
import signal
import sys


def _stop(number: int, frame: object) -> None:
    os.write(2, b"memtrain: stopped\n")
    os._exit(75 if number == signal.SIGUSR1 else 128 + number)  # as runs/processes.py


def main() -> int:
    """Run the command; a signal that arrives while modules are imported ends it in one line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)

    if os.environ.get("WORLD_SIZE", "1") != "1":
        # torch prints a stack of C++ when the others, or their launcher, are gone; we say it.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from memtrain.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
