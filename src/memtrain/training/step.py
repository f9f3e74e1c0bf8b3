"""The training step: sample, loss, backward, reduce, clip, check, update.

It knows no objective by name. The loop around it is in loop.py.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from memtrain.accel.engine import Engine
from memtrain.config import RunConfig, StageConfig
from memtrain.data.task import Task
from memtrain.errors import CheckpointError, DivergedError, MemtrainError
from memtrain.objectives.base import (
    NO_OVERLAP,
    WHOLE_BATCH,
    Exchanged,
    MicroBatchShard,
    Objective,
)
from memtrain.runs.distributed import ALONE, Group, full_tensors, spread
from memtrain.runs.progress import StageProgress
from memtrain.shapes import Batch, Losses
from memtrain.training import optimizer as optim
from memtrain.training.batches import make_batches
from memtrain.training.curriculum import Curriculum
from memtrain.training.schedule import StageClock, learning_rate, lengths_over

KEPT = "objective."
"""Begins the names of tensors in a checkpoint that the objective keeps between steps."""


def check_batch_size(stage: StageConfig, processes: int, name: str = "") -> None:
    """Refuse a batch that processes and micro-batches cannot divide evenly."""
    shards = processes * stage.accumulate
    if stage.batch_size % shards:
        raise MemtrainError(
            f"{name}batch_size={stage.batch_size}: {processes} processes with "
            f"accumulate={stage.accumulate} divide it, so it must be a multiple of {shards}"
        )


def check_batch_sizes(config: RunConfig, processes: int) -> None:
    """`check_batch_size` for all stages of a run, before its folder is made."""
    for name, stage in config.stages().items():
        if stage.steps:
            check_batch_size(stage, processes, f"{name}.")
    if config.dmt.steps and config.dmt.rollout == "carried" and processes > 1:
        raise MemtrainError(
            f"dmt.rollout=carried: keeps each row's memory in one process, not in {processes}; "
            "train in one, or set dmt.rollout=unrolled"
        )


class Trainer:
    """Takes the steps of one stage: an objective, its optimizer, schedule and batches."""

    def __init__(
        self,
        objective: Objective,
        stage: StageConfig,
        task: Task,
        engine: Engine,
        seed: int,
        group: Group = ALONE,
    ) -> None:
        check_batch_size(stage, group.size)
        self.objective, self.stage, self.engine, self.group = objective, stage, engine, group
        self.curriculum = Curriculum(objective, stage, task)
        self.generator = torch.Generator(task.device).manual_seed(seed)
        self.trained = {
            name: [p for p in module.parameters() if p.requires_grad]
            for name, module in objective.trained().items()
        }
        every = [p for parameters in self.trained.values() for p in parameters]
        self.ordered = [p for p in every if p.dim() > 1] + [p for p in every if p.dim() <= 1]
        """Matrices first: the order in which a checkpoint numbers the optimizer's state."""
        modules = objective.trained().values()
        self.optimizer = optim.StageOptimizer(modules, self.ordered, stage, engine.device)
        self._bad_steps, self._bad_in_a_row, self._worst_row = torch.zeros(
            3, dtype=torch.long, device=engine.device
        )
        on_gpu = engine.device.type == "cuda" and self.optimizer.capturable
        self.check_on_host = not on_gpu or any(map(spread, self.ordered))
        """Whether the host reads every step's numbers, which would stall a GPU."""
        self.step = self.tokens = 0
        self.rate = 0.0
        """The last step's learning rate."""
        self.last_step: int | None = None
        """The step after which a callback ends the stage."""
        self.clock = StageClock(stage.seconds, engine.device, group)
        self.forward: Callable[[Batch, torch.Generator], Losses] = objective.compute
        objective.overlap = NO_OVERLAP
        whole = group.size * stage.accumulate == 1
        on_gpu = on_gpu and task.device.type == "cuda"
        self.captured = engine.fast and whole and objective.capturable and on_gpu
        """Whether steps become a CUDA graph, which only launches work on the device."""
        if self.captured:
            self.forward = engine.captured_forward(objective)
        self._use_length(0)

    def _use_length(self, index: int) -> None:
        """Take the next steps on sequences of one of the curriculum's lengths."""
        self.lengths_over = index
        """How many lengths of the curriculum are over."""
        self.task = self.curriculum.use(index)
        self.batches = make_batches(
            self.task, self.stage.batch_size, self.generator, self.engine.device
        )
        self.run_step: Callable[[], dict[str, Tensor]] = self.compute
        if self.captured:  # a CUDA graph has one shape
            warm_up = partial(self.engine.precompile, self.objective, self.rehearse)
            self.run_step = self.engine.capture(
                self.compute, self.generator, warm_up if self.objective.short_step else None
            )

    @property
    def length(self) -> int:
        """Tokens per sequence now; of a stream, steps per rollout (0: not unrolled)."""
        return self.curriculum.lengths[self.lengths_over]

    def update_length(self) -> bool:
        """Move on in the curriculum if that is due before the next step; returns whether it was.

        It never goes back, also when a time limit was raised.
        """
        due = lengths_over(self.stage, self.step, self.clock.elapsed)
        if due <= self.lengths_over:
            return False
        self.check()  # waits: a graph's last replay is over before the graph is deleted
        self.objective.keep_tensors({})  # they are of sequences of the length before
        self._use_length(due)
        return True

    def train_step(self) -> dict[str, Tensor]:
        """Take one optimizer step; returns the loss, its parts and the gradient norms.

        Raises:
            DivergedError: a number is not finite. The weights are those of the step before; on a
                GPU the error comes at the next `check`.
        """
        with self.clock.running():
            self.rate = learning_rate(self.stage, self.step, self.clock.elapsed)
            self.optimizer.set_learning_rate(self.rate)
            self.batches.load()
            metrics = self.run_step()  # compute, or a CUDA graph of it
            self.batches.prefetch()
            self.clock.wait_for_device()
        self.step += 1
        self.tokens += self.stage.batch_size * self.objective.tokens_read(self.task.sequence_length)
        self.clock.update(self.step)
        return metrics

    def compute(self) -> dict[str, Tensor]:
        """Sample, forward, backward, reduce, clip, update."""
        for micro_batch in self.micro_batches(self.batches.batch()):
            with self.engine.autocast():
                losses = self.forward(micro_batch, self.generator)
            if not self.captured:  # all random numbers of the step are drawn
                self.batches.prefetch()
            losses.total.backward()
        metrics = {"loss": losses.total.detach(), **losses.parts}
        self.group.sum_gradients(self.ordered)
        norms = full_tensors(
            {
                f"gradient_norm_{name}": clip_grad_norm_(parameters, self.stage.clip_norm)
                for name, parameters in self.trained.items()
            }
        )
        if self._finite(metrics, norms):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics | norms

    @property
    def done(self) -> bool:
        """Whether the last step was the stage's last, by number, by the clock or by a callback."""
        steps = self.stage.steps if self.last_step is None else self.last_step
        return self.step >= steps or self.clock.elapsed >= 1

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """Yield this process's rows of the batch, one micro-batch at a time.

        Each one samples for the whole batch and uses its own rows, so all start from the same RNG
        state. A loss over the whole batch needs values of all micro-batches: where there are
        several, a first pass without gradients collects them.
        """
        count = self.stage.accumulate
        if self.group.size * count == 1:
            yield batch.to(self.engine.device)
            return
        exchanged = Exchanged([[] for _ in range(count)])
        state = self.generator.get_state()

        def rows(index: int) -> Batch:
            self.generator.set_state(state)
            self.objective.shard = shard = MicroBatchShard(self.group, index, exchanged)
            return batch.map(shard.rows).to(self.engine.device)

        try:
            if count > 1:
                global_state = optim.rng_state(self.engine.device)
                with torch.no_grad(), self.engine.autocast():
                    for index in range(count):
                        self.forward(rows(index), self.generator)
                exchanged.recording = False
                optim.set_rng_state(global_state, self.engine.device)
            for index in range(count):
                yield rows(index)
        finally:
            self.objective.shard = WHOLE_BATCH

    def rehearse(self) -> None:
        """Forward and backward of a step that leaves nothing behind, to compile its kernels."""
        state = self.generator.get_state()
        kept = {name: value.clone() for name, value in self.objective.kept_tensors().items()}
        batch = self.batches.batch().to(self.engine.device)
        with self.engine.autocast():
            losses = self.forward(batch, self.generator)
        losses.total.backward()
        self.generator.set_state(state)
        self.objective.keep_tensors(kept)
        self.optimizer.zero_grad()

    @contextmanager
    def frozen_rest(self) -> Iterator[None]:
        """Turn off gradients of the parameters that this stage does not train."""
        trained = {id(p) for group in self.trained.values() for p in group}
        rest = [p for p in self.objective.parameters() if p.requires_grad and id(p) not in trained]
        for parameter in rest:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in rest:
                parameter.requires_grad_(True)

    # ------------------------------------------------------------------------- finite numbers

    def _finite(self, metrics: dict[str, Tensor], norms: dict[str, Tensor]) -> bool:
        """Whether to update: checked here where that is free, else decided on the device."""
        bad = ~torch.stack([v.float() for v in (metrics | norms).values()]).isfinite().all()
        self._bad_steps += bad
        self._bad_in_a_row.add_(bad).mul_(bad)
        torch.maximum(self._worst_row, self._bad_in_a_row, out=self._worst_row)
        if self.check_on_host:
            if bool(bad):
                self._raise_unless_skipped(metrics, norms)
            return not bool(bad)
        self.optimizer.skip_where(bad.float())
        return True

    def _raise_unless_skipped(self, metrics: dict[str, Tensor], norms: dict[str, Tensor]) -> None:
        if self.stage.on_nonfinite == "skip" and self._worst_row <= self.stage.skip_limit:
            return
        for numbers in (metrics, norms):
            for name, value in reversed(numbers.items()):  # a part is more specific than the sum
                if not bool(value.isfinite()):
                    raise DivergedError(f"step {self.step}: {name} is {float(value)}")

    def check(self) -> int:
        """Wait for the device; returns how many steps of the stage had a number that is not finite.

        Raises:
            DivergedError: there were any, or with `on_nonfinite=skip` too many in a row.
        """
        with self.clock.running():
            bad, worst = int(self._bad_steps), int(self._worst_row)
        if worst > (self.stage.skip_limit if self.stage.on_nonfinite == "skip" else 0):
            raise DivergedError(
                f"step {self.step} or shortly before: a loss or gradient is not finite"
            )
        return bad

    @property
    def bad_in_a_row(self) -> int:
        """How many such steps came last, without a good one after them."""
        return int(self._bad_in_a_row)

    # ---------------------------------------------------------------------------------- state

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer and RNG state as named tensors, unsharded; a collective call."""
        named = self.optimizer.tensors()
        named["random.stage"] = self.generator.get_state()
        named |= {KEPT + name: value for name, value in self.objective.kept_tensors().items()}
        return full_tensors(named) | optim.rng_state(self.engine.device)

    def load_tensors(self, named: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned, on any number of processes.

        Raises:
            CheckpointError: it is not the state of this stage.
        """
        try:
            self.optimizer.load_tensors(named)
            self.generator.set_state(named["random.stage"].cpu())
            self.objective.keep_tensors(
                {
                    name.removeprefix(KEPT): value.to(self.engine.device)
                    for name, value in named.items()
                    if name.startswith(KEPT)
                }
            )
            optim.set_rng_state(named, self.engine.device)
        except (KeyError, ValueError, IndexError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"optimizer.safetensors does not fit the run: {reason}") from None

    def restore(self, step: int, progress: StageProgress) -> None:
        """Continue from the counters of a checkpoint."""
        self.step, self.tokens = step, progress.tokens
        if progress.lengths_over:
            self._use_length(progress.lengths_over)
        self.clock.restore(progress.seconds, progress.start_up_seconds, step)
        self._bad_steps.fill_(progress.skipped)
        self._bad_in_a_row.fill_(progress.skipped_in_a_row)
        self._worst_row.fill_(progress.skipped_in_a_row)  # longer rows were within the limit
