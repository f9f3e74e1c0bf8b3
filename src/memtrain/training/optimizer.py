"""The optimizer of a stage by its name: AdamW, Muon with AdamW, or a class of torch or a user's."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.config import StageConfig
from memtrain.config.validation import load_class
from memtrain.errors import MemtrainError, describe_error, did_you_mean
from memtrain.models.layers import ValueEmbedding
from memtrain.runs.distributed import like, spread
from memtrain.training.muon import Muon

ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
"""AdamW's state of one parameter; with amsgrad there is one more."""
NUMBERS = {"int": int, "float": float, "bool": bool}
"""Types of a state that is no tensor; its name in a checkpoint ends in "#int"."""


class StageOptimizer:
    """The optimizers of a stage as one: its own, and with Muon a second one for the rest.

    Args:
        modules: what the stage trains.
        ordered: their parameters, matrices first; a checkpoint numbers the state in this order.
        stage: names the optimizer, its options, rate and weight decay.
        device: where the parameters are.

    Raises:
        MemtrainError: there is no such class, it refuses its options, or no matrix is there for
            Muon.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        ordered: Sequence[nn.Parameter],
        stage: StageConfig,
        device: torch.device,
    ) -> None:
        self.ordered = list(ordered)
        on_gpu = device.type == "cuda"
        # A CUDA graph reads the rate from the device, where it can change between replays.
        rate = torch.tensor(stage.learning_rate, device=device) if on_gpu else stage.learning_rate
        adamw = {"lr": rate, "betas": stage.betas, "fused": True, "capturable": on_gpu}
        options, made_by = stage.optimizer_options, stage.optimizer
        if made_by == "adamw":
            groups = _groups(self.ordered, stage.weight_decay)
            parts = [_made(torch.optim.AdamW, groups, adamw, options, made_by)]
        elif made_by == "muon":
            hidden = hidden_matrices(modules)
            chosen = [p for p in self.ordered if id(p) in hidden]
            rest = [p for p in self.ordered if id(p) not in hidden]
            if not chosen:
                raise MemtrainError(
                    "optimizer=muon: this stage trains no matrix of a hidden layer; use adamw"
                )
            given = {"lr": rate, "weight_decay": stage.weight_decay}
            parts = [_made(Muon, [{"params": chosen}], given, options, made_by)]
            if rest:
                groups = _groups(rest, stage.weight_decay)
                parts.append(torch.optim.AdamW(groups, **adamw))
        else:
            kind = load_optimizer(stage)
            decay = "weight_decay" in inspect.signature(kind).parameters
            groups = _groups(self.ordered, stage.weight_decay if decay else None)
            given = {"lr": stage.learning_rate}
            parts = [_made(kind, groups, given, options, made_by)]
        self.parts: Sequence[torch.optim.Optimizer] = parts
        self.capturable = all(type(part) in (torch.optim.AdamW, Muon) for part in self.parts)
        """Whether a step can be part of a CUDA graph: it reads its rate, and whether the gradients
        are finite, on the device."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for part in self.parts for key, value in part.state.items()}

    def set_learning_rate(self, rate: float) -> None:
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def skip_where(self, bad: Tensor) -> None:
        """Leave weights and state as they are in the next step where `bad` is 1, without a sync."""
        for part in self.parts:
            part.found_inf = bad  # type: ignore[attr-defined]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    # ------------------------------------------------------------------------------------ state

    def tensors(self) -> dict[str, Tensor]:
        """The state as named tensors; a parameter's number is its place in `ordered`."""
        return {
            name: tensor
            for part in self.parts
            for i, parameter in enumerate(self.ordered)
            for key, value in part.state.get(parameter, {}).items()
            for name, tensor in _named(f"{_prefix(part)}.{i}.{key}", value)
        }

    def load_tensors(self, named: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned, on any number of processes.

        Raises:
            ValueError, LookupError: it is not the state of these parameters.
        """
        for part in self.parts:
            grouped = [p for group in part.param_groups for p in group["params"]]
            place = {id(parameter): i for i, parameter in enumerate(grouped)}
            state: dict[int, dict[str, Any]] = {}
            for name, value in named.items():
                kind, _, rest = name.partition(".")
                if kind != _prefix(part):
                    continue
                index, _, key = rest.partition(".")
                parameter = self.ordered[int(index)]
                state.setdefault(place[id(parameter)], {}).update([_read(key, value, parameter)])
            if _prefix(part) == "adam":
                _check_adam_state(state, grouped)
            groups = part.state_dict()["param_groups"]
            part.load_state_dict({"state": state, "param_groups": groups})
        known = {_prefix(part) for part in self.parts}
        for name in named:
            if name.partition(".")[0] in {"adam", "state"} - known:
                raise ValueError(f"{name} belongs to another optimizer")


def _groups(parameters: Sequence[nn.Parameter], decay: float | None) -> list[dict[str, Any]]:
    """Matrices and vectors (norms, biases), which do not decay; None: the class has no decay."""
    # One kernel updates a whole group, so sharded parameters need groups of their own.
    return [
        {"params": chosen} | ({} if decay is None else {"weight_decay": decay if matrix else 0.0})
        for matrix in (True, False)
        for sharded in (False, True)
        if (chosen := [p for p in parameters if (p.dim() > 1) is matrix and spread(p) is sharded])
    ]


def _made(
    kind: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    given: dict[str, Any],
    options: Mapping[str, Any],
    name: str,
) -> torch.optim.Optimizer:
    """An optimizer of a class, with the user's options checked."""
    accepted = inspect.signature(kind).parameters
    named = [one for one in accepted if one not in ("params", *given, "weight_decay")]
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
    for option in options:
        if option not in named and not anything:
            raise MemtrainError(
                f"optimizer_options: {name} takes no {option}; {did_you_mean(option, named)}"
            )
    try:
        return kind(groups, **{**given, **options})
    except MemtrainError:
        raise
    except Exception as error:  # a class of torch's or the user's refuses its arguments
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        raise MemtrainError(
            f"optimizer={name} with {shown}: {describe_error(error)}; use another, or other "
            "optimizer_options"
        ) from None


def hidden_matrices(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of parameters for Muon: matrices of layers between embedding and output head."""
    found: set[int] = set()
    for module in modules:
        inputs = (nn.Embedding, nn.EmbeddingBag, ValueEmbedding)
        outside = [part for part in module.modules() if isinstance(part, inputs)]
        named = [(n, part) for n, part in module.named_modules() if n.rpartition(".")[2] == "head"]
        outside += [part for _, part in named]
        excluded = {id(p) for part in outside for p in part.parameters()}
        for part in module.modules():
            if any(True for _ in part.children()):
                continue  # its own parameters are starting points and registers
            for parameter in part.parameters(recurse=False):
                right = parameter.dim() == 2 and min(parameter.shape) > 1
                if right and parameter.requires_grad and id(parameter) not in excluded:
                    found.add(id(parameter))
    return found


# ---------------------------------------------------------------------------------------- classes


def load_optimizer(stage: StageConfig) -> type[torch.optim.Optimizer]:
    """The class that a stage names as module:Class."""
    name = stage.optimizer
    kind = load_class(name, "optimizer")
    if not issubclass(kind, torch.optim.Optimizer):
        raise MemtrainError(f"optimizer={name}: must be a subclass of torch.optim.Optimizer")
    accepted = inspect.signature(kind).parameters
    if "lr" not in accepted:
        raise MemtrainError(f"optimizer={name}: must take lr, which the schedule sets per step")
    if stage.weight_decay and "weight_decay" not in accepted:
        raise MemtrainError(
            f"weight_decay={stage.weight_decay}: optimizer={name} has none; set weight_decay to 0"
        )
    return kind


def check_optimizer(stage: StageConfig, where: str = "") -> None:
    """Refuse a class that cannot train a run: steps that fail, or a state that is not restored.

    It takes a few steps of two small layers, and one more from its saved state in a second copy.

    Args:
        stage: names the optimizer.
        where: begins the error, for example "smt.".

    Raises:
        MemtrainError: it names the rule that the class breaks.
    """

    def build() -> tuple[nn.Module, StageOptimizer]:
        layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
        for i, parameter in enumerate(layers.parameters()):
            parameter.data.copy_(_wave(parameter, i))
        made = StageOptimizer([layers], list(layers.parameters()), stage, torch.device("cpu"))
        return layers, made

    def take(layers: nn.Module, optimizer: StageOptimizer, step: int) -> None:
        optimizer.set_learning_rate(stage.learning_rate * (step + 1))
        for i, parameter in enumerate(layers.parameters()):
            parameter.grad = _wave(parameter, 7 * step + i)
        optimizer.step()
        optimizer.zero_grad()

    if stage.optimizer == "adamw" and not stage.optimizer_options:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            (layers, trained), (copy, resumed) = build(), build()
            for step in range(3):
                take(layers, trained, step)
            saved = {name: value.clone() for name, value in trained.tensors().items()}
            copy.load_state_dict(layers.state_dict())
            resumed.load_tensors(saved)
            for one, optimizer in ((layers, trained), (copy, resumed)):
                take(one, optimizer, 3)
    except MemtrainError as error:
        raise MemtrainError(f"{where}{error}") from None
    except Exception as error:  # the class's own code
        raise MemtrainError(
            f"{where}optimizer={stage.optimizer}: a step without a closure failed, "
            f"{describe_error(error)}; use another"
        ) from None
    pairs = zip(layers.parameters(), copy.parameters(), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise MemtrainError(
            f"{where}optimizer={stage.optimizer}: a resumed run would differ, because not all of "
            "its state is in optimizer.state; use another"
        )


def _wave(parameter: Tensor, number: int) -> Tensor:
    """Numbers of known size that differ per parameter and step."""
    at = torch.arange(parameter.numel(), dtype=parameter.dtype)
    return (0.1 * torch.sin(1.7 * at + number + 0.3)).view(parameter.shape)


# ------------------------------------------------------------------------------ state as tensors


def _prefix(part: torch.optim.Optimizer) -> str:
    return "adam" if type(part) is torch.optim.AdamW else "state"


def _named(name: str, value: Any) -> list[tuple[str, Tensor]]:
    if value is None:  # as SGD without momentum
        return []
    if isinstance(value, Tensor):
        return [(name, value)]
    kind = type(value).__name__
    if kind not in NUMBERS:
        raise MemtrainError(f"optimizer: its state {name} is of type {kind}, which is not saved")
    return [(f"{name}#{kind}", torch.tensor(value, dtype=torch.float64))]


def _read(key: str, value: Tensor, parameter: nn.Parameter) -> tuple[str, Any]:
    key, number, kind = key.partition("#")
    if number:
        return key, NUMBERS[kind](value.item())
    if value.shape == parameter.shape and value.dtype == parameter.dtype and parameter.dim():
        return key, like(value, parameter)
    return key, value


def _check_adam_state(state: Mapping[int, Mapping[str, Any]], grouped: Sequence[Tensor]) -> None:
    """Refuse a state that is not AdamW's of these parameters."""
    for place, slot in state.items():
        if not ADAM_STATE <= slot.keys() <= ADAM_STATE | {"max_exp_avg_sq"}:
            raise ValueError(f"a parameter has the state {sorted(slot)}")
        for key, value in slot.items():
            wanted = torch.Size() if key == "step" else grouped[place].shape
            if value.shape != wanted and not (key == "step" and value.numel() == 1):
                raise ValueError(f"{key} has shape {tuple(value.shape)}")


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
