"""PPMd as a baseline: its losses are the lengths of what it writes, one sequence at a time."""

import math
import random

import pytest

from memtrain.errors import MemtrainError
from memtrain.evaluation import ppmd
from memtrain.evaluation.ppmd import MEMORY, ppmd_losses

pyppmd = pytest.importorskip("pyppmd")


def words(count: int, seed: int) -> bytes:
    source = random.Random(seed)
    chosen = (source.choice(("the", "quick", "brown", "fox", "jumps")) for _ in range(count))
    return " ".join(chosen).encode()


TRAIN, HELD_OUT = words(3000, 0), [words(60, seed) for seed in range(1, 5)]


def test_losses_are_differences_of_compressed_lengths():
    def size(data: bytes) -> int:
        encoder = pyppmd.Ppmd7Encoder(6, MEMORY)
        return len(encoder.encode(data)) + len(encoder.flush())

    for found, sequence in zip(ppmd_losses(TRAIN, HELD_OUT, 6), HELD_OUT, strict=True):
        bits = 8 * (size(TRAIN + sequence) - size(TRAIN + sequence[:1]))
        assert found == pytest.approx(bits * math.log(2) / (len(sequence) - 1))


def test_no_sequence_is_seen_by_another():
    alone = [ppmd_losses(TRAIN, [one], 6)[0] for one in HELD_OUT]
    assert ppmd_losses(TRAIN, HELD_OUT[::-1], 6) == alone[::-1]


def test_the_training_data_is_context():
    source = random.Random(0)
    noise = bytes(source.randrange(256) for _ in range(300))
    known, unknown = ppmd_losses(noise, [noise], 8)[0], ppmd_losses(TRAIN, [noise], 8)[0]
    assert known < 1 and unknown > math.log(256)


def test_five_random_words_cost_as_much_as_they_must():
    # A word of five, with its space, is one choice of log 5.
    length = sum(map(len, HELD_OUT)) / sum(one.count(b" ") + 1 for one in HELD_OUT)
    losses = ppmd_losses(TRAIN, HELD_OUT, 6)
    assert sum(losses) / len(losses) == pytest.approx(math.log(5) / length, rel=0.15)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(ppmd, "find_spec", lambda name: None)
    with pytest.raises(MemtrainError, match=r'pyppmd is not installed: pip install "memtrain\['):
        ppmd_losses(TRAIN, HELD_OUT, 6)


def test_a_failure_is_one_line(monkeypatch):
    monkeypatch.setattr(ppmd.sys, "executable", "false")
    with pytest.raises(MemtrainError, match=r"^PPMd: failed \(it was ended\); update pyppmd.*$"):
        ppmd_losses(TRAIN, HELD_OUT, 6)
