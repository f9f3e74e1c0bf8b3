"""The script that judges a GPU, on a CPU: it runs, and sees what it should see."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_trust.py"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder and output."""
    folder = tmp_path_factory.mktemp("trust")
    options = ["--size", "tiny", "--device", "cpu", "--no-compile", "--no-plain"]
    options += ["--block", "4", "--checkpoints", "2"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *options, "--folder", folder / "runs", "--out", folder / "out"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_checkpoints_are_timed_and_resumed_runs_compared(judged: tuple[Path, str]):
    folder, output = judged
    result = json.loads((folder / "out").read_text())
    stall, resume = result["stall"], result["resume"]["deterministic"]
    assert stall["checkpoints"] == 2 and stall["steps"] == 32
    assert 0 < stall["step_seconds"] <= stall["worst_step_without"]
    assert stall["host_seconds_a_checkpoint"] > 0 and stall["seconds_until_on_disk"] > 0
    assert resume["equal_to_the_bit"] and resume["lines"] == 30 and resume["tensors"] > 500
    assert "resume bit-exact, deterministic  yes" in output and "a step of SMT" in output


def test_differing_tensors_and_lines_are_reported(judged: tuple[Path, str]):
    script = load_script("gpu_trust")
    whole, cut = (judged[0] / "runs" / f"deterministic-{kind}" for kind in ("whole", "cut"))
    metrics = cut / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace('"learning_rate": ', '"learning_rate": 1', 1))
    found = script.difference(whole, cut)
    assert found["different_lines"] == 1 and found["first_difference"] == "smt step 1"
    metrics.write_text(text)
    assert script.difference(whole, cut)["equal_to_the_bit"]
    checkpoints = cut / "checkpoints"
    shutil.rmtree(checkpoints / "00000015")
    shutil.copytree(checkpoints / "00000010", checkpoints / "00000015")
    found = script.difference(whole, cut)
    assert found["different_tensors"] > 10 and not found["equal_to_the_bit"]
    assert found["first_difference"].startswith("00000015/")
