"""One stage of a run, step by step: what is written, looked at and saved, and when it stops."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from memtrain.accel.engine import out_of_memory
from memtrain.config import LogConfig
from memtrain.errors import DivergedError
from memtrain.evaluation.evaluate import Evaluation
from memtrain.training.async_checkpoint import CheckpointWriter
from memtrain.training.checkpoint import Checkpoint
from memtrain.training.console import Reporter
from memtrain.training.distributed import Group, full_tensors
from memtrain.training.metrics import MetricsFile
from memtrain.training.processes import Interrupted, StopRequest
from memtrain.training.step import Trainer

EXCHANGE = 1.0
"""Seconds between two exchanges in which the processes of a run agree whether to stop."""


class Agreement:
    """Whether the processes of a run stop: all of them after the same step.

    They exchange it about once per second, and not after every step. How many steps that is, they
    agree in the exchange before.
    """

    def __init__(self, request: StopRequest, group: Group) -> None:
        self.request = request
        self.group = group
        self._every = 1
        self._steps = 0
        self._since = time.monotonic()

    def reached(self, *, now: bool = False) -> int:
        """The signal that stops the run here, else 0. All processes call this after each step.

        Args:
            now: exchange it in any case.
        """
        if self.group.size == 1:
            return self.request.signal_number
        self._steps += 1
        if self._steps < self._every and not now:
            return 0
        passed = max(1e-6, time.monotonic() - self._since)
        fitting = max(1, int(self._steps * EXCHANGE / passed))
        every = min(fitting, 2 * self._every)
        found, fewest = self.group.highest([self.request.signal_number, -every])
        self._every, self._steps, self._since = -fewest, 0, time.monotonic()
        return found

    def interrupted(self, message: str, signal_number: int) -> Interrupted:
        """The exception with which the run stops."""
        self.request.taken = True
        return Interrupted(message, signal_number)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoop:
    """The loop around a trainer's steps. It keeps the run's progress up to date."""

    name: str
    """The stage's name."""
    trainer: Trainer
    """Takes the steps."""
    log: LogConfig
    """How often to write, look and save."""
    progress: dict[str, Any]
    """How far the run is; the last of its stages is this one."""
    metrics: MetricsFile
    """Where the numbers go."""
    writer: CheckpointWriter
    """Where the checkpoints go."""
    reporter: Reporter
    """Hears how it goes."""
    stop: Agreement
    """Whether a signal stops the run."""
    weights: Callable[[], Mapping[str, Tensor]]
    """The run's models as a checkpoint has them."""
    evaluate: Callable[[int], Evaluation]
    """Scores the models as they are now on so many held-out sequences."""

    def train(self) -> None:
        """Take the steps that are left.

        Raises:
            Interrupted: a signal; a checkpoint of the last full step is on disk.
            DivergedError: a number stopped being finite.
        """
        trainer = self.trainer
        self.reporter.stage(self.name, trainer.step, trainer.stage.steps)
        while trainer.step < trainer.stage.steps:
            self.step()
            if trainer.done:
                break  # a stop is honoured when the stage is saved as finished
            if number := self.stop.reached():
                self.save()
                self.writer.wait()
                message = f"stopped after step {trainer.step} of {self.name}, all is saved"
                raise self.stop.interrupted(message, number)
        trainer.objective.sync_readout(full_tensors)

    def step(self) -> None:
        """One step, and what is due after it: a line of metrics, an evaluation, a checkpoint."""
        log, trainer = self.log, self.trainer
        self.writer.check()
        trainer.group.step = self.progress["global_step"] + 1
        stage = self.progress["stages"][self.progress["stage"]]
        try:
            metrics = trainer.train_step()
            last = trainer.done
            written = trainer.step % log.every == 0 or last
            looked = last or (log.evaluate_every and trainer.step % log.evaluate_every == 0)
            saved = trainer.step % log.checkpoint_every == 0
            if written or looked or saved:
                self._tell_skipped()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, self.name, trainer.stage, trainer.ordered) from None
        except DivergedError as error:
            raise DivergedError(
                f"{self.name} {error}: stopped; the last good checkpoint stays, try a smaller "
                f"{self.name}.learning_rate"
            ) from None
        self.progress["step"] = trainer.step
        self.progress["global_step"] += 1
        stage |= {
            "steps": trainer.step,
            "tokens": trainer.tokens,
            "sequential_ops": trainer.step * stage["sequential_ops_a_step"],
            "seconds": trainer.clock.seconds,
        }
        if trainer.clock.start_up is not None:
            stage["start_up_seconds"] = trainer.clock.start_up
        if written or looked:
            values = {key: float(value) for key, value in metrics.items()}
            record = {"stage": self.name, "step": trainer.step, **totals(self.progress), **values}
            record["learning_rate"] = trainer.rate
            if looked:
                trainer.objective.sync_readout(full_tensors)
                evaluation = self.evaluate(log.evaluate_sequences)
                record["evaluation"] = asdict(evaluation)
                self.reporter.evaluated(trainer.step, evaluation, trainer.task.unit)
                saved |= self._is_best(evaluation.rnn.nats)
            if trainer.group.main:
                self.metrics.append(record)
            if trainer.stage.seconds:
                self.reporter.clock(trainer.clock.left)
            self.reporter.advance(trainer.step, values)
        if saved and not last:
            self.save()

    def _is_best(self, nats: float) -> bool:
        """Note the lowest held-out loss of the RNN, from the empty memory, in all stages."""
        best = self.progress.get("best")
        if not math.isfinite(nats) or (best is not None and not nats < best["nats"]):
            return False
        step, global_step = self.trainer.step, self.progress["global_step"]
        at = {"stage": self.name, "step": step, "global_step": global_step}
        self.progress["best"] = at | {"nats": nats}
        return True

    def _tell_skipped(self) -> None:
        """Note the steps that were left out, and say so when there are more than before."""
        bad, stage = self.trainer.check(), self.progress["stages"][-1]
        if bad:
            stage["skipped_in_a_row"] = self.trainer.bad_in_a_row
        if bad > stage.get("skipped", 0):
            stage["skipped"] = bad
            self.reporter.say(
                f"{stage['name']} step {self.trainer.step}: {bad} steps so far had a loss or "
                "gradient that is not finite; their updates were left out"
            )

    def save(self) -> None:
        """Save the run as it stands; the checkpoint is written while training goes on."""
        self._tell_skipped()
        number, begun = self.progress["global_step"], self.writer.begun
        if number == begun and self.progress["step"]:
            return  # this very step is saved, or being saved
        self.progress["metrics_bytes"] = self.metrics.length()
        checkpoint = Checkpoint(self.weights(), self.trainer.tensors(), self.progress)
        if self.trainer.group.main:
            self.writer.save(number, checkpoint, self.metrics.sync)
        else:
            self.writer.leave_to_another(number)  # else it would gather the same step again, alone


def totals(progress: Mapping[str, Any]) -> dict[str, int | float]:
    """Steps, tokens, sequential operations and training seconds of all stages so far."""
    return {
        f"total_{key}": sum(stage.get(key, 0) for stage in progress["stages"])
        for key in ("steps", "tokens", "sequential_ops", "seconds")
    }
