"""The folder of a run: made anew, or read with care."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from memtrain.config import DataConfig, RunConfig, Stream
from memtrain.config_json import read_config, to_json
from memtrain.data.store import identity_of, open_store
from memtrain.errors import CheckpointError, MemtrainError
from memtrain.files import write_whole

DRAFT = ".draft-config.json"
"""What is left of a run that was killed before it began."""


def make_folder(config: RunConfig, folder: Path, overwrite: bool) -> None:
    """Make the run's folder, with its config: what is there and no run is never touched."""
    if (folder / "config.json").exists():
        if not overwrite:
            raise MemtrainError(
                f"{folder}: a run is there already; --resume goes on with it, "
                "--overwrite starts anew, --folder takes another place"
            )
        for name in ("checkpoints", "figures", "samples"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    elif folder.exists() and {p.name for p in folder.iterdir()} - {DRAFT}:
        raise MemtrainError(f"{folder}: holds files that are no run; take an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", to_json(config).encode())


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
        raise MemtrainError(
            f"{folder}: this run imports {named[0]}; pass --allow-code if you trust it (in Python "
            "allow_code=True, or the object itself as cell= or task=)"
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


def load_weights(models: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Give models the weights of a checkpoint, all of them."""
    try:
        models.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()[:200]
        raise MemtrainError(f"{folder}: weights do not fit the config: {reason}") from None


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
