"""Memory files: what was saved is loaded, anything else is refused in one line."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import memtrain
from memtrain.errors import MemtrainError
from memtrain.generation.memory import Memory, MemoryCard
from model_testing import text_codec, tiny_model

MODEL = tiny_model("gru", text_codec())
CARD = dict(model="0" * 32, name="tiny", tokens=3, kind="text", source="x")


@pytest.fixture(scope="module")
def memory() -> Memory:
    return memtrain.remember(MODEL, "abcab")


def test_a_file_holds_the_memory_and_its_origin(memory: Memory, tmp_path: Path):
    path = tmp_path / "new" / "a.mem"
    memory.save(path)
    found = Memory.load(str(path))
    assert torch.equal(found.values, memory.values) and found.card == memory.card
    assert found.card.tokens == 5 and found.card.source == "a text" and found.card.name == "tiny"
    assert "5 tokens" in repr(found)
    assert [one.name for one in path.parent.iterdir()] == ["a.mem"]
    generated = memtrain.generate(MODEL, memory=found, length=9)
    assert (
        generated.tokens.tolist()
        == memtrain.generate(MODEL, memory=memory, length=9).tokens.tolist()
    )


def test_a_failed_write_leaves_the_old_file(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a.mem"
    memory.save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        memory.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_another_models_memory_is_refused(memory: Memory):
    other = tiny_model("gru", text_codec())
    with torch.no_grad():
        other.readout.head.weight[0, 0] += 1e-3
    for call in (
        memtrain.generate,
        lambda model, memory: memtrain.remember(model, "a", memory=memory),
    ):
        with pytest.raises(MemtrainError, match="was written by tiny .* means something only to"):
            call(other, memory=memory)
    with pytest.raises(MemtrainError, match="memories of two models"):
        memory.distance(memtrain.remember(other, "abcab"))


def test_average_difference_distance_and_shift(memory: Memory):
    other = memtrain.remember(MODEL, "ccc\n")
    mean = Memory.average([memory, other])
    torch.testing.assert_close(mean.values, (memory.values + other.values) / 2)
    assert mean.card.tokens == 9 and mean.card.source == "the average of a text, a text"
    assert mean.distance(memory) == pytest.approx(mean.distance(other), rel=1e-5)
    assert memory.distance(memory) == 0
    change = other.difference(memory)
    assert other.distance(memory) == pytest.approx(float(change.norm()) / math.sqrt(change.numel()))
    torch.testing.assert_close(memory.shifted(change).values, other.values)
    assert memtrain.generate(MODEL, memory=mean, length=4).tokens.shape == (1, 4)
    with pytest.raises(MemtrainError, match="must hold at least one Memory"):
        Memory.average([])
    with pytest.raises(MemtrainError, match="must be a tensor of shape"):
        memory.shifted(torch.zeros(1, 1))


def file_of(tensors: dict[str, Any], card: Any, **metadata: str) -> bytes:
    text = card if isinstance(card, str) else json.dumps(card)
    plain = {"format": "memtrain-memory", "version": "1", "card": text}
    return save(tensors, plain | metadata)


VALUES = {"memory": torch.zeros(2, 16)}
HOSTILE = {
    "text": (b"hello, I am a text", "is not a memory file"),
    "nothing": (b"", "is not a memory file"),
    "a huge header": ((2**40).to_bytes(8, "little") + b"{}", "is not a memory file"),
    "deep JSON": ((10**5).to_bytes(8, "little") + b"[" * 10**5, "its header"),
    "other safetensors": (save(VALUES, {"format": "pt"}), "is not a memory file"),
    "a later version": (file_of(VALUES, CARD, version="2"), "version 2, .* update memtrain"),
    "no card": (file_of(VALUES, "{}"), "its card"),
    "a card of a wrong type": (file_of(VALUES, CARD | {"tokens": "3"}), "tokens"),
    "an unknown field": (file_of(VALUES, CARD | {"code": "x"}), "code"),
    "no tokens": (file_of(VALUES, CARD | {"tokens": 0}), "tokens=0"),
    "two tensors": (file_of(VALUES | {"more": torch.zeros(1)}, CARD), "must hold one tensor"),
    "another name": (file_of({"m": torch.zeros(2, 16)}, CARD), "must hold one tensor"),
    "another type": (file_of({"memory": torch.zeros(2, 16).half()}, CARD), "float32"),
    "one dimension": (file_of({"memory": torch.zeros(16)}, CARD), "must hold one tensor"),
    "infinity": (file_of({"memory": torch.full((2, 16), torch.inf)}, CARD), "finite"),
    "cut short": (file_of(VALUES, CARD)[:-4], "damaged"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_damaged_and_hostile_files_are_refused(kind: str, tmp_path: Path):
    content, message = HOSTILE[kind]
    path = tmp_path / "a.mem"
    path.write_bytes(content)
    with pytest.raises(MemtrainError, match=message) as error:
        Memory.load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path: Path):
    with pytest.raises(MemtrainError, match="No such file"):
        Memory.load(tmp_path / "gone")
    with pytest.raises(MemtrainError, match="is not a regular file"):
        Memory.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MemtrainError, match="is not a regular file"):
        Memory.load(tmp_path / "pipe")


def test_a_memory_of_another_shape_with_the_right_checksum_is_refused(memory: Memory):
    card = MemoryCard(**{**CARD, "model": memory.card.model})
    with pytest.raises(MemtrainError, match="was written by"):
        memtrain.generate(MODEL, memory=Memory(torch.zeros(3, 16), card))
