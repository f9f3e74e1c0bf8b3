"""Start a run from the weights of another run, of one of its checkpoints, or of a pretrained model.

The optimizer, the steps and the random numbers start from nothing. Tokens must mean the same: a
vocabulary of equal size is not enough.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from memtrain.config import RunConfig
from memtrain.data.codec import TokenCodec
from memtrain.errors import MemtrainError
from memtrain.models.rnn import RNN
from memtrain.runs import run_folder
from memtrain.runs.changes import differences
from memtrain.runs.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, load_weights
from memtrain.runs.progress import Progress

FREE = {"alphabet", "start_token"}
"""Parts of a codec that may differ: which tokens occur, and which one comes first."""


@dataclass(frozen=True, slots=True)
class Initial:
    """Weights to start from, and what is known of them."""

    source: str
    """The exact checkpoint, or the pretrained model's name; the config records it."""
    weights: Mapping[str, Tensor]
    """By the names of a run's models: rnn.* and teacher.*."""
    config: RunConfig
    progress: Progress
    """Its codec and values; of a pretrained model only the codec."""


@runtime_checkable
class Loaded(Protocol):
    """An RNN without its run, as `memtrain.load_pretrained` and `memtrain.load_rnn` return it."""

    name: str
    spelling: TokenCodec | None
    config: RunConfig

    @property
    def rnn(self) -> RNN: ...


def read_initial(source: object) -> Initial:
    """Read the weights of a run, of a checkpoint folder of a run, or of a pretrained model.

    Raises:
        MemtrainError: there is no such thing, or it is not trained.
    """
    if isinstance(source, Loaded):
        return _from_loaded(source)
    if not isinstance(source, str | Path):
        raise MemtrainError(
            f"initial={type(source).__name__}: must be the folder of a run, one of its "
            "checkpoints, or what memtrain.load_pretrained returns"
        )
    path = Path(source)
    try:
        (path / "state.json").exists()
    except OSError as error:  # a name that no file can have, or a folder that may not be read
        reason = f"initial: {error.strerror}, {str(source)[:80]}"
        raise MemtrainError(f"{reason}; name a run's folder") from None
    if (path / "state.json").is_file():
        run = path.parent.parent
        return _from_run(run, str(path), load_checkpoint(path))
    if run_folder.is_run(path):
        recorded = run_folder.whole_run_file(path)
        checkpoint, _ = latest_checkpoint(path / "checkpoints", run=recorded.id if recorded else "")
        if checkpoint is None or not checkpoint.progress.stages:
            raise MemtrainError(
                f"{source}: has no checkpoint to start from; memtrain resume {source} trains it"
            )
        exact = path / "checkpoints" / f"{checkpoint.progress.global_step:08d}"
        return _from_run(path, str(exact), checkpoint)
    if path.parent.name == "checkpoints" and run_folder.is_run(path.parent.parent):
        raise MemtrainError(
            f"{source}: this checkpoint is gone; start from the run's newest, {path.parent.parent}"
        )
    raise MemtrainError(
        f"initial={source}: no run there, and no checkpoint of one; a pretrained model is given as "
        'an object, initial=memtrain.load_pretrained("mnist-small")'
    )


def _from_loaded(model: Loaded) -> Initial:
    weights = {f"rnn.{name}": value for name, value in model.rnn.state_dict().items()}
    spelling = asdict(model.spelling) if model.spelling is not None else None
    return Initial(model.name, weights, model.config, Progress(spelling=spelling))


def _from_run(run: Path, source: str, checkpoint: Checkpoint) -> Initial:
    return Initial(source, checkpoint.weights, run_folder.read_folder(run), checkpoint.progress)


def check_meaning(initial: Initial, config: RunConfig, progress: Progress) -> None:
    """Refuse weights whose tokens or numbers mean something else than the new run's.

    Args:
        initial: the weights.
        config: of the new run.
        progress: of the new run; it has the codec and the values of its data.
    """
    source, before = initial.source, initial.progress
    kinds = (initial.config.data.kind, config.data.kind)
    if before.spelling == "unknown":  # in old checkpoints: only the same kind of data will do
        same = progress.spelling if kinds[0] == kinds[1] else None
        before = replace(before, spelling=same)
    one, other = _meaning(before), _meaning(progress)
    if kinds == ("custom", "custom"):
        kinds = (initial.config.data.path, config.data.path)  # type: ignore[union-attr]
    if one is None and other is None and kinds[0] != kinds[1]:
        raise MemtrainError(
            f"initial={source}: was trained on {kinds[0]}, this run is of {kinds[1]}, and their "
            "tokens mean different things; start from a run of the same task"
        )
    if (one is None) != (other is None):
        raise MemtrainError(
            f"initial={source}: was trained on {kinds[0]}, this run is of {kinds[1]}; start from a "
            "run on data of the same kind"
        )
    one, other = one or {}, other or {}
    first = [name for name in ("text", "levels", "patch") if name in one or name in other]
    for name in dict.fromkeys([*first, *one, *other]):
        left, right = one.get(name), other.get(name)
        if left != right:
            raise MemtrainError(
                f"initial={source}: its tokens mean something else than this run's, there "
                f"{name}={left}, here {name}={right}; prepare the data as that run's was, or start "
                "from another"
            )


def _meaning(progress: Progress) -> dict[str, Any] | None:
    """What tokens or numbers mean; None if the data do not say."""
    if progress.series is not None:
        names = {name: progress.series[name] for name in ("targets", "known")}
        return json.loads(json.dumps({**(progress.values or {}), **names}))
    if progress.values is not None:
        return json.loads(json.dumps(progress.values))
    if not isinstance(progress.spelling, dict):
        return None
    plain = json.loads(json.dumps(progress.spelling))
    found = {name: value for name, value in plain.items() if name not in FREE}
    if isinstance(found.get("picture"), dict):  # images of another size have the same tokens
        picture = found.pop("picture")
        found |= {name: picture.get(name) for name in ("levels", "patch")}
    return found


def load_initial(
    initial: Initial, models: nn.ModuleDict, config: RunConfig, *, needs_teacher: bool
) -> list[str]:
    """Load the weights into a new run's models; returns messages about what starts from nothing.

    Raises:
        MemtrainError: shapes do not fit, or there is no teacher where one is needed.
    """
    messages = []
    for part, model in models.items():
        found = {
            name.removeprefix(f"{part}."): value
            for name, value in initial.weights.items()
            if name.startswith(f"{part}.")
        }
        if not found and part == "teacher":
            if needs_teacher:
                problem = f"initial={initial.source}: has no teacher, which this run needs, "
                problem += "because it trains none; set smt.steps, or use "
                raise MemtrainError(
                    f'{problem}recipe(..., method="bptt")', f"{problem}--method bptt"
                )
            messages.append(f"{initial.source}: has no teacher; this run's starts from nothing")
            continue
        _check_shapes(initial, part, found, model, config)
        load_weights(model, found, initial.source)
    return messages


def _check_shapes(
    initial: Initial, part: str, found: Mapping[str, Tensor], model: nn.Module, config: RunConfig
) -> None:
    """Refuse weights of other names or shapes: the config's fields that differ, else the weight."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    bad = [name for name in own if name not in found or found[name].shape != own[name].shape]
    bad += [name for name in found if name not in own]
    if not bad:
        return
    pairs = []
    for section in ("cell", "teacher"):
        here, there = (getattr(one, section) for one in (config, initial.config))
        pairs += [(f"{section}.{name}", a, b) for name, a, b in differences(here, there)]
    if config.readout_attention != initial.config.readout_attention:
        pairs.append(
            ("readout_attention", config.readout_attention, initial.config.readout_attention)
        )
    name = bad[0]
    shapes = [tuple(one[name].shape) if name in one else "missing" for one in (found, own)]
    fields = ", ".join(f"{field}={there} (here {here})" for field, here, there in pairs)
    remedy = f"its config has {fields}; set the same" if pairs else "build the same models"
    raise MemtrainError(
        f"initial={initial.source}: {part}.{name} is {shapes[0]}, here {shapes[1]}; {remedy}"
    )
