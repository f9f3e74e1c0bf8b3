"""Label files: what is written is read, in bounded memory; damage and mistakes are one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import memtrain
from conftest import seeded
from memtrain.data import labels as labels_module
from memtrain.data.labels import Labels, LabelsTask
from memtrain.errors import MemtrainError


def counter(sequences: int = 20, length: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, states as one-hot memories (N, T, 1, 3), and the state as target."""
    inputs = torch.randint(2, (sequences, length), generator=seeded())
    state = inputs.cumsum(1) % 3
    return inputs, F.one_hot(state, 3).float()[:, :, None], state


def saved(path: Path, **options: Any) -> Path:
    Labels(*counter(), **options).save(path)
    return path


def test_a_file_holds_what_was_saved(tmp_path: Path):
    inputs, memories, state = counter()
    path = tmp_path / "new" / "counter.safetensors"
    Labels(inputs, memories, state, vocab_size=300, held_out=0.25).save(path)
    found = Labels.open(path)
    batch = found.batch(torch.arange(20))
    assert batch.memories is not None
    assert torch.equal(batch.inputs, inputs) and torch.equal(batch.targets, state)
    assert torch.equal(batch.memories, memories)
    assert (found.card.vocab_size, found.card.held_out, found.shape) == (300, 5, (20, 6, 1, 3))
    plain = load_file(path)  # with the library of safetensors itself
    assert torch.equal(plain["memories"], memories) and plain["inputs"].dtype == torch.int32
    assert [one.name for one in path.parent.iterdir()] == [path.name]  # no draft is left


def test_large_memories_stay_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saved(tmp_path / "x.safetensors")
    whole = LabelsTask(Labels.open(path)).sample(4, seeded())
    monkeypatch.setattr(labels_module, "RESIDENT_BYTES", 10)
    monkeypatch.setattr(labels_module, "WRITTEN_BYTES", 200)  # saved in many pieces
    left = Labels.open(path)
    assert left._memories is None
    batch = LabelsTask(left).sample(4, seeded())
    assert whole.memories is not None and batch.memories is not None
    assert torch.equal(batch.memories, whole.memories)
    again = left.save(tmp_path / "y.safetensors")
    assert again.identity == Labels.open(path).identity


def test_held_out_sequences_are_never_sampled_in_training(tmp_path: Path):
    inputs = torch.arange(20)[:, None].expand(20, 6)
    _, memories, _ = counter()
    task = LabelsTask(Labels(inputs, memories, inputs, held_out=0.2))
    trained = set(task.sample(500, seeded()).inputs[:, 0].tolist())
    held = task.held_out(100, seeded()).inputs[:, 0].tolist()
    assert trained == set(range(16)) and sorted(held) == [16, 17, 18, 19]


@pytest.mark.parametrize("place", ["memories", "inputs", "targets"])
def test_a_changed_byte_is_found(tmp_path: Path, place: str):
    path = saved(tmp_path / "x.safetensors")
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin, _ = json.loads(raw[8 : 8 + length])[place]["data_offsets"]
    raw[8 + length + begin] ^= 1
    path.write_bytes(raw)
    with pytest.raises(MemtrainError, match=f"damaged .{place} are"):
        Labels.open(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], "damaged .*bytes"),
        (lambda raw: raw + b"x", "damaged .*bytes"),
        (lambda raw: raw[:4], "is not a label file"),
        (lambda raw: b"", "is not a label file"),
        (lambda raw: b"hello, this is a text", "is not a label file"),
        (lambda raw: raw.replace(b"memtrain-labels", b"memtrain-lapels"), "is not a label file"),
        (lambda raw: raw.replace(b'"version": "1"', b'"version": "9"'), "version 9"),
        (lambda raw: raw.replace(b'"F32"', b'"F64"'), "damaged .the header of memories"),
        (lambda raw: raw.replace(b'held_out\\": 2', b'held_out\\": 9'), None),
        (lambda raw: raw.replace(b'held_out\\":', b'held_uot\\":'), "held_uot"),
        (lambda raw: raw.replace(b"[20, 6, 1, 3]", b"[20, 6, 3, 2]"), "damaged"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, change: Any, message: str | None):
    path = saved(tmp_path / "x.safetensors")
    before = path.read_bytes()
    path.write_bytes(changed := change(before))
    assert changed != before
    if message is None:  # another number of held-out sequences is a valid file
        assert Labels.open(path).card.held_out == 9
        return
    with pytest.raises(MemtrainError, match=message) as error:
        Labels.open(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


INPUTS, MEMORIES, STATE = counter()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(inputs=INPUTS.float()), "inputs: must be whole numbers"),
        (dict(inputs=INPUTS - 1), "contain -1"),
        (dict(memories=MEMORIES[:, :, 0]), r"memories: must have shape \(20, 6, M, D\)"),
        (dict(memories=MEMORIES[:, 1:]), r"memories: must have shape \(20, 6, M, D\)"),
        (dict(memories=MEMORIES / 0), "memories: must be finite"),
        (dict(memories=MEMORIES.long()), "memories: must be finite floats"),
        (dict(targets=STATE[:, 1:]), "targets: must be whole numbers of the shape of inputs"),
        (dict(vocab_size=2), "vocab_size=2: must be above 2"),
        (dict(held_out=1.0), "held_out=1.0"),
    ],
)
def test_wrong_tensors_are_refused(arguments: dict[str, Any], message: str):
    given: dict[str, Any] = dict(inputs=INPUTS, memories=MEMORIES, targets=STATE) | arguments
    with pytest.raises(MemtrainError, match=message):
        Labels(**given)


def test_lists_are_refused():
    with pytest.raises(MemtrainError, match="inputs: must be a tensor, not list"):
        labels_module._check_tensors(INPUTS.tolist(), MEMORIES, STATE)


def test_a_config_needs_a_file():
    with pytest.raises(MemtrainError, match="save.path. first"):
        Labels(*counter()).config()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saved(tmp_path / "x.safetensors")
    before = path.read_bytes()
    labels = Labels(*counter(30))
    monkeypatch.setattr(labels, "memories", lambda rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        labels.save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_the_public_name():
    assert memtrain.Labels is Labels
