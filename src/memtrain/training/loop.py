"""The training loop of one stage: step, log, evaluate, save, stop."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memtrain.accel.engine import out_of_memory
from memtrain.config import LogConfig
from memtrain.errors import DivergedError, EndStage
from memtrain.evaluation.evaluate import Evaluation
from memtrain.runs.async_checkpoint import CheckpointWriter
from memtrain.runs.checkpoint import Checkpoint
from memtrain.runs.distributed import Group, full_tensors
from memtrain.runs.processes import Interrupted, StopRequest
from memtrain.runs.progress import MetricsFile, Progress
from memtrain.training.callbacks import Hooks, Metrics
from memtrain.training.console import Reporter
from memtrain.training.step import Trainer

EXCHANGE = 1.0
"""Seconds between two exchanges in which the processes of a run agree whether to stop."""


class Agreement:
    """Stops all processes of a run after the same step.

    They exchange stop requests about once per second instead of after every step; each exchange
    also agrees on the number of steps until the next one.
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
            now: exchange requests even if that is not due yet.
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

    def interrupted(self, where: str, signal_number: int) -> Interrupted:
        """The exception that stops the run."""
        self.request.taken = True
        return Interrupted(f"stopped {where}, all is saved", signal_number)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoop:
    """The loop around a trainer's steps. It keeps the run's progress up to date."""

    name: str
    """The stage's name."""
    trainer: Trainer
    log: LogConfig
    """How often to log, evaluate and save."""
    progress: Progress
    """The run's progress; the last of its stages is this one."""
    metrics: MetricsFile
    writer: CheckpointWriter
    reporter: Reporter
    hooks: Hooks
    """The callbacks, of which the reporter is one."""
    stop: Agreement
    weights: Callable[[], Mapping[str, Tensor]]
    """Returns the run's models as a checkpoint stores them."""
    evaluate: Callable[[int], Evaluation]
    """Scores the models on this many held-out sequences."""
    sequential_ops: Callable[[Trainer], int]
    """Counts the operations on the critical path of one step."""
    newest: list[Evaluation] = field(default_factory=list)
    """The stage's last evaluation."""

    def train(self) -> None:
        """Take the steps that are left.

        Raises:
            Interrupted: a signal; a checkpoint of the last full step is on disk.
            DivergedError: a number stopped being finite.
            MemtrainError: of a callback; a checkpoint of the last full step is on disk.
        """
        trainer = self.trainer
        self.hooks.tell("on_stage_start", self.name, trainer.step, trainer.stage.steps)
        announced = not trainer.stage.curriculum
        while trainer.step < trainer.stage.steps:
            self.writer.check()
            announced = self._update_length(announced)
            trainer.group.step = self.progress.global_step + 1
            with self._explained_errors():
                metrics = trainer.train_step()
            self.after_step(metrics)
            if trainer.done:
                break  # a stop is honoured when the stage is saved as finished
            if number := self.stop.reached():
                self.save()
                self.writer.wait()
                raise self.stop.interrupted(f"after step {trainer.step} of {self.name}", number)
        trainer.objective.sync_readout(full_tensors)

    def _update_length(self, announced: bool) -> bool:
        """Move on in the curriculum if that is due, and count the steps to come as they cost."""
        trainer = self.trainer
        with self._explained_errors():
            changed = trainer.update_length()
        if changed:
            stage = self.progress.stages[self.progress.stage]
            stage.lengths_over = trainer.lengths_over
            stage.sequential_ops_a_step = self.sequential_ops(trainer)
        if changed or not announced:
            self.reporter.say(
                f"{self.name}: sequences of {trainer.length} tokens from step {trainer.step + 1}"
            )
        return True

    def after_step(self, metrics: Mapping[str, Tensor]) -> None:
        """Count the step; log, evaluate and save if that is due."""
        log, trainer, progress = self.log, self.trainer, self.progress
        last = trainer.done
        logged = trainer.step % log.every == 0 or last
        evaluated = last or (log.evaluate_every and trainer.step % log.evaluate_every == 0)
        saved = trainer.step % log.checkpoint_every == 0
        if logged or evaluated or saved:
            with self._explained_errors():
                self._count_skipped()
        progress.step = trainer.step
        progress.global_step += 1
        stage = progress.stages[progress.stage]
        stage.steps, stage.tokens = trainer.step, trainer.tokens
        stage.sequential_ops += stage.sequential_ops_a_step
        stage.seconds, stage.start_up_seconds = trainer.clock.seconds, trainer.clock.start_up
        problem = None
        if logged or evaluated:
            values = {key: float(value) for key, value in metrics.items()}
            record = {"stage": self.name, "step": trainer.step, **progress.totals(), **values}
            record["learning_rate"] = trainer.rate
            if trainer.stage.curriculum:
                record["length"] = trainer.length
            saved |= self._evaluate(record) if evaluated else False
            if trainer.group.main:
                self.metrics.append(record)
            problem = self._tell(record, values)
        if isinstance(problem, EndStage):
            self._end(problem, trainer.step if evaluated else trainer.step + 1)
        elif problem is not None:
            self.save()
            self.writer.wait()
            raise problem
        if saved and not trainer.done:
            self.save()

    def _evaluate(self, record: dict[str, Any]) -> bool:
        """Score the models; returns whether this is the lowest held-out loss so far."""
        self.trainer.objective.sync_readout(full_tensors)
        evaluation = self.evaluate(self.log.evaluate_sequences)
        self.newest[:] = [evaluation]
        record["evaluation"] = evaluation.to_json()
        return self.progress.is_best(evaluation.rnn.nats)

    def _tell(self, record: dict[str, Any], losses: dict[str, float]) -> Exception | None:
        """Call the hooks of a step; returns what a callback asked for."""
        trainer, limited = self.trainer, self.trainer.stage.seconds
        metrics = Metrics(
            record=record,
            losses=losses,
            steps=trainer.stage.steps,
            evaluation=self.newest[0] if self.newest else None,
            unit=trainer.task.unit,
            seconds_left=trainer.clock.left if limited else None,
        )
        if metrics.evaluated:
            self.hooks.tell("on_evaluation", metrics)
        self.hooks.tell("on_step", metrics)
        self.hooks.tell_checkpoint(self.writer.saved, self.writer.folder)
        return self.hooks.settle()

    def _end(self, end: EndStage, step: int) -> None:
        """End the stage after a step, which is evaluated, because a callback asked for it."""
        trainer, stage = self.trainer, self.progress.stages[-1]
        if trainer.done or trainer.last_step is not None:
            return
        trainer.last_step = step
        if not stage.is_over(trainer.stage):  # else patience has ended it
            stage.ended_of = trainer.stage.steps
        best = self.progress.best
        kept = f"; the best checkpoint is of step {best.step} of {best.stage}" if best else ""
        self.reporter.say(
            f"{self.name}: ends after step {step} of {trainer.stage.steps}: {end}{kept}"
        )

    def save(self) -> None:
        """Save a checkpoint; it is written while training continues."""
        self._count_skipped()
        progress = self.progress
        if progress.global_step == self.writer.begun and progress.step:
            return  # this very step is saved, or being saved
        progress.metrics_bytes = self.metrics.length()
        checkpoint = Checkpoint(self.weights(), self.trainer.tensors(), progress)
        if self.trainer.group.main:
            self.writer.save(progress.global_step, checkpoint, self.metrics.sync)
        else:  # else it would gather the same step again, alone
            self.writer.leave_to_another(progress.global_step)

    def _count_skipped(self) -> None:
        """Count the steps that were skipped, and report when there are more than before."""
        skipped, stage = self.trainer.check(), self.progress.stages[-1]
        stage.skipped_in_a_row = self.trainer.bad_in_a_row if skipped else 0
        if skipped > stage.skipped:
            stage.skipped = skipped
            self.reporter.say(
                f"{stage.name} step {self.trainer.step}: {skipped} steps so far had a loss or "
                "gradient that is not finite; their updates were left out"
            )

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Name the stage, and what to change, in errors of a step."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            trainer = self.trainer
            raise out_of_memory(error, self.name, trainer.stage, trainer.ordered) from None
        except DivergedError as error:
            raise DivergedError(
                f"{self.name} {error}: stopped; the last good checkpoint stays, try a smaller "
                f"{self.name}.learning_rate"
            ) from None
