"""PPMd on the held-out part of prepared data: what it is given, and what it refuses."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from conftest import load_script
from memtrain.data.prepare import prepare_tokens
from memtrain.data.store_reader import open_store
from memtrain.evaluation.ppmd import ppmd_losses

pytest.importorskip("pyppmd")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("ppmd")


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> list[Path]:
    """Two stores of the same words, in another order."""
    folder = tmp_path_factory.mktemp("ppmd")
    words = [b"the ", b"quick ", b"brown ", b"fox "]
    for seed in (0, 1):
        order = np.random.default_rng(seed).integers(4, size=4000)
        tokens = np.frombuffer(b"".join(words[one] for one in order), np.uint8)
        np.save(folder / f"{seed}.npy", tokens.astype(np.uint16))
        prepare_tokens(folder / f"{seed}.npy", folder / str(seed), vocab_size=256)
    return [folder / "0", folder / "1"]


def test_the_best_order_on_the_first_data_is_scored_on_the_second(
    script, stores, monkeypatch, capsys
):
    options = ["--orders", "2", "6", "--length", "64", "--sequences", "5"]
    monkeypatch.setattr(sys, "argv", ["ppmd", *map(str, stores), *options])
    assert script.main() == 0
    found = json.loads(capsys.readouterr().out)
    for path in stores:
        store = open_store(path)
        train, held_out = (script.read(store, split) for split in ("train", "test"))
        chosen = list(script.sequences(held_out, 64, 5))
        losses = {n: ppmd_losses(train, chosen, n) for n in (2, 6)}
        means = {n: sum(one) / len(one) / math.log(2) for n, one in losses.items()}
        assert found["bits_per_byte"][str(path)] == pytest.approx(means[found["order"]])
        if path == stores[0]:
            assert found["order"] == min(means, key=lambda n: means[n])


def test_every_target_is_scored_once(script):
    data = bytes(range(101))
    found = list(script.sequences(data, 10, 99))
    assert [one[0] for one in found] == list(range(0, 100, 10))
    assert b"".join(one[1:] for one in found) == data[1:]
    assert [one[0] for one in script.sequences(data, 10, 3)] == [0, 30, 60]


def test_all_training_data_is_read_unless_less_is_asked_for():
    sequence = bytes(range(200, 0, -1))
    train = sequence + b"the quick brown fox " * 50
    assert ppmd_losses(train, [sequence], 8)[0] < 1 < ppmd_losses(train, [sequence], 8, most=900)[0]


def test_tokens_that_are_no_bytes_are_refused(script, tmp_path, monkeypatch, capsys):
    np.save(tmp_path / "x.npy", np.arange(300, dtype=np.uint16).repeat(8))
    prepare_tokens(tmp_path / "x.npy", tmp_path / "x", vocab_size=300)
    monkeypatch.setattr(sys, "argv", ["ppmd", str(tmp_path / "x")])
    assert script.main() == 2
    assert "has 300 tokens, PPMd reads bytes" in capsys.readouterr().err
