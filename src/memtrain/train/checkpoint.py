"""Checkpoints: safetensors and JSON, whole or not there at all.

A checkpoint is a folder `checkpoints/00001234` with weights, optimizer and random state, and
`state.json`, which holds a checksum of each file. It is written beside its place, synced to disk
and renamed, so a reader never meets half of one.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from memtrain.errors import CheckpointError

CHECKPOINT_VERSION = 1
FILES = ("weights.safetensors", "optimizer.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to go on."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    progress: dict
    """Stage, step, counters, and how long metrics.jsonl was."""


def save_checkpoint(folder: Path, number: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write one checkpoint under `folder` and drop the oldest beyond `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{number:08d}"
    draft = folder / f".draft-{number:08d}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for name, tensors in zip(FILES, (checkpoint.weights, checkpoint.optimizer), strict=True):
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, draft / name)
    state = {
        "version": CHECKPOINT_VERSION,
        "progress": checkpoint.progress,
        "sha256": {name: _sha256(draft / name) for name in FILES},
    }
    (draft / "state.json").write_text(json.dumps(state, indent=2))
    for path in (*draft.iterdir(), draft):
        _sync(path)
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    _sync(folder)
    for old in _numbered(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: a file is missing, cut short or changed; the message says which.
    """
    try:
        state = json.loads((path / "state.json").read_text())
        if state["version"] != CHECKPOINT_VERSION:
            raise CheckpointError(
                f"{path.name}: version {state['version']}, this memtrain reads {CHECKPOINT_VERSION}"
            )
        for name in FILES:
            if _sha256(path / name) != state["sha256"][name]:
                raise CheckpointError(f"{path.name}: {name} is not what was written (checksum)")
        weights, optimizer = (load_file(path / name) for name in FILES)
        return Checkpoint(weights, optimizer, state["progress"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path.name}: {type(error).__name__}: {error}") from None


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with those after it.

    Raises:
        CheckpointError: there are checkpoints and none of them is whole.
    """
    problems = []
    for path in reversed(_numbered(folder)):
        try:
            return load_checkpoint(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"no whole checkpoint in {folder}: " + "; ".join(problems))
    return None, []


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.isdigit() and p.is_dir())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
