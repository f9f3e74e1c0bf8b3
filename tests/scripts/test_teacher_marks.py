"""The script that measures marks: trains, stops at each mark, and evaluates held-out windows."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import load_script
from memtrain.data.prepare import prepare_tokens


@pytest.fixture
def script():
    return load_script("teacher_marks")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two alternating symbols: the last one determines the whole future."""
    np.save(tmp_path / "alternating.npy", np.arange(4000) % 2)
    prepare_tokens(tmp_path / "alternating.npy", tmp_path / "data")
    return tmp_path / "data"


def call(script, monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    monkeypatch.setattr(sys, "argv", ["marks.py", *map(str, options)])
    script.main()


def test_marks_are_held_out_losses_and_decrease(
    script, monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, capsys
):
    out = tmp_path / "marks.json"
    options = ("--data", data, "--size", "tiny", "--device", "cpu", "--windows", 64, "--out", out)
    call(script, monkeypatch, "tokens", *options, "--at", 1, 120)
    record = json.loads(out.read_text())
    first, last = record["marks"]
    assert (first["step"], last["step"], record["windows"]) == (1, 120, 64)
    assert 0.5 * math.log(2) < first["decode"] < 2 * math.log(2)
    assert last["decode"] < 0.5 * first["decode"] and last["next"] < 0.5 * first["next"]
    assert "step 120" in capsys.readouterr().out


def test_windows_are_fixed_and_from_the_test_split(script, data: Path):
    from dataclasses import replace

    from memtrain.recipes import recipe

    config = recipe("tokens", "tiny")
    config = replace(config, data=replace(config.data, path=str(data)))
    one, other = (list(script.held_out_windows(config, 10)) for _ in range(2))
    assert [batch.inputs.tolist() for batch in one] == [batch.inputs.tolist() for batch in other]
    assert one[0].inputs.shape[0] == 10
    assert (one[0].inputs[:, 1:] == one[0].targets[:, :-1]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("retrieval", "--data", "x"), "retrieval has no stream of tokens"),
        (("mnist", "--data", "x", "--steps", 7), "--steps 7: the last mark is at 2000"),
    ],
)
def test_invalid_options_are_refused(
    script, monkeypatch: pytest.MonkeyPatch, capsys, options, message: str
):
    with pytest.raises(SystemExit):
        call(script, monkeypatch, *options)
    assert message in capsys.readouterr().err
