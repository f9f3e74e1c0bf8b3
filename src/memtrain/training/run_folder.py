"""Read the folder of a run, and check that what is in it fits together."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from memtrain.config import DataConfig, RunConfig, Stream
from memtrain.config.serialize import read_config
from memtrain.data.store import identity_of, open_store
from memtrain.errors import CheckpointError, MemtrainError

COMPILED = "_orig_mod."
"""What torch.compile puts into the names of weights."""


def is_run(folder: Path | str) -> bool:
    """Whether a run is there."""
    return (Path(folder) / "config.json").is_file()


def read_folder(folder: Path) -> RunConfig:
    """The config of the run that is there."""
    if not is_run(folder):
        raise MemtrainError(
            f"{folder}: no run there (config.json is missing); memtrain train makes one"
        )
    return read_config(folder / "config.json")


def check_imports(folder: Path, config: RunConfig, *, cell_given: bool, task_given: bool) -> None:
    """Refuse a config that names a class to import, unless that is given as an object."""
    named = [config.cell.kind] if ":" in config.cell.kind and not cell_given else []
    named += [config.data.path] if config.data.kind == "custom" and not task_given else []
    if named:
        part = "cell" if named[0] == config.cell.kind else "task"
        raise MemtrainError(
            f"{folder}: this run imports {named[0]}; pass --allow-code if you trust it (in Python "
            f"allow_code=True, or the object itself: Run.open({str(folder)!r}, {part}=...))"
        )


def find_data(folder: Path, data: DataConfig, learned: str) -> DataConfig:
    """The data of a run, wherever the command was called: here, or beside the folder of runs.

    Args:
        folder: the run's.
        data: what its config names.
        learned: the identity of what it learned from, if it is known.
    """
    if not isinstance(data, Stream) or Path(data.path).is_absolute():
        return data
    places = [Path(data.path), folder.resolve().parent.parent / data.path]
    there = [place for place in places if (place / "meta.json").is_file()]
    if not there:
        raise MemtrainError(
            f"{folder}: its data, {data.path}, is not here and not beside the run; go to the "
            f"folder that holds it, or prepare it again: memtrain data SOURCE --out {data.path}, "
            "with the --option of before"
        )
    if len(there) > 1 and learned:
        there.sort(key=lambda place: identity_of(open_store(place).splits) != learned)
    return replace(data, path=str(there[0]))


def check_data(folder: Path, data: DataConfig, learned: str, found: str) -> None:
    """Refuse data that a run did not learn from: what is held out may be what it learned."""
    if learned and found != learned:
        name = data.path if isinstance(data, Stream) else data.kind
        raise MemtrainError(
            f"{name}: is not the data that {folder} learned from; prepare that again, with "
            "the same options, or train anew"
        )


def load_weights(models: nn.Module, weights: Mapping[str, Tensor], source: Path | str) -> None:
    """Give models the weights of a checkpoint, all of them.

    Args:
        models: the models.
        weights: their tensors by name; a module may have been compiled then and not now.
        source: where they are from, for errors.

    Raises:
        MemtrainError: they are not these models', or hold values that are not finite.
    """
    own = models.state_dict()
    names = {name.replace(COMPILED, ""): name for name in own}
    weights = {names.get(name.replace(COMPILED, ""), name): w for name, w in weights.items()}
    for name, value in weights.items():
        fresh = own.get(name)
        if not isinstance(fresh, Tensor):
            continue  # load_state_dict says which
        if fresh.dtype != value.dtype and not (
            fresh.is_floating_point() and value.is_floating_point()
        ):
            raise MemtrainError(
                f"{source}: weights do not fit the config: {name} is {value.dtype}, not "
                f"{fresh.dtype}"
            )
        # A buffer may be infinite by design, as a mask is.
        if not bool(value.isfinite().all()) and bool(fresh.isfinite().all()):
            raise MemtrainError(
                f"{source}: weights hold values that are not finite ({name}); they are damaged, or "
                "their training diverged"
            )
    try:
        models.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()[:200]
        raise MemtrainError(f"{source}: weights do not fit the config: {reason}") from None


def check_shares(config: RunConfig, processes: int) -> None:
    """Refuse batches that so many processes cannot share out, before there is a folder."""
    for name, stage in config.stages().items():
        shares = processes * stage.accumulate
        if stage.steps and stage.batch_size % shares:
            raise MemtrainError(
                f"{name}.batch_size={stage.batch_size}: {processes} processes with "
                f"accumulate={stage.accumulate} share it out, so it must be a multiple of {shares}"
            )


def check_progress(folder: Path, config: RunConfig, progress: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose stages and steps are not those of the config."""
    steps = {name: stage.steps for name, stage in config.stages().items() if stage.steps}
    names, stage, done = list(steps), progress["stage"], progress["stages"]
    if (
        stage > len(names)
        or [one.get("name") for one in done] != names[: len(done)]
        or len(done) != stage + (progress["step"] > 0)
        or (progress["step"] and progress["step"] > steps[names[stage]])
        or any({"tokens", "seconds", "sequential_ops_a_step"} - one.keys() for one in done)
    ):
        raise CheckpointError(f"{folder}: the checkpoint's progress does not fit the config")
