"""BPTT in processes of its own: one training per learning rate, for equal steps and seconds."""

import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from memtrain.config import RunConfig
from memtrain.errors import MemtrainError
from memtrain.runs.processes import die_with_parent, hear_interrupts, start_process
from memtrain.runs.progress import MetricsFile
from memtrain.training.console import Reporter
from memtrain.training.run import Interrupted, Run

RATES = (3e-4, 1e-3, 3e-3)
"""BPTT's learning rates."""
MAX_STEPS_RATIO = 50
"""Upper bound on BPTT's steps, as a multiple of equal steps, however fast they are."""


def scientific(rate: float) -> str:
    """A learning rate as 3e−4, with a minus sign, where no line is broken."""
    return f"{rate:.0e}".replace("e-0", "e\N{MINUS SIGN}")


class BaselineTraining:
    """BPTT in a process of its own.

    It trains for at least `steps` steps and for the seconds that `equal_seconds` sends it.
    """

    def __init__(self, config: RunConfig, folder: Path, steps: int) -> None:
        # The warm-up is a fraction of the steps, whose number is not known yet.
        ratio = MAX_STEPS_RATIO
        stage = replace(config.bptt, steps=ratio * steps, warmup=config.bptt.warmup / ratio)
        Run.create(replace(config, bptt=stage), folder, overwrite=True)
        self.folder, self.steps = folder, steps
        self.rate = config.bptt.learning_rate
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.last = {"step": 0, "total_seconds": 0.0, "loss": math.nan}
        """The latest line of its metrics."""
        self.began = math.inf
        self.done = False
        spawn = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        self.connection, self.far_end = spawn.Pipe()
        self.process = spawn.Process(target=_train, args=(self.far_end, folder, steps), daemon=True)

    def start(self) -> None:
        start_process(self.process)
        self.began = time.monotonic()
        self.far_end.close()  # otherwise reading would not end when the process does

    def kill(self) -> None:
        """End the process, if it runs; the next demo replaces its run."""
        if not self.waiting:
            self.process.kill()
            self.process.join()

    @property
    def waiting(self) -> bool:
        """Whether it has not been started."""
        return self.began == math.inf

    @property
    def running(self) -> bool:
        return not self.waiting and not self.done

    def equal_seconds(self, seconds: float) -> None:
        """Send how long to train at least."""
        with suppress(OSError):  # the process has ended: `poll` reports it
            self.connection.send(seconds)

    def poll(self) -> None:
        """Read how far it is.

        Raises:
            MemtrainError: training failed.
        """
        self.last = (self.metrics.read() or [self.last])[-1]
        if not self.running or not self.connection.poll():
            return
        try:
            problem = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            problem = f"{self.folder}: the training process ended, exit code {code}"
        if problem:
            raise MemtrainError(problem)
        self.done = True

    def fraction(self, seconds: float) -> float:
        """How much of the training is done."""
        if self.done:
            return 1.0
        steps, trained = self.last["step"] / self.steps, self.last["total_seconds"]
        return min(1.0, steps, trained / max(1e-3, seconds))


class BaselineQueue:
    """Context manager that runs trainings, a few at the same time; at its end none is left."""

    def __init__(self, trainings: Sequence[BaselineTraining], at_once: int) -> None:
        self.trainings, self.at_once = trainings, at_once

    def __enter__(self) -> "BaselineQueue":
        return self

    def __exit__(self, *error: object) -> None:
        for training in self.trainings:
            training.kill()

    def start(self, at_once: int) -> list[BaselineTraining]:
        """Start trainings until this many run; returns them."""
        running = sum(training.running for training in self.trainings)
        waiting = [training for training in self.trainings if training.waiting]
        started = waiting[: max(0, at_once - running)]
        for training in started:
            training.start()
        return started

    def finish(self, seconds: float, reporter: Reporter) -> None:
        """Run all trainings to their end, each for at least these seconds; report the progress.

        Raises:
            MemtrainError: one of them failed.
        """
        for training in self.trainings:
            if training.running:
                training.equal_seconds(seconds)
                training.poll()
        began = self.steps
        reporter.stage("bptt", began, sum(MAX_STEPS_RATIO * one.steps for one in self.trainings))
        while not all(training.done for training in self.trainings):
            for training in self.start(self.at_once):
                training.equal_seconds(seconds)
            for training in self.trainings:
                training.poll()
            if self.steps > began:
                self._report(seconds, reporter)
            running = [training.connection for training in self.trainings if training.running]
            multiprocessing.connection.wait(running, timeout=0.5)
        reporter.close()

    @property
    def steps(self) -> int:
        """Steps of all trainings so far."""
        return sum(training.last["step"] for training in self.trainings)

    def _report(self, seconds: float, reporter: Reporter) -> None:
        reporter.clock(self._left(seconds))
        begun = [training for training in self.trainings if training.last["step"]]
        losses = {f"loss({scientific(one.rate)})": one.last["loss"] for one in begun}
        reporter.advance(self.steps, losses)

    def _left(self, seconds: float) -> float:
        """Seconds until all trainings have ended; at least one while one still runs."""
        fractions = [training.fraction(seconds) for training in self.trainings]
        now = time.monotonic()
        took = [
            (now - training.began) / fraction
            for training, fraction in zip(self.trainings, fractions, strict=True)
            if training.running and fraction
        ]
        typical = sum(took) / len(took) if took else seconds
        left = [typical * (1 - fraction) for fraction in fractions]
        least = 0.0 if all(training.done for training in self.trainings) else 1.0
        return max(*left, sum(left) / self.at_once, least)


class _UntilEqual(Reporter):
    """Stops its run as a signal would, at the first evaluation after enough steps and seconds."""

    def __init__(self, run: Run, steps: int, connection: Connection) -> None:
        self.run, self.steps, self.connection = run, steps, connection
        self.seconds = math.inf

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if self.connection.poll():
            self.seconds = self.connection.recv()
        evaluated = step % self.run.config.log.evaluate_every == 0
        if evaluated and step >= self.steps and self.run.totals()["total_seconds"] >= self.seconds:
            signal.raise_signal(signal.SIGTERM)


def _train(connection: Connection, folder: Path, steps: int) -> None:
    """Entry point of the process; sends "" when training is done, or the error message."""
    die_with_parent()
    hear_interrupts(signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    try:
        run = Run.open(folder)
        with suppress(Interrupted):
            run.train(_UntilEqual(run, steps, connection))
        connection.send("")
    except MemtrainError as error:
        connection.send(str(error))
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone
    os._exit(0)  # a normal exit could still be aborted by torch's threads
