"""Train the stages of a run: its folder is locked, and one loop follows the other."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from memtrain.config import CUSTOM_PATH
from memtrain.errors import MemtrainError
from memtrain.evaluation.cost import sequential_ops
from memtrain.runs import run_folder
from memtrain.runs.distributed import full_tensors, last_saved, lost_worker
from memtrain.runs.processes import stop_signals
from memtrain.runs.progress import StageProgress
from memtrain.runs.run_folder import Guard, RunFile
from memtrain.training.callbacks import Callback, EarlyStopping, Hooks
from memtrain.training.console import Reporter
from memtrain.training.loop import Agreement, StageLoop
from memtrain.training.step import Trainer

if TYPE_CHECKING:
    from memtrain.training.run import Run


class Training:
    """One call of `Run.train`.

    Args:
        run: the run, whose models and progress it changes.
        reporter: shows the progress, and receives messages.
        callbacks: the user's.
    """

    def __init__(self, run: "Run", reporter: Reporter, callbacks: Iterable[Callback]) -> None:
        self.run, self.reporter = run, reporter
        # Early stopping first: its counters are part of the checkpoint.
        self.hooks = Hooks([EarlyStopping(), reporter, *callbacks], run.group)

    def train(self, last: int) -> None:
        """Train the stages that are left, up to a number of them."""
        run, hooks = self.run, self.hooks
        self._check_code()
        with stop_signals(second_ends=True) as request, ExitStack() as stack:
            stop, where, number = Agreement(request, run.group), "before its next step", 0
            run.group.from_main(lambda: self._take(stack))
            if run.config.engine.shard_teacher and run.teacher is not None:
                run.group.shard_teacher_weights(run.teacher, run.engine.device)
            try:
                with run.group.watched(self._saved):
                    hooks.checkpoint = run.writer.saved
                    hooks.tell("on_start", run)
                    self._raise_errors()
                    self._prepare_engine()
                    while not (number := stop.reached(now=True)) and run.progress.stage < last:
                        loop = self._stage_loop(run.stages[run.progress.stage], stop)
                        with loop.trainer.frozen_rest():
                            self._start_stage(loop)
                            loop.train()
                        run.progress.stage, run.progress.step = run.progress.stage + 1, 0
                        loop.save()
                        hooks.tell("on_stage_end", loop.name, loop.trainer.step)
                        self._raise_errors()
                        where = f"after step {loop.trainer.step} of {loop.name}"
                    run.writer.wait()
                    hooks.tell_checkpoint(run.writer.saved, run.writer.folder)
                    self._raise_errors()
                    if number := number or stop.reached(now=True):
                        raise stop.interrupted(where, number)
            except RuntimeError as error:
                if run.group.size == 1:
                    raise
                raise lost_worker(error, run.writer.last_whole()) from error
            finally:
                run.writer.finish()
                run._newest = run_folder.newest_number(run.folder)
                hooks.tell_checkpoint(run.writer.saved, run.writer.folder)
                hooks.tell("on_end")
        if hooks.error is not None:
            raise hooks.error

    def _raise_errors(self) -> None:
        """Raise what a callback raised; a wish to end the stage waits for its first step."""
        if (problem := self.hooks.settle(keep_end=True)) is not None:
            self.run.writer.wait()
            raise problem

    def _check_code(self) -> None:
        """Refuse to import an optimizer that only an untrusted config names."""
        for name, stage in self.run.config.stages().items():
            foreign = CUSTOM_PATH.fullmatch(stage.optimizer) and stage.steps
            if foreign and not stage.optimizer.startswith("torch.") and not self.run.allow_code:
                problem = f"{self.run.folder}: {name} imports its optimizer, {stage.optimizer}"
                raise MemtrainError(
                    f"{problem}; Run.open(folder, allow_code=True) if you trust it",
                    f"{problem}; pass --allow-code if you trust it",
                )

    def _prepare_engine(self) -> None:
        """Report where the data is and which fast paths serve; compile an evaluation's kernels
        together, not one by one."""
        run = self.run
        if run.task.placement:
            self.reporter.say(run.task.placement)
        if run.engine.fast:
            from memtrain.accel.fast_paths import summary

            self.reporter.say(summary(run.models, run.engine))
        if run.config.engine.compile and run.group.size == 1:
            sequences = run.config.log.evaluate_sequences
            run.engine.precompile(run.models, lambda: run.evaluate(sequences))

    def _saved(self) -> str:
        """Describes what is on disk, for a run that ends abruptly."""
        saved = last_saved(self.run.writer.last_whole())
        return f"{saved}; continue with: memtrain resume {self.run.folder}"

    def _take(self, stack: ExitStack) -> None:
        """Lock the run's folder until the stack ends, if it has not changed since it was opened."""
        run = self.run
        stack.enter_context(run_folder.held(run.folder))
        run_folder.check_unchanged(run.folder, run.id, run._newest)
        run_folder.clear_leftovers(run.folder)
        if problem := run.metrics.cut(run.progress.metrics_bytes):
            self.reporter.say(problem)
        if run.progress.metrics_lost:
            self._warn_of_lost_metrics(run.progress.metrics_lost)
        if run.changed:
            run_folder.write_config(run.folder, run.config)
            for message in run.changed:
                self.reporter.say(message)
            run.changed = []
        guard = Guard(run.folder, run.config, RunFile(run.id, run.made_of))
        run.writer.guard = lambda: self._check_folder(guard)

    def _check_folder(self, guard: Guard) -> None:
        """Before a checkpoint: check that the folder is the run's own; report deleted files."""
        metrics = self.run.metrics
        for message in guard.check():
            self.reporter.say(message)
        if lost := metrics.lost:
            self._warn_of_lost_metrics(lost)
            self.run.progress.metrics_lost += lost
            metrics.lost = 0

    def _warn_of_lost_metrics(self, lost: int) -> None:
        self.reporter.say(f"{self.run.metrics.path}: {lost:,} bytes of earlier lines are lost")

    def _stage_loop(self, name: str, stop: Agreement) -> StageLoop:
        run = self.run
        stage = run.config.stages()[name]
        seed = run.config.seed * 8 + run.progress.stage  # every stage has its own random numbers
        trainer = Trainer(run.objective(name), stage, run.task, run.engine, seed, run.group)
        if run.engine.fast and not trainer.optimizer.capturable:
            self.reporter.say(
                f"{name}: {stage.optimizer} cannot be part of a CUDA graph; its steps are launched "
                "one operation at a time, which is slower (adamw and muon can)"
            )
        return StageLoop(
            name=name,
            trainer=trainer,
            log=run.config.log,
            progress=run.progress,
            metrics=run.metrics,
            writer=run.writer,
            reporter=self.reporter,
            hooks=self.hooks,
            stop=stop,
            weights=lambda: full_tensors(run.models.state_dict()),
            evaluate=run.evaluate,
            sequential_ops=self._sequential_ops,
        )

    def _start_stage(self, loop: StageLoop) -> None:
        """Restore a stage from the checkpoint, or start its counters."""
        trainer, progress = loop.trainer, self.run.progress
        if progress.step:
            assert self.run.pending is not None
            trainer.load_tensors(self.run.pending.optimizer)
            trainer.restore(progress.step, progress.stages[progress.stage])
        else:
            torch.manual_seed(trainer.generator.initial_seed())
            cost = self._sequential_ops(trainer)
            progress.stages.append(StageProgress(loop.name, sequential_ops_a_step=cost))
        self.run.pending = None

    def _sequential_ops(self, trainer: Trainer) -> int:
        """Operations on the critical path of one step, counted with two training sequences."""
        run, objective = self.run, trainer.objective
        generator = torch.Generator().manual_seed(0)
        task = trainer.task.windows(objective.tokens_needed(), objective.empty_start_rows(2))
        batch = task.sample(2, generator).to(run.engine.device)
        try:
            with run.engine.reference(run.models):  # kernels and graphs hide operations
                return sequential_ops(lambda: objective(batch, generator).total)
        finally:
            objective.keep_tensors({})
