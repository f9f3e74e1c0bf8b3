"""The training step: it knows no objective by name. The loop around it is stage.py's."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memtrain.accel.engine import Engine
from memtrain.config import StageConfig
from memtrain.data.task import Task
from memtrain.errors import CheckpointError, DivergedError, MemtrainError
from memtrain.objectives.base import (
    WHOLE_BATCH,
    BatchShard,
    Exchanged,
    MicroBatchShard,
    Objective,
)
from memtrain.shapes import Batch, Losses
from memtrain.training.clock import StageClock
from memtrain.training.distributed import ALONE, Group, full_tensors, like, spread

ADAM = {"step", "exp_avg", "exp_avg_sq"}
"""What AdamW keeps of a parameter."""


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """A whole tensor in the parameter's own memory layout, or spread as the parameter is.

    The fused kernel walks a parameter and its moments in the order of memory, so a moment that is
    contiguous beside a parameter that is not would be applied to other weights.
    """
    if spread(parameter):
        return like(value, parameter)
    return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(value)


class Trainer:
    """One stage of a run: an objective, its optimizer and schedule, its sequences."""

    def __init__(
        self,
        objective: Objective,
        stage: StageConfig,
        task: Task,
        engine: Engine,
        seed: int,
        group: Group = ALONE,
    ) -> None:
        self.objective = objective
        self.stage = stage
        self.task = task.windows(
            objective.tokens_needed(), objective.empty_start_rows(stage.batch_size)
        )
        self.engine = engine
        self.group = group
        self.shared_out = group.size * stage.accumulate > 1
        if stage.batch_size % (group.size * stage.accumulate):
            raise MemtrainError(
                f"batch_size={stage.batch_size}: {group.size} processes with "
                f"accumulate={stage.accumulate} share it out, so it must be a multiple of "
                f"{group.size * stage.accumulate}"
            )
        self.generator = torch.Generator(self.task.device).manual_seed(seed)
        self.trained = {
            name: [p for p in module.parameters() if p.requires_grad]
            for name, module in objective.trained().items()
        }
        every = [p for parameters in self.trained.values() for p in parameters]
        self.ordered = [p for p in every if p.dim() > 1] + [p for p in every if p.dim() <= 1]
        """Matrices first: the order in which a checkpoint numbers the optimizer's state."""
        self.optimizer = self._optimizer()
        self._bad_steps = torch.zeros((), dtype=torch.long, device=engine.device)
        self._bad_in_a_row = torch.zeros((), dtype=torch.long, device=engine.device)
        self._worst_row = torch.zeros((), dtype=torch.long, device=engine.device)
        self.looks = engine.device.type != "cuda" or any(map(spread, self.ordered))
        """Whether the host looks at every step's numbers, which would stall a GPU."""
        self._objective = engine.objective(self)
        self._step = engine.step(self)
        objective.overlap = engine.overlap(self)
        self.step = 0
        self.tokens = 0
        self.clock = StageClock(stage.seconds, engine.device, group)
        self.rate = 0.0
        """The last step's learning rate."""

    def _optimizer(self) -> torch.optim.AdamW:
        """AdamW; vectors (norms, biases) do not decay."""
        # One kernel updates a whole group, so what is spread over processes has its own.
        groups = [
            {"params": chosen, "weight_decay": self.stage.weight_decay if matrix else 0.0}
            for matrix in (True, False)
            for apart in (False, True)
            if (
                chosen := [
                    p for p in self.ordered if (p.dim() > 1) is matrix and spread(p) is apart
                ]
            )
        ]
        return torch.optim.AdamW(
            groups,
            # A graph reads the rate from the device, where it can change between replays.
            lr=torch.tensor(self.stage.learning_rate, device=self.engine.device)
            if self.engine.device.type == "cuda"
            else self.stage.learning_rate,
            betas=self.stage.betas,
            fused=True,
            capturable=self.engine.device.type == "cuda",
        )

    def learning_rate(self, step: int) -> float:
        """The schedule: linear warm-up, then constant or cosine to 0.

        With a limit in seconds the clock may be ahead of the steps: then it counts.
        """
        peak = self.stage.learning_rate
        warmup = max(1, math.ceil(self.stage.warmup * self.stage.steps))
        at = max(step, self.clock.over * self.stage.steps)
        if at < warmup:
            return min(peak, peak * (at + 1) / warmup)
        if self.stage.schedule == "constant":
            return peak
        done = min(1.0, (at - warmup) / max(1, self.stage.steps - warmup))
        return peak * 0.5 * (1 + math.cos(math.pi * done))

    @property
    def capturable(self) -> bool:
        """Whether everything a step does happens on the device."""
        on_device = self.objective.capturable and self.task.device.type == "cuda"
        return on_device and not self.shared_out

    def train_step(self) -> dict[str, Tensor]:
        """One optimizer step; returns the loss, its parts and the gradient norms.

        Raises:
            DivergedError: a number is not finite. The weights are those of the step before when
                looking costs nothing; on a GPU the error comes at the next `check`.
        """
        with self.clock.running():
            self._set_learning_rate()
            metrics = self._step()
            self.clock.keep_up()
        self.step += 1
        self.tokens += self.stage.batch_size * self.task.sequence_length
        self.clock.look(self.step)
        return metrics

    @property
    def done(self) -> bool:
        """Whether the last step was the stage's last, by count or by the clock."""
        return self.step >= self.stage.steps or self.clock.over >= 1

    def compute(self) -> dict[str, Tensor]:
        """Draw, forward, backward, clip, update: what a captured graph replays."""
        batch = self.task.sample(self.stage.batch_size, self.generator)
        losses = self._shared_out(batch) if self.shared_out else self._whole(batch)
        metrics = {"loss": losses.total.detach(), **losses.parts}
        self.group.sum_gradients(self.ordered)
        norms = full_tensors(
            {
                f"gradient_norm_{name}": nn.utils.clip_grad_norm_(parameters, self.stage.clip_norm)
                for name, parameters in self.trained.items()
            }
        )
        if self._good(metrics, norms):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics | norms

    def rehearse(self) -> None:
        """Forward and backward of a step that leaves nothing behind."""
        chance = self.generator.get_state()
        self._whole(self.task.sample(self.stage.batch_size, self.generator))
        self.generator.set_state(chance)
        self.optimizer.zero_grad(set_to_none=True)

    def _whole(self, batch: Batch) -> Losses:
        losses = self._losses(batch, WHOLE_BATCH)
        losses.total.backward()
        return losses

    def _shared_out(self, batch: Batch) -> Losses:
        """The same losses and gradients, of this process's parts of the batch in turn."""
        exchanged = Exchanged([[] for _ in range(self.stage.accumulate)])
        chance = self.generator.get_state()
        if self.stage.accumulate > 1:
            others = self._other_chance()
            with torch.no_grad():
                for micro_batch in range(self.stage.accumulate):
                    self._losses(batch, MicroBatchShard(self.group, micro_batch, exchanged))
                    self.generator.set_state(chance)
            exchanged.recording = False
            self._set_other_chance(others)
        for micro_batch in range(self.stage.accumulate):
            self.generator.set_state(chance)  # each part draws for all, and takes its rows
            losses = self._losses(batch, MicroBatchShard(self.group, micro_batch, exchanged))
            losses.total.backward()
        return losses

    def _losses(self, batch: Batch, shard: BatchShard) -> Losses:
        self.objective.shard = shard
        own = Batch(shard.rows(batch.inputs), shard.rows(batch.targets)).to(self.engine.device)
        try:
            with self.engine.autocast():
                return self._objective(own, self.generator)
        finally:
            self.objective.shard = WHOLE_BATCH

    def _set_learning_rate(self) -> None:
        self.rate = self.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.rate)
            else:
                group["lr"] = self.rate

    def _good(self, metrics: dict[str, Tensor], norms: dict[str, Tensor]) -> bool:
        """Whether to update: look at once where that is free, else let the device decide."""
        bad = ~torch.stack([v.float() for v in (metrics | norms).values()]).isfinite().all()
        self._bad_steps += bad
        self._bad_in_a_row.add_(bad).mul_(bad)
        torch.maximum(self._worst_row, self._bad_in_a_row, out=self._worst_row)
        if self.looks:
            if bool(bad):
                self._refuse(metrics, norms)
            return not bool(bad)
        # The fused kernel leaves the weights alone where this is 1: no look from the host.
        self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        return True

    def _refuse(self, metrics: dict[str, Tensor], norms: dict[str, Tensor]) -> None:
        """Stop at once and name the number, unless steps may be skipped."""
        if self.stage.on_nonfinite == "skip" and self._worst_row <= self.stage.skip_limit:
            return
        for numbers in (metrics, norms):
            for name, value in reversed(numbers.items()):  # a part tells more than the sum
                if not bool(value.isfinite()):
                    raise DivergedError(f"step {self.step}: {name} is {float(value)}")

    def check(self) -> int:
        """How many steps since the stage began had a number that is not finite.

        Raises:
            DivergedError: there were any, or with `on_nonfinite=skip` too many in a row.
        """
        with self.clock.running():
            bad, worst = int(self._bad_steps), int(self._worst_row)  # waits for the device
        if worst > (self.stage.skip_limit if self.stage.on_nonfinite == "skip" else 0):
            raise DivergedError(
                f"step {self.step} or shortly before: a loss or gradient is not finite"
            )
        return bad

    @property
    def bad_in_a_row(self) -> int:
        """How many steps up to the last one, without a gap, had such a number."""
        return int(self._bad_in_a_row)

    def go_on_after_bad(self, steps: int, in_a_row: int) -> None:
        """Take up what a checkpoint says of steps that were left out."""
        self._bad_steps.fill_(steps)
        self._bad_in_a_row.fill_(in_a_row)
        self._worst_row.fill_(in_a_row)  # longer rows before it were within the limit

    @contextmanager
    def frozen_rest(self) -> Iterator[None]:
        """Parameters that do not train need no gradient while this stage runs."""
        trained = {id(p) for group in self.trained.values() for p in group}
        rest = [p for p in self.objective.parameters() if p.requires_grad and id(p) not in trained]
        for parameter in rest:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in rest:
                parameter.requires_grad_(True)

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer and random state as named tensors, each whole; all processes must ask."""
        named = {
            f"adam.{i}.{key}": value
            for i, parameter in enumerate(self.ordered)
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        named["random.stage"] = self.generator.get_state()
        return full_tensors(named) | self._other_chance()

    def _other_chance(self) -> dict[str, Tensor]:
        """The state of torch's own generators, which a cell with dropout draws from."""
        named = {"random.torch": torch.get_rng_state()}
        if self.engine.device.type == "cuda":
            named["random.cuda"] = torch.cuda.get_rng_state(self.engine.device)
        return named

    def _set_other_chance(self, named: dict[str, Tensor]) -> None:
        torch.set_rng_state(named["random.torch"].cpu())
        if "random.cuda" in named and self.engine.device.type == "cuda":
            torch.cuda.set_rng_state(named["random.cuda"].cpu(), self.engine.device)

    def load_tensors(self, named: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned, on as many processes as there are now.

        Raises:
            CheckpointError: it is not what this stage would have saved.
        """
        place = {id(p): i for i, p in enumerate(p for g in self.groups for p in g["params"])}
        state: dict[int, dict[str, Tensor]] = {}
        try:
            for name, value in named.items():
                kind, _, rest = name.partition(".")
                if kind == "adam":
                    index, _, key = rest.partition(".")
                    parameter = self.ordered[int(index)]
                    if key != "step" and value.shape != parameter.shape:
                        raise ValueError(f"{name} has shape {tuple(value.shape)}")
                    slot = state.setdefault(place[id(parameter)], {})
                    slot[key] = value if key == "step" else _laid_out_as(parameter, value)
            for slot in state.values():
                if slot.keys() != ADAM or slot["step"].numel() != 1:
                    raise ValueError(f"a parameter has the state {sorted(slot)}")
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": state, "param_groups": groups})
            self.generator.set_state(named["random.stage"].cpu())
            self._set_other_chance(dict(named))
        except (KeyError, ValueError, IndexError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"optimizer.safetensors does not fit the run: {reason}") from None

    @property
    def groups(self) -> list[dict]:
        return self.optimizer.param_groups
