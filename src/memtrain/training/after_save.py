"""Run a command after each checkpoint, for example to copy the run to an object storage."""

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from memtrain.errors import MemtrainError, did_you_mean, printable
from memtrain.training.callbacks import Callback, Metrics

if TYPE_CHECKING:
    from memtrain.training.run import Run

PLACES = ("folder", "name", "checkpoint")
"""What {...} in the command may name."""
LAST_SECONDS = 600.0
"""How long the last copy may take at the end of training."""
SHOWN = 200
"""Characters of a command's last line of output in a message."""


class AfterSave(Callback):
    """Runs a command after checkpoints, one at a time, beside training.

    While it runs, newer checkpoints wait, and one more call then serves all of them. A failure is
    reported and never stops the run; the next call tries again. At the end the last one is waited
    for.
    """

    def __init__(self, command: str, say: Callable[[str], object]) -> None:
        """
        Args:
            command: a program and its arguments, quoted as in a shell, but run without one:
                {folder}, {name} and {checkpoint} stand for the run's folder, its name and the
                newest checkpoint, each within one argument.
            say: reports a failure.

        Raises:
            MemtrainError: the command is not well formed, or there is no such program.
        """
        self.arguments = read_command(command)
        self.say = say
        self.folder = Path()
        self._newest: Path | None = None
        self._waiting = False
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes]

    def on_start(self, run: "Run") -> None:
        self.folder = run.folder
        # A pipe that nobody reads would fill up. `on_end` closes it.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115

    def on_checkpoint(self, path: Path) -> None:
        self._newest, self._waiting = path, True
        self._go_on()

    def on_step(self, metrics: Metrics) -> None:
        self._go_on()

    def on_end(self) -> None:
        """Wait for the command that runs, and call it for the last checkpoint."""
        self._go_on(wait=True)
        self._go_on()
        self._go_on(wait=True)
        self._output.close()

    def _go_on(self, *, wait: bool = False) -> None:
        """Report the command if it has ended, then start it again if that is due."""
        if self._process is not None:
            try:
                status = self._process.wait(LAST_SECONDS) if wait else self._process.poll()
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                self.say(f"after-save: {self.arguments[0]} was ended after {LAST_SECONDS:g} s")
                status = 0
            if status is None:
                return
            self._process = None
            if status:
                self._report(status)
        if self._waiting and self._newest is not None:
            self._waiting = False
            self._start(self._newest)

    def _start(self, checkpoint: Path) -> None:
        places = (self.folder, self.folder.resolve().name, checkpoint)
        values = {f"{{{name}}}": str(place) for name, place in zip(PLACES, places, strict=True)}
        arguments = [
            re.sub(r"\{\w+\}", lambda found: values[found[0]], one) for one in self.arguments
        ]
        self._output.seek(0)
        self._output.truncate()
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C stops training, not the copy of its checkpoint
            )
        except OSError as error:
            self.say(f"after-save: {arguments[0]}: {error.strerror}")

    def _report(self, status: int) -> None:
        size = self._output.seek(0, 2)
        self._output.seek(max(0, size - 4096))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        reason = f": {lines[-1][-SHOWN:]}" if lines else ""
        ended = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
        self.say(printable(f"after-save: {self.arguments[0]} {ended}{reason}"))


def read_command(command: str) -> list[str]:
    """The arguments of a command, checked.

    Raises:
        MemtrainError: it is not well formed, names something unknown, or there is no such program.
    """
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise MemtrainError(f"after-save={command!r}: {error}; check its quotes") from None
    if not arguments:
        raise MemtrainError("after-save: must name a program, such as 'aws s3 sync {folder} ...'")
    for name in re.findall(r"\{(\w*)\}", command):
        if name not in PLACES:
            known = did_you_mean(name, PLACES)
            raise MemtrainError(f"after-save={command!r}: {{{name}}} is unknown; {known}")
    if shutil.which(arguments[0]) is None:
        raise MemtrainError(
            f"after-save={command!r}: there is no program {arguments[0]!r} here; install it, or "
            "give its path"
        )
    return arguments
