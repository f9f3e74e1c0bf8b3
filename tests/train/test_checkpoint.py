"""Checkpoints are whole or not there."""

import json
from pathlib import Path

import pytest
import torch

from memtrain.errors import CheckpointError
from memtrain.train import checkpoint as module
from memtrain.train.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def make(value: float) -> Checkpoint:
    return Checkpoint(
        weights={"w": torch.full((2, 3), value)},
        optimizer={"adam.0.step": torch.tensor(value), "random.stage": torch.arange(5)},
        progress={"stage": 0, "step": 7},
    )


def test_what_was_saved_comes_back(tmp_path: Path):
    path = save_checkpoint(tmp_path, 7, make(1.5), keep=2)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded.weights["w"], make(1.5).weights["w"])
    assert torch.equal(loaded.optimizer["random.stage"], torch.arange(5))
    assert loaded.progress == {"stage": 0, "step": 7}


def test_only_the_newest_stay(tmp_path: Path):
    for number in (5, 10, 100):
        save_checkpoint(tmp_path, number, make(number), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "00000100"]


def test_saving_at_the_same_step_again_replaces(tmp_path: Path):
    save_checkpoint(tmp_path, 5, make(1), keep=2)
    save_checkpoint(tmp_path, 5, make(2), keep=2)
    latest, _ = latest_checkpoint(tmp_path)
    assert latest is not None and float(latest.weights["w"][0, 0]) == 2


def test_a_crash_while_writing_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch):
    save_checkpoint(tmp_path, 5, make(1), keep=2)

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(module, "_sync", crash)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 10, make(2), keep=2)
    monkeypatch.undo()
    latest, problems = latest_checkpoint(tmp_path)
    assert latest is not None and float(latest.weights["w"][0, 0]) == 1
    assert problems == []
    save_checkpoint(tmp_path, 10, make(3), keep=2)
    assert not list(tmp_path.glob(".draft*"))


def test_a_pickle_is_never_read(tmp_path: Path):
    """Even with a fitting checksum: the format is safetensors and nothing else."""
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    torch.save({"w": torch.zeros(1)}, path / "weights.safetensors")
    state = json.loads((path / "state.json").read_text())
    state["sha256"]["weights.safetensors"] = module._sha256(path / "weights.safetensors")
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="SafetensorError"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path):
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    state = json.loads((path / "state.json").read_text()) | {"version": 99}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="version 99"):
        load_checkpoint(path)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path):
    assert latest_checkpoint(tmp_path / "none") == (None, [])
