"""Finds the files of a data set in the user's folder."""

from pathlib import Path

from memtrain.errors import MemtrainError


def check_folder(name: str, data_dir: Path) -> None:
    """Refuse a folder that is not there."""
    if not data_dir.exists():
        raise MemtrainError(f"{name}: data_dir={data_dir}: no such folder")


def first_there(folder: Path, *names: str) -> Path | None:
    """The first of these that the folder has."""
    return next((folder / name for name in names if (folder / name).exists()), None)
