"""A second run at the same time, in a process of its own: the demo's baseline."""

import math
import multiprocessing
import os
import signal
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from memtrain.config import RunConfig
from memtrain.errors import MemtrainError
from memtrain.training.metrics import MetricsFile
from memtrain.training.processes import die_with_parent, hear_interrupts, start_process
from memtrain.training.reporter import Reporter
from memtrain.training.run import Interrupted, Run

MOST = 50
"""Times the equal steps that BPTT takes at most, however fast its steps are."""


class BaselineProcess:
    """`with Alongside(config, folder, steps) as baseline:` trains BPTT while the caller trains too.

    It goes on until it has had as many steps, and as many seconds as the caller then tells.
    """

    def __init__(self, config: RunConfig, folder: Path, steps: int) -> None:
        # The warm-up is a share of the steps, and these are not known yet.
        stage = replace(config.bptt, steps=MOST * steps, warmup=config.bptt.warmup / MOST)
        Run.create(replace(config, bptt=stage), folder, overwrite=True)
        self.folder, self.steps, self.look = folder, steps, max(1, config.log.evaluate_every)
        spawn = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        self.connection, self.there = spawn.Pipe()
        self.process = spawn.Process(target=_train, args=(self.there, folder, steps), daemon=True)

    def __enter__(self) -> "BaselineProcess":
        start_process(self.process)
        self.there.close()  # else nobody would hear that the process is gone
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.is_alive():
            self.process.kill()  # the next demo replaces its run
        self.process.join()

    def finish(self, seconds: float, reporter: Reporter) -> Run:
        """The run once it has trained for as many seconds; the reporter hears of it meanwhile.

        Raises:
            MemtrainError: it failed.
        """
        with suppress(OSError):  # it is gone: that is told below
            self.connection.send(seconds)
        metrics, told = MetricsFile(self.folder / "metrics.jsonl"), 0
        while not self.connection.poll(0.5):
            if not (lines := metrics.read()) or lines[-1]["step"] == told:
                continue
            last = lines[-1]
            if not told:
                rate = last["step"] / max(1e-3, last["total_seconds"])
                steps = max(self.steps, last["step"], rate * seconds)
                reporter.stage("bptt", last["step"], math.ceil(steps / self.look) * self.look)
            else:
                reporter.advance(last["step"], {"loss": last["loss"]})
            told = last["step"]
        reporter.close()
        self._receive()
        return Run.open(self.folder)

    def _receive(self) -> None:
        """Hear that it is done, or why not."""
        try:
            problem = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            problem = f"{self.folder}: the process that trains it ended, exit code {code}"
        if problem:
            raise MemtrainError(problem)


class _UntilEqual(Reporter):
    """Stops its run as a signal would, at the first look after it has had steps and seconds."""

    def __init__(self, run: Run, steps: int, connection: Connection) -> None:
        self.run, self.steps, self.connection = run, steps, connection
        self.seconds = math.inf

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if self.connection.poll():
            self.seconds = self.connection.recv()
        looked = step % self.run.config.log.evaluate_every == 0
        if looked and step >= self.steps and self.run.totals()["total_seconds"] >= self.seconds:
            signal.raise_signal(signal.SIGTERM)


def _train(connection: Connection, folder: Path, steps: int) -> None:
    """The process. It says "" when it is done, or what went wrong."""
    die_with_parent()
    hear_interrupts(signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this one
    try:
        run = Run.open(folder)
        with suppress(Interrupted):
            run.train(_UntilEqual(run, steps, connection))
        connection.send("")
    except MemtrainError as error:
        connection.send(str(error))
    except (EOFError, OSError):
        os._exit(1)  # nobody listens any more
    os._exit(0)  # torch's threads could still abort a process that ends as usual
