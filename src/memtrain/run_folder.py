"""The folder of a run: made anew, or read with care."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memtrain.config import RunConfig
from memtrain.config_json import read_config, to_json
from memtrain.errors import CheckpointError, MemtrainError
from memtrain.train.files import write_whole

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


def read_folder(folder: Path) -> RunConfig:
    """The config of the run that is there."""
    path = folder / "config.json"
    if not path.is_file():
        raise MemtrainError(
            f"{folder}: no run there (config.json is missing); memtrain train makes one"
        )
    return read_config(path)


def check_imports(folder: Path, config: RunConfig, *, cell_given: bool, task_given: bool) -> None:
    """Refuse a config that names a class to import, unless that is given as an object."""
    named = [config.cell.kind] if ":" in config.cell.kind and not cell_given else []
    named += [config.data.path] if config.data.kind == "custom" and not task_given else []
    if named:
        raise MemtrainError(
            f"{folder}: this run imports {named[0]}; pass --allow-code if you trust it"
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
