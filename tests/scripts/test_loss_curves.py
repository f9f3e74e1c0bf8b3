"""The script that compares the fast path with the reference: it trains both, and can say no."""

import json
import sys
from pathlib import Path

import pytest
import torch

from conftest import load_script
from memtrain.recipes import recipe


@pytest.fixture
def script():
    return load_script("loss_curves")


def call(script, monkeypatch: pytest.MonkeyPatch, *options: object) -> int:
    monkeypatch.setattr(sys, "argv", ["loss_curves.py", *map(str, options)])
    return script.main()


def test_hand_written_gradients_match_the_reference_loss_curve(
    script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    out, figure = tmp_path / "curves.json", tmp_path / "curves.png"
    options = ("retrieval", "--steps", 4, "--device", "cpu", "--out", out, "--figure", figure)
    assert call(script, monkeypatch, *options) == 0
    found = json.loads(out.read_text())
    apart = found["distance_from_the_reference"]
    # On some CPUs both paths give the same bits.
    assert found["within_noise"] and apart["fast"] < 1e-4 < apart["another seed"]
    assert [len(losses) for losses in found["decode"].values()] == [4, 4, 4]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_fast_path_is_compared_with_the_plain_one(script):
    found = script.variants(recipe("retrieval"), torch.device("cpu"))
    fast = {name: config.engine.fast for name, config in found.items()}
    assert fast == {"reference": False, "fast": True, "another seed": False}


def test_a_fast_path_with_another_loss_curve_is_detected(
    script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def curve(config):
        offset = 0.01 if config.engine.fast else 0.05 * config.seed
        return [1.0 + offset] * 10, 1.0

    monkeypatch.setattr(script, "curve", curve)
    assert call(script, monkeypatch, "retrieval", "--steps", 10, "--device", "cpu") == 1
    assert "within noise: NO" in capsys.readouterr().out


def test_data_option_is_refused_for_generated_data(
    script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        call(script, monkeypatch, "retrieval", "--data", "somewhere")
    assert "--data somewhere: retrieval makes its own data" in capsys.readouterr().err
