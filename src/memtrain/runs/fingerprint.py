"""Fingerprints of a user's own task and cell, so that a run is resumed with the same ones.

A class path does not distinguish objects that were made with different arguments. So the record
also holds their behaviour: hashes of sequences that the task samples (a few of their numbers, if
they are no tokens), and a few numbers that the cell computes with fixed weights. A run that is
opened later refuses an object that differs.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.config import CELLS, CUSTOM_PATH, RunConfig
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.models.check_cell import memory_shape, sample_token
from memtrain.models.layers import evaluation_mode
from memtrain.shapes import Batch, Space

SEQUENCES = 3
"""Sampled from a task for its fingerprint."""
NUMBERS = 24
"""Outputs of a cell's step in its fingerprint."""
TOLERANCE = 2e-3
"""Of these outputs, between devices and library versions; other arguments change them more."""
LONGEST_TEXT = 200
WORDS = {
    "sample": "training sequences",
    "held_out": "held-out sequences",
    "memory": "memory's shape",
    "state": "names, shapes or types of weights",
    "modules": "layers",
    "step": "outputs",
}
"""Names of the fields of a behaviour in errors."""
UNSTABLE = ("sample", "held_out", "modules", "step")
"""Fields that another version of torch may change."""
Record = dict[str, Any]


def compiled_from(cell: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself."""
    inner = getattr(cell, "_orig_mod", cell)
    return inner if isinstance(inner, nn.Module) else cell


def class_path(thing: object) -> str | None:
    """module:Class, if a config can name it."""
    kind = type(compiled_from(thing)) if isinstance(thing, nn.Module) else type(thing)
    path = f"{kind.__module__}:{kind.__name__}"
    return path if CUSTOM_PATH.fullmatch(path) else None


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of named tensors: of their bytes on the CPU."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def describe(
    config: RunConfig, task: Task, cell: nn.Module, *, task_given: bool, cell_given: bool
) -> Record:
    """The record of a run's task and cell, without those that the config describes."""
    record: Record = {}
    if task_given or config.data.kind == "custom":
        record["task"] = _about(task, task_given) | {"behaviour": _task_behaviour(task)}
    return record | describe_cell(config, cell, task.space, given=cell_given)


def describe_cell(config: RunConfig, cell: nn.Module, space: Space, *, given: bool) -> Record:
    """The record of a run's cell alone; empty for built-in cells."""
    if not given and config.cell.kind in CELLS:
        return {}
    cell = compiled_from(cell)
    return {"cell": _about(cell, given) | {"behaviour": _cell_behaviour(cell, space)}}


def _about(thing: object, given: bool) -> Record:
    """The class and simple attributes, for error messages."""
    plain = {
        name: value[:LONGEST_TEXT] if isinstance(value, str) else value
        for name, value in vars(thing).items()
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }
    path = f"{type(thing).__module__}:{type(thing).__qualname__}"
    return {"class": path, "given": given, "attributes": plain, "torch": torch.__version__}


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, (bool, str)) or (type(value) is int and abs(value) < 2**53)


# ------------------------------------------------------------------------------------ behaviour


def _task_behaviour(task: Task) -> Record:
    found: Record = {"sequence_length": task.sequence_length}
    if task.values is None:
        found["vocab_size"] = task.vocab_size
    else:
        found["values"] = asdict(task.values)
    found |= {"unit": task.unit, "stream": task.stream, "device": task.device.type}
    for number, draw in enumerate((task.sample, task.held_out)):
        generator = torch.Generator(task.device).manual_seed(number)
        name = f"{type(task).__name__}.{draw.__name__}({SEQUENCES}, generator)"
        try:
            batch = draw(SEQUENCES, generator)
        except MemtrainError:
            raise
        except Exception as error:  # the user's code: any error is a broken contract
            reason = str(error).strip().partition("\n")[0]
            raise MemtrainError(f"{name} raised {type(error).__name__}: {reason}") from error
        if not isinstance(batch, Batch):
            raise MemtrainError(f"{name}: must return a memtrain.Batch, not {type(batch)}")
        if task.values is None:
            found[draw.__name__] = _digest(batch.inputs.tolist(), batch.targets.tolist())
        else:  # computed numbers may differ in the last digit on another machine
            found[draw.__name__] = _some(torch.cat([batch.inputs, batch.targets], dim=-1))
    return found


def _cell_behaviour(cell: nn.Module, space: Space) -> Record:
    state = {
        name: [list(value.shape), str(value.dtype)]
        for name, value in cell.state_dict().items()
        if isinstance(value, Tensor)
    }
    text = nn.Module.__repr__(cell)  # submodules with their arguments, also of dropout
    return {
        "memory": list(memory_shape(cell)),
        "state": _digest(state),
        "modules": "" if " at 0x" in text else _digest(text),
        "step": _step(cell, space),
    }


def _step(cell: nn.Module, space: Space) -> list[float] | None:
    """A few outputs of a step with fixed weights; None if they are not finite."""
    persistent = cell.state_dict().keys()
    named = dict(cell.named_parameters())
    named |= {name: value for name, value in cell.named_buffers() if name in persistent}
    fixed = {
        name: _pattern(value, at, centre=0.0 if isinstance(value, nn.Parameter) else 1.0)
        for at, (name, value) in enumerate(named.items())
        if value.is_floating_point()
    }
    device = next((p.device for p in cell.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(2, *memory_shape(cell), generator=generator).to(device)
    token = sample_token(space, 2, generator).to(device)
    try:
        with evaluation_mode(cell), torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = torch.func.functional_call(cell, fixed, (memory, token)).double().cpu().flatten()
    except Exception:  # a cell that accepts no other weights: its class and shapes must suffice
        return None
    if not bool(out.isfinite().all()):
        return None
    return _some(out)


def _some(numbers: Tensor) -> list[float]:
    """A few of many numbers, 0 for NaN."""
    numbers = numbers.nan_to_num().flatten()
    places = torch.linspace(0, len(numbers) - 1, min(NUMBERS, len(numbers))).long()
    return [float(f"{value:.6g}") for value in numbers[places].tolist()]


def _pattern(value: Tensor, number: int, centre: float) -> Tensor:
    """Weights of the scale of an initialization, the same on every machine."""
    at = torch.arange(value.numel(), dtype=torch.float64)
    size = 1 / math.sqrt(value.shape[-1]) if value.dim() else 1.0
    waves = centre + size * torch.sin(1.3 * at + 0.7 * number + 0.4)
    return waves.view(value.shape).to(value.device, value.dtype)


def _digest(*plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


# -------------------------------------------------------------------------------------- compare


def read_record(plain: Any, source: str) -> Record:
    """Check the structure of a record from a file.

    Raises:
        MemtrainError: it is not a record.
    """
    right = isinstance(plain, dict) and plain.keys() <= {"task", "cell"}
    for part in plain.values() if right else ():
        right = (
            right
            and isinstance(part, dict)
            and isinstance(part.get("class"), str)
            and isinstance(part.get("attributes", {}), dict)
            and isinstance(part.get("behaviour"), dict)
        )
    if not right:
        raise MemtrainError(f"{source}: made_of: is not the record of a task and a cell")
    return plain


def check_record(recorded: Record, found: Record, run: str, parts: tuple[str, ...]) -> list[str]:
    """Refuse a task or a cell that differs from the run's.

    Args:
        recorded: the record of the run.
        found: the record of the current objects.
        run: the run's folder.
        parts: which to compare, "task" and "cell".

    Returns:
        Warnings about differences that another version of torch may explain.
    """
    doubts = []
    for part in parts:
        old, new = recorded.get(part), found.get(part)
        if old is None:
            if new is None:
                continue
            raise MemtrainError(
                f"{run}: {part}={new['class']}: the {part} of this run is the one that its config "
                f"names; leave {part}= out"
            )
        needed = f"{old['class']}{_arguments(old)}"
        how = f"pass the same object, Run.open({run!r}, {part}=...)"
        if new is None:
            raise MemtrainError(f"{run}: its {part} was given as an object, {needed}; {how}")
        field = _difference(old["behaviour"], new["behaviour"])
        if not field:
            continue
        differs = f"its {WORDS.get(field, field)} differ"
        if field in UNSTABLE and old.get("torch") != new["torch"]:
            doubts.append(
                f"{run}: its {part} may be another than {needed}: {differs}, which may come from "
                f"another torch ({old.get('torch')!r} then, {new['torch']!r} now)"
            )
            continue
        raise MemtrainError(
            f"{run}: {part}={new['class']}{_arguments(new)}: is not the {part} that this run was "
            f"made with, {needed}: {differs}; {how}"
        )
    return doubts


def _arguments(part: Mapping[str, Any]) -> str:
    plain = part.get("attributes", {})
    return f" ({', '.join(f'{k}={v!r}' for k, v in list(plain.items())[:6])})" if plain else ""


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first field in which two behaviours differ; empty if they are equal."""
    other_device = old.get("device") != new.get("device")  # its generator samples other numbers
    for name, value in new.items():
        if name == "device" or (other_device and name in ("sample", "held_out")):
            continue
        if isinstance(value, list | None) and name in ("step", "sample", "held_out"):
            if not _close(old.get(name), value):
                return name
        elif old.get(name) != value:
            return name
    return ""


def _close(old: Any, new: list[float] | None) -> bool:
    if new is None or old is None:
        return old is new
    if not isinstance(old, list) or len(old) != len(new):
        return False
    if not all(_is_plain(value) and not isinstance(value, str) for value in old):
        return False
    scale = max(1.0, *map(abs, new))
    return all(abs(a - b) <= TOLERANCE * scale for a, b in zip(old, new, strict=True))
