"""AdamW, its learning-rate schedule by steps and by the clock, and its state as tensors."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memtrain.config import StageConfig
from memtrain.runs.distributed import Group, like, spread

ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
"""AdamW's state of one parameter."""
START_STEPS = 5
"""The first steps compile and capture. A schedule by the clock starts after them, so that they do
not use up the warm-up; the limit counts them."""
MAX_STEPS_AHEAD = 4
"""Steps that the host may be ahead of a GPU in a stage with a time limit."""


def make_adamw(
    ordered: Sequence[nn.Parameter], stage: StageConfig, device: torch.device
) -> torch.optim.AdamW:
    """AdamW without weight decay for vectors (norms, biases)."""
    # One kernel updates a whole group, so sharded parameters need groups of their own.
    groups = [
        {"params": chosen, "weight_decay": stage.weight_decay if matrix else 0.0}
        for matrix in (True, False)
        for sharded in (False, True)
        if (chosen := [p for p in ordered if (p.dim() > 1) is matrix and spread(p) is sharded])
    ]
    on_gpu = device.type == "cuda"
    # A CUDA graph reads the rate from the device, where it can change between replays.
    rate = torch.tensor(stage.learning_rate, device=device) if on_gpu else stage.learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=stage.betas, fused=True, capturable=on_gpu)


# ------------------------------------------------------------------------------------- schedule


def learning_rate(stage: StageConfig, step: int, elapsed: float = 0.0) -> float:
    """Linear warm-up, then constant or cosine to 0.

    Args:
        stage: names the peak, the schedule and the number of steps.
        step: the step to take, from 0.
        elapsed: the fraction of the time limit that is over; counts where it is ahead of the steps.
    """
    peak = stage.learning_rate
    warmup = max(1, math.ceil(stage.warmup * stage.steps))
    at = max(step, elapsed * stage.steps)
    if at < warmup:
        return min(peak, peak * (at + 1) / warmup)
    if stage.schedule == "constant":
        return peak
    done = min(1.0, (at - warmup) / max(1, stage.steps - warmup))
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class StageClock:
    """The training time of a stage, without evaluations and checkpoints.

    With a limit, process 0 decides how much of it is over. The host never waits until a GPU is
    idle, only for a step a few steps back.
    """

    def __init__(self, limit: float, device: torch.device, group: Group) -> None:
        self.limit = limit
        self.seconds = 0.0
        self.start_up: float | None = None
        """Seconds of the first steps."""
        self.elapsed = 0.0
        """The fraction of the limit that is over, 0 to 1, for the schedule."""
        self._group = group
        self._device = device
        self._launched: deque[torch.cuda.Event] = deque()

    def restore(self, seconds: float, start_up: float | None, step: int) -> None:
        """Continue from a checkpoint's times."""
        self.seconds, self.start_up = seconds, start_up
        self.update(step)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside as training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += max(0.0, time.perf_counter() - began)

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return max(0.0, self.limit - self.seconds)

    def wait_for_device(self) -> None:
        """Keep the host at most a few steps ahead of the GPU, so that its clock is valid."""
        if not self.limit or self._device.type != "cuda":
            return
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        self._launched.append(done)
        if len(self._launched) > MAX_STEPS_AHEAD:
            self._launched.popleft().synchronize()

    def update(self, step: int) -> None:
        """Compute `elapsed` after a step."""
        if not self.limit:
            return
        if self.start_up is None and step >= START_STEPS:
            self.start_up = self.seconds
        elapsed = 0.0
        if self.seconds >= self.limit:
            elapsed = 1.0
        elif self.start_up is not None:
            elapsed = (self.seconds - self.start_up) / (self.limit - self.start_up)
        self.elapsed = self._group.first(elapsed)


# ---------------------------------------------------------------------------------------- state


def adamw_tensors(
    optimizer: torch.optim.Optimizer, ordered: Sequence[nn.Parameter]
) -> dict[str, Tensor]:
    """AdamW's state as named tensors; a parameter's number is its place in `ordered`."""
    return {
        f"adam.{i}.{key}": value
        for i, parameter in enumerate(ordered)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_adamw_tensors(
    optimizer: torch.optim.Optimizer, ordered: Sequence[nn.Parameter], named: Mapping[str, Tensor]
) -> None:
    """Restore what `adamw_tensors` returned, on any number of processes.

    Raises:
        ValueError, LookupError: it is not the state of these parameters.
    """
    grouped = (parameter for group in optimizer.param_groups for parameter in group["params"])
    place = {id(parameter): i for i, parameter in enumerate(grouped)}
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in named.items():
        kind, _, rest = name.partition(".")
        if kind != "adam":
            continue
        index, _, key = rest.partition(".")
        parameter = ordered[int(index)]
        if key != "step" and value.shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}")
        slot = state.setdefault(place[id(parameter)], {})
        slot[key] = value if key == "step" else like(value, parameter)
    for slot in state.values():
        if slot.keys() != ADAM_STATE or slot["step"].numel() != 1:
            raise ValueError(f"a parameter has the state {sorted(slot)}")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's global generators, which a cell with dropout samples from."""
    named = {"random.torch": torch.get_rng_state()}
    if device.type == "cuda":
        named["random.cuda"] = torch.cuda.get_rng_state(device)
    return named


def set_rng_state(named: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(named["random.torch"].cpu())
    if "random.cuda" in named and device.type == "cuda":
        torch.cuda.set_rng_state(named["random.cuda"].cpu(), device)
