"""The command `memtrain`, also as `python -m memtrain`."""

import os
import signal
import sys


def _stop(number: int, frame: object) -> None:
    os.write(2, b"memtrain: stopped\n")
    os._exit(128 + number)


def main() -> int:
    """Run the command; a signal that arrives while modules are imported ends it in one line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)

    from memtrain.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
