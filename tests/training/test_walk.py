"""The walk from a command to the numbers is short: few functions in few files."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import memtrain
from conftest import TINY
from memtrain.cli import main
from memtrain.config.serialize import to_json
from memtrain.objectives.smt import SMT
from memtrain.shapes import Losses

PACKAGE = str(Path(memtrain.__file__).parent)


def walk(frame: FrameType | None, first: str) -> list[tuple[str, str]]:
    """(file, function) of our frames, from the command's function to the frame."""
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            found.append((code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname))
        frame = frame.f_back
    found.reverse()
    (start,) = [i for i, (file, name) in enumerate(found) if f"{file}:{name}" == first]
    return found[start:]


def test_eight_functions_in_six_files_lead_from_the_command_to_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    walks, compute = [], SMT.compute

    def noted(self: SMT, *arguments: Any) -> Losses:
        found = walk(sys._getframe(1), "cli/train.py:train")
        walks.append([*found, ("objectives/smt.py", "SMT.compute")])
        return compute(self, *arguments)

    (tmp_path / "tiny.json").write_text(to_json(TINY))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SMT, "compute", noted)
    stages = ["--smt.steps", "3", "--dmt.steps", "0", "--bptt.steps", "0"]
    assert main(["train", "tiny.json", *stages]) == 0
    steps = [found for found in walks if ("training/loop.py", "StageLoop.train") in found]
    assert len(steps) == 3
    for found in steps:
        assert len(found) <= 8, found
        assert len({file for file, _ in found}) <= 6, found
