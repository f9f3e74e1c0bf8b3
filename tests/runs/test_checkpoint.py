"""Checkpoints are whole or not there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fault_injection import ERRORS, Crash, FaultyFiles
from memtrain.errors import CheckpointError
from memtrain.runs import checkpoint as module
from memtrain.runs.checkpoint import (
    DISK,
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from memtrain.runs.progress import Best, Progress


def make(value: float) -> Checkpoint:
    return Checkpoint(
        weights={"w": torch.full((2, 3), value)},
        optimizer={"adam.0.step": torch.tensor(value), "random.stage": torch.arange(5)},
        progress=Progress(stage=0, step=7),
    )


def test_a_saved_checkpoint_is_loaded_unchanged(tmp_path: Path):
    path = save_checkpoint(tmp_path, 7, make(1.5), keep=2)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded.weights["w"], make(1.5).weights["w"])
    assert torch.equal(loaded.optimizer["random.stage"], torch.arange(5))
    assert loaded.progress == Progress(stage=0, step=7)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    for number in (5, 10, 100):
        save_checkpoint(tmp_path, number, make(number), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "00000100"]


def test_saving_at_the_same_step_again_replaces(tmp_path: Path):
    save_checkpoint(tmp_path, 5, make(1), keep=2)
    save_checkpoint(tmp_path, 5, make(2), keep=2)
    latest, _ = latest_checkpoint(tmp_path)
    assert latest is not None and float(latest.weights["w"][0, 0]) == 2


def value_of(checkpoint: Checkpoint | None) -> float:
    return -1.0 if checkpoint is None else float(checkpoint.weights["w"][0, 0])


# How many checkpoints there are before, and the number of the one whose saving fails.
SITUATIONS = {"first": (0, 5), "second": (1, 10), "oldest goes": (3, 20), "same again": (1, 5)}


def prepared(folder: Path, count: int) -> float:
    for number in range(1, count + 1):
        save_checkpoint(folder, 5 * number, make(number), keep=2)
    return float(count) if count else -1.0


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("fault", ["before", "inside", *ERRORS])
@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power"])
def test_a_crash_at_any_operation_leaves_a_complete_checkpoint(
    tmp_path: Path, situation: str, fault: str, power_cut: bool
):
    before, number = SITUATIONS[situation]
    dry = FaultyFiles()
    (tmp_path / "dry").mkdir()
    prepared(tmp_path / "dry", before)
    save_checkpoint(tmp_path / "dry", number, make(9), keep=2, files=dry)
    assert len(dry.operations) >= 11
    for at in range(len(dry.operations)):
        folder = tmp_path / str(at)
        folder.mkdir()
        old = prepared(folder, before)
        files = FaultyFiles(at, ERRORS.get(fault, fault), power_cut)
        with pytest.raises((Crash, OSError)):
            save_checkpoint(folder, number, make(9), keep=2, files=files)
        latest, problems = latest_checkpoint(folder)
        where = f"{fault} {dry.operations[at]}"
        assert value_of(latest) in (old, 9), where
        assert problems == [], where
        # The next save goes through, and sweeps up.
        save_checkpoint(folder, 100, make(10), keep=2)
        assert value_of(latest_checkpoint(folder)[0]) == 10
        assert not list(folder.glob(".*")) and not list(folder.glob("*.old"))


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_reported_checkpoint_survives_a_power_cut(tmp_path: Path, situation: str):
    before, number = SITUATIONS[situation]
    prepared(tmp_path, before)
    files = FaultyFiles(power_cut=True)
    save_checkpoint(tmp_path, number, make(9), keep=2, files=files)
    with pytest.raises(Crash):
        files.crash()
    latest, problems = latest_checkpoint(tmp_path)
    assert value_of(latest) == 9 and problems == []


@pytest.mark.parametrize("name", module.FILES)
def test_a_changed_number_is_detected(tmp_path: Path, name: str):
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1  # still a file of tensors
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is not what was written"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", module.FILES)
def test_bytes_after_the_last_tensor_are_detected_before_hashing(tmp_path: Path, name: str):
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    with (path / name).open("r+b") as file:
        file.truncate(2**40)  # sparse: to hash it would take an hour
    with pytest.raises(CheckpointError, match=f"{name} is not as long as its header says"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", module.FILES)
def test_a_link_instead_of_a_file_is_refused(tmp_path: Path, name: str):
    """Even to the very same bytes: what is read must be what the checkpoint holds."""
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path)


def test_the_best_is_kept_with_the_last(tmp_path: Path):
    for number in (5, 10, 15, 20, 25):
        checkpoint = make(number)
        best = Best(global_step=min(number, 10), nats=0.5)
        save_checkpoint(tmp_path, number, replace(checkpoint, progress=Progress(best=best)), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "00000020", "00000025"]
    assert value_of(latest_checkpoint(tmp_path)[0]) == 25
    assert value_of(latest_checkpoint(tmp_path, best=True)[0]) == 10


def test_safetensors_reads_our_files(tmp_path: Path):
    tensors = {
        "f32": torch.randn(3, 5),
        "half": torch.randn(4).bfloat16(),
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 3),
        "state": torch.get_rng_state()[:77],
        "strided": torch.randn(4, 6).T,
        "flags": torch.tensor([True, False]),
    }
    digest = DISK.write_tensors(tmp_path / "ours", tensors)
    assert digest == module._sha256(tmp_path / "ours")
    read = load_file(tmp_path / "ours")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value), name


@pytest.mark.parametrize("progress", [[], {"stage": -1}, {"best": {"global_step": "../../etc"}}])
def test_progress_of_another_shape_is_refused(tmp_path: Path, progress):
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    state = json.loads((path / "state.json").read_text())
    state["progress"] = progress
    del state["progress_sha256"]
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="checkpoint 00000005: state.json: progress"):
        load_checkpoint(path)


def test_changed_progress_is_detected(tmp_path: Path):
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"step": 7', '"step": 6'))
    with pytest.raises(CheckpointError, match="state.json is not what was written"):
        load_checkpoint(path)


def test_an_oversized_state_is_not_read(tmp_path: Path):
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    with (path / "state.json").open("wb") as file:
        file.truncate(2**40)  # sparse: a terabyte that takes no room
    with pytest.raises(CheckpointError, match="larger than"):
        load_checkpoint(path)


def test_a_pickle_is_never_read(tmp_path: Path):
    """Even with a fitting checksum: the format is safetensors and nothing else."""
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    torch.save({"w": torch.zeros(1)}, path / "weights.safetensors")
    state = json.loads((path / "state.json").read_text())
    state["sha256"]["weights.safetensors"] = module._sha256(path / "weights.safetensors")
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="SafetensorError|not as long"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path):
    path = save_checkpoint(tmp_path, 5, make(1), keep=2)
    state = json.loads((path / "state.json").read_text()) | {"version": 99}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="version 99"):
        load_checkpoint(path)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path):
    assert latest_checkpoint(tmp_path / "none") == (None, [])
