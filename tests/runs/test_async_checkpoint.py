"""Saving checkpoints during training."""

import errno
import threading
from pathlib import Path

import pytest
import torch

from fault_injection import FaultyFiles
from memtrain.errors import CheckpointError
from memtrain.runs.async_checkpoint import CheckpointWriter
from memtrain.runs.checkpoint import Checkpoint, Files, latest_checkpoint
from memtrain.runs.progress import Progress


class SlowFiles(Files):
    """Files that write only when released."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write_tensors(self, path, tensors):
        assert self.go.wait(20)
        return super().write_tensors(path, tensors)


def make(tensor: torch.Tensor, step: int = 1) -> Checkpoint:
    return Checkpoint({"w": tensor}, {"m": torch.zeros(2)}, Progress(step=step))


def test_a_checkpoint_holds_the_values_at_the_call(tmp_path: Path):
    files, weight = SlowFiles(), torch.zeros(3)
    checkpoint = make(weight)
    writer = CheckpointWriter(tmp_path, 2, files)
    writer.save(1, checkpoint)  # returns at once, though nothing is written yet
    weight += 1
    checkpoint.progress.step = 99
    assert writer.saved == -1 and latest_checkpoint(tmp_path)[0] is None
    files.go.set()
    writer.wait()
    loaded, _ = latest_checkpoint(tmp_path)
    assert writer.saved == 1 and loaded is not None
    assert torch.equal(loaded.weights["w"], torch.zeros(3)) and loaded.progress == Progress(step=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_a_tensor_with_a_unique_dtype_is_copied_too(tmp_path: Path, dtype):
    files, weight = SlowFiles(), torch.zeros(3, dtype=dtype)
    writer = CheckpointWriter(tmp_path, 2, files)
    writer.save(1, make(weight))
    weight += 1
    files.go.set()
    writer.wait()
    loaded, _ = latest_checkpoint(tmp_path)
    assert loaded is not None and not loaded.weights["w"].any()


def test_the_next_save_waits_for_the_last(tmp_path: Path):
    files = SlowFiles()
    writer = CheckpointWriter(tmp_path, 2, files)
    writer.save(1, make(torch.zeros(3)))
    threading.Timer(0.1, files.go.set).start()
    writer.save(2, make(torch.ones(3)))
    assert (tmp_path / "00000001" / "state.json").is_file()
    writer.wait()
    assert writer.saved == 2


def test_checkpoints_of_another_process_are_found_on_disk(tmp_path: Path):
    writer, other = CheckpointWriter(tmp_path, 2), CheckpointWriter(tmp_path, 2)
    assert other.last_whole() == -1
    (tmp_path / "00000009").mkdir()  # a broken one, from before the run went on at an earlier step
    writer.save(1, make(torch.zeros(3)))
    other.leave_to_another(1)
    assert writer.last_whole() == 1  # it waits for its own
    assert other.last_whole() == 1
    other.leave_to_another(2)
    assert other.last_whole() == 1


def test_first_is_called_before_the_checkpoint_is_visible(tmp_path: Path):
    seen: list[bool] = []
    writer = CheckpointWriter(tmp_path, 2)
    writer.save(1, make(torch.zeros(3)), lambda: seen.append((tmp_path / "00000001").exists()))
    writer.wait()
    assert seen == [False] and (tmp_path / "00000001").exists()


def test_an_error_is_raised_by_the_next_call_and_names_the_last_complete_checkpoint(tmp_path: Path):
    files = FaultyFiles()
    writer = CheckpointWriter(tmp_path, 2, files)
    writer.save(1, make(torch.zeros(3)))
    writer.wait()
    files.at, files.fault = len(files.operations) + 4, errno.ENOSPC
    writer.save(2, make(torch.ones(3)))
    writer.finish()
    with pytest.raises(CheckpointError, match=r"No space left.*last whole one is step 1"):
        writer.check()
    writer.check()  # once is enough
    assert latest_checkpoint(tmp_path)[0] is not None


def test_a_removed_folder_is_not_recreated(tmp_path: Path):
    writer = CheckpointWriter(tmp_path / "gone" / "checkpoints", 2)
    writer.save(1, make(torch.zeros(3)))
    with pytest.raises(CheckpointError, match="No such file"):
        writer.wait()
    assert not (tmp_path / "gone").exists()


def test_tensors_of_all_kinds_round_trip(tmp_path: Path):
    weights = {
        "matrix": torch.randn(3, 5, requires_grad=True),
        "turned": torch.randn(4, 3).T,
        "half": torch.randn(7).bfloat16(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "overlapping": torch.randn(6).as_strided((3, 3), (1, 1)),
        "every other": torch.randn(4, 6)[:, ::2],
        "channels last": torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        "alone of its kind": torch.randn(2, 3, dtype=torch.float64).T,
        "truth": torch.tensor([True, False]),
    }
    optimizer = {"matrix": torch.arange(5), "random.torch": torch.get_rng_state()}
    writer = CheckpointWriter(tmp_path, 2)
    writer.save(1, Checkpoint(weights, optimizer, Progress(step=1)))
    writer.wait()
    loaded, _ = latest_checkpoint(tmp_path)
    assert loaded is not None
    for kept, found in ((weights, loaded.weights), (optimizer, loaded.optimizer)):
        assert kept.keys() == found.keys()
        for name, value in kept.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.gpu
def test_gpu_tensors_are_saved_as_of_their_step(tmp_path: Path):
    """More than one piece, changed on the device right after."""
    weight = torch.arange(2**23 + 5, dtype=torch.float32, device="cuda")
    writer = CheckpointWriter(tmp_path, 2)
    writer.save(1, make(weight))
    for _ in range(50):
        weight += 1
    writer.wait()
    loaded, _ = latest_checkpoint(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded.weights["w"], torch.arange(2**23 + 5, dtype=torch.float32))
