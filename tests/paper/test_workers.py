"""Launchers: runs are retried when their process dies or is out of memory, and share a GPU."""

import multiprocessing
import os
import sys
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memtrain.errors import MemtrainError
from memtrain.paper import workers
from memtrain.paper.job import collect
from memtrain.paper.sweep import sweep
from memtrain.paper.workers import default_processes, run_locally, run_on_ray

sys.path.insert(0, str(Path(__file__).parent))  # worker processes import `sweep_fixture` too

import sweep_fixture  # noqa: E402
from sweep_fixture import jobs_of, stored  # noqa: E402


def test_a_run_is_restarted_when_its_process_dies(tmp_path: Path):
    jobs = jobs_of("sweep_fixture:Deadly", tmp_path)
    failed = sweep(tmp_path, jobs, partial(run_locally, folder=tmp_path, processes=1)).failed
    assert failed == {}
    assert sorted(result["seed"] for result in stored(tmp_path, jobs)) == [0, 1]


def test_a_process_that_dies_before_it_reads_its_work_is_replaced(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(workers, "_serve", sweep_fixture.die_before_reading)
    jobs = jobs_of("sweep_fixture:Few", tmp_path)
    failed = sweep(tmp_path, jobs, partial(run_locally, folder=tmp_path, processes=1)).failed
    assert failed == {} and (tmp_path / "died").exists()
    assert len(stored(tmp_path, jobs)) == 4


def test_sending_work_to_a_dead_process_raises_only_on_receive(tmp_path: Path):
    worker = workers._Worker(tmp_path, 1, False)
    worker.process.kill()
    worker.process.join()
    (work,) = collect(jobs_of("sweep_fixture:Few", tmp_path)[:1])
    worker.give(work)
    worker.give(work)  # the first one may still find room in the pipe
    with pytest.raises((EOFError, OSError)):
        worker.connection.recv()
    worker.close()


def test_a_run_out_of_memory_among_others_is_retried(tmp_path: Path):
    jobs = jobs_of("sweep_fixture:Greedy", tmp_path)
    failed = sweep(tmp_path, jobs, partial(run_locally, folder=tmp_path, processes=2)).failed
    assert failed == {}
    assert sorted(result["seed"] for result in stored(tmp_path, jobs)) == [0, 1, 2]
    assert not list((tmp_path / "runs").glob("*.error.txt"))


def test_a_run_out_of_memory_alone_fails(tmp_path: Path):
    jobs = jobs_of("sweep_fixture:Greedy", tmp_path)
    failed = sweep(tmp_path, jobs, partial(run_locally, folder=tmp_path, processes=1)).failed
    assert failed["seed=0"].startswith("OutOfMemoryError: CUDA out of memory. (see ")
    assert sorted(result["seed"] for result in stored(tmp_path, jobs)) == [1, 2]


def test_a_missing_ray_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MemtrainError, match=r"pip install memtrain\[ray\]"):
        list(run_on_ray(deque(), tmp_path, 1, ""))


# ------------------------------------------------------------------------------------ one GPU


@pytest.mark.parametrize(
    "gibibytes, scale, expected",
    [(139, "gpu", 12), (24, "gpu", 2), (8, "gpu", 1), (139, "paper", 1)],
)
def test_small_runs_share_a_gpu_as_its_memory_allows(gibibytes, scale, expected, monkeypatch):
    there = SimpleNamespace(total_memory=gibibytes * 2**30)
    monkeypatch.setattr("memtrain.accel.engine.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    monkeypatch.setattr("memtrain.paper.workers.cores", lambda: 16)
    assert default_processes("auto", scale) == expected


def fake_service(folder: Path, monkeypatch, *, probe: int) -> Path:
    """A control command that logs its input, and a GPU on which the probe exits with `probe`."""
    log = folder / "log"
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\necho "$@" "$(cat)" $CUDA_MPS_PIPE_DIRECTORY >> {log}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv(workers.MPS_PIPES, raising=False)
    monkeypatch.setattr(workers, "GPU_PROBE", f"raise SystemExit({probe})")
    return log


@pytest.mark.parametrize("probe", [0, 1])
def test_mps_is_started_probed_used_and_stopped(probe: int, tmp_path: Path, monkeypatch):
    log = fake_service(tmp_path, monkeypatch, probe=probe)
    with workers.shared_gpu() as shared:
        assert shared is (probe == 0)
        assert (workers.MPS_PIPES in os.environ) is shared  # where it does not work, it is not used
        assert log.read_text().startswith("-d ")
    assert workers.MPS_PIPES not in os.environ
    started, ended = (line.split() for line in log.read_text().splitlines())
    assert ended[:3] == ["quit", "-t", "5"] and ended[-1] == started[-1]
    assert not Path(started[-1]).exists()


def test_mps_is_not_started_if_it_is_missing_or_running(tmp_path: Path, monkeypatch):
    log = fake_service(tmp_path, monkeypatch, probe=0)
    monkeypatch.setenv(workers.MPS_PIPES, "/theirs")
    with workers.shared_gpu() as shared:
        assert shared and os.environ[workers.MPS_PIPES] == "/theirs"
    monkeypatch.delenv(workers.MPS_PIPES)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with workers.shared_gpu() as shared:
        assert not shared
    assert not log.exists()


def test_a_process_without_the_gpu_ends_instead_of_training_on_the_cpu(tmp_path, monkeypatch):
    def leave(status: int):
        raise SystemExit(status)

    monkeypatch.setattr(workers, "die_with_parent", lambda seconds: None)
    monkeypatch.setattr(workers, "hear_interrupts", lambda handler: None)
    monkeypatch.setattr(workers, "GPU_PROBE", "raise SystemExit(1)")
    monkeypatch.setattr(workers, "MPS_TIMEOUT", 5.0)
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(workers.time, "monotonic", iter(range(0, 100, 3)).__next__)
    monkeypatch.setattr(workers.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        workers._serve(multiprocessing.Pipe()[0], tmp_path, 1, True)
    assert ended.value.code == workers.NO_GPU


def test_a_process_waits_while_mps_restarts(tmp_path: Path, monkeypatch):
    there = tmp_path / "restarted"
    monkeypatch.setattr(
        workers, "GPU_PROBE", f"import os; exit(not os.path.exists({str(there)!r}))"
    )
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: there.touch())
    assert workers._gpu_ready()
