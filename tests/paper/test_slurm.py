"""The Slurm launcher, with submitit's executor for this machine and with stand-ins for Slurm."""

import os
import sys
from collections import deque
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest
import submitit

from memtrain.errors import MemtrainError
from memtrain.paper import slurm
from memtrain.paper.job import Done, Failed, collect
from memtrain.paper.slurm import run_on_slurm
from memtrain.paper.sweep import sweep

sys.path.insert(0, str(Path(__file__).parent))  # the jobs import `sweep_fixture` too

from sweep_fixture import jobs_of, stored  # noqa: E402


@pytest.fixture(autouse=True)
def paths(monkeypatch) -> None:
    """What jobs need to import the tests' figures."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent), *sys.path]))
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.1)


def test_the_runs_of_a_sweep_are_jobs(tmp_path: Path):
    jobs = jobs_of("sweep_fixture:Few", tmp_path)[:2]
    executor = submitit.LocalExecutor(tmp_path / "logs")
    executor.update_parameters(timeout_min=5)
    launch = partial(run_on_slurm, folder=tmp_path, jobs=2, options={}, executor=executor)
    assert sweep(tmp_path, jobs, launch).failed == {}
    assert len(stored(tmp_path, jobs)) == 2


class FakeJob:
    """A job that ends with a result or an error."""

    job_id = "7"

    def __init__(self, ending: object) -> None:
        self.ending, self.cancelled = ending, False

    def done(self) -> bool:
        return self.ending is not None

    def result(self) -> object:
        if isinstance(self.ending, Exception):
            raise self.ending
        return self.ending

    def cancel(self) -> None:
        self.cancelled = True


class FakeExecutor:
    """Gives each submitted job the next ending."""

    def __init__(self, *endings: object) -> None:
        self.endings, self.jobs = list(endings), []

    def submit(self, task, work, folder: str) -> FakeJob:
        self.jobs.append(FakeJob(self.endings.pop(0)))
        return self.jobs[-1]


def events(tmp_path: Path, executor: FakeExecutor, count: int = 1) -> list:
    works = deque(collect(jobs_of("sweep_fixture:Few", tmp_path)[:count]))
    return list(run_on_slurm(works, tmp_path, 1, {}, executor))


def test_a_job_that_dies_is_submitted_again_once(tmp_path: Path):
    died = RuntimeError("node failure")
    done = Done("key", [])
    executor = FakeExecutor(died, done)
    assert events(tmp_path, executor) == [done] and len(executor.jobs) == 2
    (failed,) = events(tmp_path, FakeExecutor(died, died))
    assert isinstance(failed, Failed)
    assert failed.message == "job 7 ended twice (RuntimeError: node failure)"


def test_jobs_are_cancelled_when_the_sweep_ends_early(tmp_path: Path):
    executor = FakeExecutor(Done("key", []), None)
    works = deque(collect(jobs_of("sweep_fixture:Few", tmp_path)[:2]))
    running = run_on_slurm(works, tmp_path, 2, {}, executor)
    next(running)
    assert isinstance(running, Generator)
    running.close()
    assert [job.cancelled for job in executor.jobs] == [False, True]


STAND_INS = {
    "sbatch": """\
grep '^#SBATCH' "$1" > {log}
export SLURM_JOB_ID=17 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_NODEID=0 SLURM_PROCID=0
export SLURM_LOCALID=0 SLURM_JOB_NODELIST=here
sh "$1" > {log}.out 2>&1 &
echo "Submitted batch job 17"
""",
    "srun": 'while [ "$1" != "--error" ]; do shift; done; shift 2; exec "$@"\n',
    "sacct": 'echo "JobID|State|NodeList"; echo "17|RUNNING|here"\n',
    "scancel": "exit 0\n",
    "scontrol": "echo here\n",
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch) -> Path:
    """Commands with Slurm's names; the options of the last job are in the file."""
    home, log = tmp_path / "bin", tmp_path / "sbatch.log"
    home.mkdir()
    for name, script in STAND_INS.items():
        (home / name).write_text("#!/bin/sh\n" + script.replace("{log}", str(log)))
        (home / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    return log


def test_a_job_is_submitted_with_the_options_of_sbatch(cluster: Path, tmp_path: Path):
    works = deque(collect(jobs_of("sweep_fixture:Few", tmp_path)[:1]))
    options = {"partition": "long", "gpus-per-node": "1", "time": "30"}
    (done,) = run_on_slurm(works, tmp_path, None, options)
    assert isinstance(done, Done), (Path(f"{cluster}.out").read_text(), done)
    lines = cluster.read_text().splitlines()
    for line in ("partition=long", "gpus-per-node=1", "time=30", "job-name=memtrain"):
        assert f"#SBATCH --{line}" in lines


def test_an_unknown_option_is_refused(cluster: Path, tmp_path: Path):
    with pytest.raises(MemtrainError, match=r"--slurm: .*partitoin.*submitit knows account"):
        list(run_on_slurm(deque(), tmp_path, 1, {"partitoin": "x"}))


def test_without_slurm_the_reason_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MemtrainError, match="there is no sbatch here"):
        list(run_on_slurm(deque(), tmp_path, 1, {}))
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MemtrainError, match=r'pip install "memtrain\[slurm\]"'):
        list(run_on_slurm(deque(), tmp_path, 1, {}))
