"""The training step and the loop around it. Neither knows an objective by name."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memtrain.config import StageConfig
from memtrain.data.task import Task
from memtrain.errors import DivergedError
from memtrain.objectives.objective import Objective
from memtrain.train.engine import Engine


class Trainer:
    """One stage of a run: an objective, its optimizer and schedule, its sequences."""

    def __init__(
        self, objective: Objective, stage: StageConfig, task: Task, engine: Engine, seed: int
    ) -> None:
        self.objective = objective
        self.stage = stage
        self.task = task.windows(
            objective.tokens_needed(), objective.from_nothing(stage.batch_size)
        )
        self.engine = engine
        self.generator = torch.Generator(self.task.device).manual_seed(seed)
        self.trained = {
            name: [p for p in module.parameters() if p.requires_grad]
            for name, module in objective.trained().items()
        }
        self.optimizer = self._optimizer()
        self._all_finite = torch.ones((), dtype=torch.bool, device=engine.device)
        self._step = engine.step(self)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0

    def _optimizer(self) -> torch.optim.AdamW:
        """AdamW; vectors (norms, biases) do not decay."""
        parameters = [p for group in self.trained.values() for p in group]
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.stage.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            # A graph reads the rate from the device, where it can change between replays.
            lr=torch.tensor(self.stage.learning_rate, device=self.engine.device)
            if self.engine.device.type == "cuda"
            else self.stage.learning_rate,
            betas=self.stage.betas,
            fused=True,
            capturable=self.engine.device.type == "cuda",
        )

    def learning_rate(self, step: int) -> float:
        """The schedule: linear warm-up, then constant or cosine to 0."""
        warmup = max(1, math.ceil(self.stage.warmup * self.stage.steps))
        if step < warmup:
            return self.stage.learning_rate * (step + 1) / warmup
        if self.stage.schedule == "constant":
            return self.stage.learning_rate
        done = (step - warmup) / max(1, self.stage.steps - warmup)
        return self.stage.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    @property
    def capturable(self) -> bool:
        """Whether everything a step does happens on the device."""
        return self.objective.capturable and self.task.device.type == "cuda"

    def train_step(self) -> dict[str, Tensor]:
        """One optimizer step; returns the loss, its parts and the gradient norms.

        Raises:
            DivergedError: a number is not finite. The weights are those of the step before when
                the device is synchronous; else the error comes at the next `check`.
        """
        began = time.perf_counter()
        self._set_learning_rate()
        metrics = self._step()
        self.step += 1
        self.tokens += self.stage.batch_size * self.task.sequence_length
        self.seconds += time.perf_counter() - began
        return metrics

    def compute(self) -> dict[str, Tensor]:
        """Draw, forward, backward, clip, update: what a captured graph replays."""
        batch = self.task.sample(self.stage.batch_size, self.generator).to(self.engine.device)
        with self.engine.autocast():
            losses = self.objective(batch, self.generator)
        metrics = {"loss": losses.total.detach(), **losses.parts}
        self._note(metrics)
        losses.total.backward()
        norms = {
            f"gradient_norm_{name}": nn.utils.clip_grad_norm_(parameters, self.stage.clip_norm)
            for name, parameters in self.trained.items()
        }
        self._note(norms)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics | norms

    def _set_learning_rate(self) -> None:
        rate = self.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _note(self, metrics: dict[str, Tensor]) -> None:
        """Look at once where that is free; else remember on the device the first bad step."""
        if self.engine.synchronous:
            for name, value in reversed(metrics.items()):  # a part tells more than the sum
                if not bool(value.isfinite()):
                    raise DivergedError(f"step {self.step}: {name} is {float(value)}")
            return
        finite = torch.stack([value.isfinite() for value in metrics.values()]).all()
        self._all_finite &= finite

    def check(self) -> None:
        """Stop if any number since the stage began was not finite."""
        began = time.perf_counter()
        finite = bool(self._all_finite)  # waits for the device: its seconds are training's
        self.seconds += time.perf_counter() - began
        if not finite:
            raise DivergedError(
                f"step {self.step} or shortly before: a loss or gradient is not finite"
            )

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
        """Optimizer and random state as named tensors."""
        state = self.optimizer.state_dict()["state"]
        named = {
            f"adam.{i}.{key}": value for i, slot in state.items() for key, value in slot.items()
        }
        named["random.stage"] = self.generator.get_state()
        named["random.torch"] = torch.get_rng_state()
        if self.engine.device.type == "cuda":
            named["random.cuda"] = torch.cuda.get_rng_state(self.engine.device)
        return named

    def load_tensors(self, named: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in named.items():
            kind, _, rest = name.partition(".")
            if kind == "adam":
                index, _, key = rest.partition(".")
                state.setdefault(int(index), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.generator.set_state(named["random.stage"].cpu())
        torch.set_rng_state(named["random.torch"].cpu())
        if "random.cuda" in named and self.engine.device.type == "cuda":
            torch.cuda.set_rng_state(named["random.cuda"].cpu(), self.engine.device)
