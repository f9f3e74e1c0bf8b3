"""The job files of examples/clusters, with stand-ins for the programs of a cluster."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import TINY
from memtrain.config.serialize import to_json
from memtrain.training.run import Run

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
WAIT = 120.0
"""Seconds that a test waits for what must happen; longer only if it failed."""
SHORT = replace(
    TINY,
    smt=replace(TINY.smt, steps=300),
    dmt=replace(TINY.dmt, steps=0),
    bptt=replace(TINY.bptt, steps=0),
    log=replace(TINY.log, every=10, evaluate_every=0, checkpoint_every=100),
)
STAND_INS = {
    "srun": 'echo $$ > srun.pid\nexec "$@"\n',
    "scontrol": 'echo "$@" >> scontrol.log\n',
    "memtrain": f'exec {sys.executable} -m memtrain "$@"\n',
    "aws": """\
shift 2
while [ "${1#--}" != "$1" ]; do shift; done
if [ -d "$1" ]; then mkdir -p "$2" && cp -r "$1/." "$2/"; fi
""",
}


@pytest.fixture
def node(tmp_path: Path, monkeypatch) -> Path:
    """A folder with the stand-ins in its path, and the environment of a job."""
    home = tmp_path / "bin"
    home.mkdir()
    for name, script in STAND_INS.items():
        (home / name).write_text("#!/bin/sh\n" + script)
        (home / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.json").write_text(to_json(SHORT))
    return tmp_path


def job(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(CLUSTERS / "train.sbatch"), "short.json"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def signal_when_training(running: subprocess.Popen[str], folder: Path) -> None:
    """Send the run SIGUSR1 after its first steps, as Slurm does before the time limit."""
    ends = time.monotonic() + WAIT
    while not (folder / "metrics.jsonl").exists():
        assert running.poll() is None and time.monotonic() < ends
        time.sleep(0.02)
    os.kill(int(Path("srun.pid").read_text()), signal.SIGUSR1)


def test_a_job_at_its_time_limit_is_requeued_and_continues(node: Path):
    folder = node / "runs" / "slurm-17"
    with job() as first:
        signal_when_training(first, folder)
        out, _ = first.communicate(timeout=WAIT)
    assert first.returncode == 75, out
    assert "stopped after step" in out and "is saved and not finished" in out
    assert (node / "scontrol.log").read_text() == "requeue 17\n"
    stopped = Run.open(folder).progress.step
    assert 0 < stopped < 300
    with job() as second:
        out, _ = second.communicate(timeout=WAIT)
    assert second.returncode == 0, out
    assert (node / "scontrol.log").read_text() == "requeue 17\n"
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps)) and steps[-1] == 300


def test_a_job_on_another_node_fetches_its_run(node: Path):
    folder, remote = node / "runs" / "slurm-17", node / "bucket"
    with job(REMOTE=str(remote)) as first:
        signal_when_training(first, folder)
        out, _ = first.communicate(timeout=WAIT)
    assert first.returncode == 75, out
    stopped = Run.open(folder).progress.step
    assert Run.open(remote / "slurm-17").progress.step == stopped > 0
    shutil.rmtree(folder)
    with job(REMOTE=str(remote)) as second:
        out, _ = second.communicate(timeout=WAIT)
    assert second.returncode == 0, out
    assert Run.open(folder).finished and Run.open(remote / "slurm-17").finished


def test_a_failed_run_is_not_requeued(node: Path):
    (node / "short.json").write_text("{")
    with job() as failed:
        out, _ = failed.communicate(timeout=WAIT)
    assert failed.returncode == 2 and "memtrain: short.json" in out
    assert not (node / "scontrol.log").exists()
