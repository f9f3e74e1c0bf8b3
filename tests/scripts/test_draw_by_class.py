"""The script that reads images drawn by class with a classifier."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import load_script
from memtrain.data.prepare.cache import prepared_stream
from memtrain.errors import MemtrainError
from memtrain.recipes import recipe
from memtrain.training.console import Reporter
from memtrain.training.run import Run


@pytest.fixture
def script():
    return load_script("draw_by_class")


def train(folder: Path, monkeypatch, *, labels: bool, steps: int) -> Path:
    """A GRU that draws 4x4 squares, dark above for class 0 and below for class 1."""

    monkeypatch.chdir(folder)
    random = np.random.default_rng(0)
    kinds = np.arange(200) % 2
    images = np.zeros((200, 4, 4), np.uint8)
    images[kinds == 0, 2:] = images[kinds == 1, :2] = 255
    noise = random.random(images.shape) < 0.02
    images = np.where(noise, 255 - images, images)
    np.save("a.npy", images)
    np.save("labels.npy", kinds)
    config = recipe("images", "tiny", "bptt", "gru")
    assert config.data.kind == "stream"
    options = {"levels": 2, "labels": labels}
    data = prepared_stream("images", Path("a.npy"), config.data, options)
    bptt = replace(config.bptt, steps=steps, batch_size=16, sequence_length=16, learning_rate=1e-2)
    config = replace(config, data=replace(data, document_starts=1.0), bptt=bptt)
    Run.create(config, folder / "run").train(Reporter())
    return folder / "run"


def test_images_drawn_by_class_are_read_as_that_class(script, tmp_path: Path, monkeypatch, capsys):
    run = train(tmp_path, monkeypatch, labels=True, steps=60)
    script.main([str(run), "--count", "12", "--out", "found.json"])
    record = json.loads(Path("found.json").read_text())
    assert record["classes"] == ["0", "1"] and record["guessing"] == 0.5
    assert record["accuracy_on_held_out"] > 0.9
    assert record["share"] > 0.8 and min(record["share_by_class"]) > 0.6
    assert Path("found.png").is_file()
    assert "read as their class" in capsys.readouterr().out


def test_a_run_without_classes_is_refused(script, tmp_path: Path, monkeypatch):
    run = train(tmp_path, monkeypatch, labels=False, steps=1)
    with pytest.raises(MemtrainError, match="has no classes; train it on images with --option lab"):
        script.main([str(run)])


def test_a_share_counts_images_read_as_another_class_as_wrong(script):
    class Reader(torch.nn.Module):
        def read(self, pixels):
            return None, np.eye(2)[(pixels[:, 0, 0] > 0).astype(int)]

    pixels = np.array([0, 0, 9, 9], np.uint8).reshape(4, 1, 1)
    share, by_class = script.shares(Reader(), pixels, np.array([0, 1, 1, 1]), 3)
    assert share == 0.75 and by_class == [1.0, pytest.approx(2 / 3), None]
