"""Launchers: execute a sweep's queue in local processes or on a Ray cluster.

A launcher takes work from a queue when it can start it, and yields events; the queue may grow or be
emptied between two events. It writes no results and keeps no state: a killed run resumes from its
own checkpoints.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from memtrain.errors import MemtrainError
from memtrain.paper.job import Event, Failed, Progress, Work, attempt
from memtrain.runs.processes import cores, die_with_parent, hear_interrupts, start_process

RETRIES = 1
"""How often a run is restarted after its process died."""
POLL_SECONDS = 1.0
GRACE = 30.0
"""Seconds that all runs together have to save their state when the sweep is stopped."""
MAX_RUNS_PER_GPU = 12
"""Small runs on one GPU; with more, their kernels wait for each other."""
NO_GPU = 3
"""Exit status of a worker process that cannot use the GPU."""
RUN_BYTES = 10 * 2**30
"""Most GPU memory that a small run needs: its graphs, an evaluation, CUDA itself."""


def default_processes(device: str, scale: str) -> int:
    """One per core; on a GPU as many small runs as fit, or one run of the scale paper."""
    import torch

    from memtrain.accel.engine import pick_device

    place = pick_device(device)
    if place.type != "cuda":
        return cores()
    if scale == "paper":
        return 1
    room = torch.cuda.get_device_properties(place).total_memory // RUN_BYTES
    return max(1, min(cores(), MAX_RUNS_PER_GPU, room))


# ---------------------------------------------------------------------------- local processes


class _Worker:
    """A process that imports torch once and then executes one run after another."""

    def __init__(self, folder: Path, threads: int, on_gpu: bool) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would share CUDA and threads
        self.connection, there = spawn.Pipe()
        arguments = (there, folder, threads, on_gpu)
        self.process = spawn.Process(target=_serve, args=arguments, daemon=True)
        start_process(self.process)
        there.close()
        self.work: Work | None = None

    def give(self, work: Work) -> None:
        self.work = work
        with suppress(OSError):  # it died while idle; the next `recv` raises
            self.connection.send(work)

    def close(self) -> None:
        """Let the process finish saving, for 20 seconds at most."""
        self.connection.close()
        self.process.join(timeout=20)
        self.process.kill()


def run_locally(
    queue: deque[Work],
    folder: Path,
    processes: int,
    over: Callable[[], bool] = lambda: False,
    fits: Callable[[Work, Sequence[Work]], bool] = lambda work, others: True,
    on_gpu: bool = False,
) -> Iterator[Event]:
    """Execute the queue with up to `processes` runs at a time, and yield their events.

    The next run is the first in the queue that `fits` with those in progress; a run always fits
    alone. A run that is out of memory nevertheless is queued again, and the number of processes is
    reduced by one. When `over` returns True, runs save their state and end without an event.

    With `on_gpu` a process that cannot use the GPU ends instead of training on the CPU.
    """
    # Respect OMP_NUM_THREADS; otherwise split the cores, because oversubscribed threads are slow.
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // processes))
    deaths: Counter[str] = Counter()
    workers: list[_Worker] = []
    try:
        while not over() and (queue or any(worker.work for worker in workers)):
            while len(others := [worker.work for worker in workers if worker.work]) < processes:
                work = next((one for one in queue if not others or fits(one, others)), None)
                if work is None:
                    break
                idle = next((worker for worker in workers if worker.work is None), None)
                if idle is None:
                    workers.append(idle := _Worker(folder, threads, on_gpu))
                queue.remove(work)
                idle.give(work)
            busy = [worker for worker in workers if worker.work]
            wait([worker.connection for worker in busy], timeout=POLL_SECONDS)
            for worker in busy:
                if not worker.connection.poll():
                    continue
                assert worker.work is not None
                try:
                    event = worker.connection.recv()
                except (EOFError, OSError):  # it died, maybe before it read its work
                    workers.remove(worker)
                    worker.close()
                    deaths[worker.work.key] += 1
                    if deaths[worker.work.key] <= RETRIES:
                        queue.appendleft(worker.work)
                    else:
                        code = worker.process.exitcode
                        yield Failed(worker.work.key, f"its process died twice (exit code {code})")
                    continue
                if isinstance(event, Failed) and event.out_of_memory and len(workers) > 1:
                    queue.append(worker.work)
                    workers.remove(worker)
                    worker.close()
                    processes = len(workers)
                    continue
                if not isinstance(event, Progress):
                    worker.work = None
                yield event
        _terminate([worker for worker in workers if worker.work])
    finally:
        for worker in workers:
            worker.close()


def _terminate(workers: Sequence[_Worker]) -> None:
    """Stop runs and wait while they save their state; their pipes must stay open until then."""
    for worker in workers:
        worker.process.terminate()
    ends = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, ends - time.monotonic()))


def _serve(connection: Connection, folder: Path, threads: int, on_gpu: bool) -> None:
    """The main loop of a worker process."""
    die_with_parent(GRACE)
    hear_interrupts(signal.SIG_DFL)  # nothing to save yet: just exit
    if on_gpu and not _gpu_ready():
        os._exit(NO_GPU)
    import torch

    from memtrain.training.run import Interrupted

    def notify(progress: Progress) -> None:
        try:
            connection.send(progress)
        except OSError:  # the parent is gone: save and exit
            signal.raise_signal(signal.SIGTERM)

    torch.set_num_threads(threads)
    try:
        hear_interrupts(signal.default_int_handler)
        while True:
            connection.send(attempt(connection.recv(), folder, notify))
    except (EOFError, OSError, KeyboardInterrupt, Interrupted):
        os._exit(0)  # the parent is gone; the run's state is saved


def _gpu_ready() -> bool:
    """Whether the GPU can be used; waits while MPS restarts, as it does after a fault."""
    ends = time.monotonic() + MPS_TIMEOUT
    while not (ready := _succeeds([sys.executable, "-c", GPU_PROBE], {})):
        if time.monotonic() > ends:
            break
        time.sleep(1)
    return ready


# ----------------------------------------------------------------------------------------- Ray


def run_on_ray(queue: deque[Work], folder: Path, processes: int, address: str) -> Iterator[Event]:
    """Execute the queue on a Ray cluster.

    Args:
        queue: the work.
        folder: the sweep's folder, on a disk that all machines share.
        processes: runs per GPU, where there are GPUs.
        address: of the cluster; empty starts one on this machine.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports]

        # A local folder named ray can be imported, but has no such function.
        from ray import init  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MemtrainError("launcher=ray: Ray is missing; pip install memtrain[ray]") from None
    try:
        init(address=address or None, log_to_driver=False, ignore_reinit_error=True)
    except ConnectionError as error:
        raise MemtrainError(f"address={address}: {str(error).splitlines()[0]}") from None
    resources = ray.cluster_resources()
    gpus = resources.get("GPU", 0)
    share = 1 / processes if gpus else 0
    slots = max(1, int(gpus * processes if gpus else resources.get("CPU", 1)))
    # Ray restarts a task whose worker died; the run then resumes from its checkpoint.
    task = ray.remote(num_cpus=1, num_gpus=share, max_retries=3)(_perform_on_ray)
    pending: dict[Any, str] = {}
    try:
        while queue or pending:
            while queue and len(pending) < slots:
                work = queue.popleft()
                pending[task.remote(work, str(folder.resolve()))] = work.key
            ready, _ = ray.wait(list(pending), num_returns=1)
            for reference in ready:
                key = pending.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield Failed(key, str(error).splitlines()[0])
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
        ray.shutdown()


def _perform_on_ray(work: Work, folder: str) -> Event:
    import torch

    torch.set_num_threads(1)
    return attempt(work, Path(folder), lambda progress: None)


# ---------------------------------------------------------------- NVIDIA's Multi-Process Service

MPS_PIPES, MPS_LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
MPS_TIMEOUT = 30.0
"""Seconds to start, to probe and to stop the service, each."""
GPU_PROBE = """
import ctypes, sys
cuda, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
context, memory = ctypes.c_void_p(), ctypes.c_void_p()
sys.exit(
    cuda.cuInit(0)
    or cuda.cuDeviceGet(ctypes.byref(device), 0)
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    or cuda.cuCtxSetCurrent(context)
    or cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1024))
)
"""
"""Uses the GPU as a run would; exit status 0 on success."""


@contextmanager
def shared_gpu() -> Iterator[bool]:
    """Start MPS, so that processes started in this context run kernels concurrently on one GPU.

    Without it processes take turns, and small kernels leave most of a large GPU idle. Yields
    whether the service works. A service that the user has started is used and left running.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or MPS_PIPES in os.environ:
        yield MPS_PIPES in os.environ
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as place:
        own = {MPS_PIPES: place, MPS_LOGS: str(Path(place) / "logs")}
        works = _succeeds([control, "-d"], own) and _succeeds(
            [sys.executable, "-c", GPU_PROBE], own
        )
        try:
            if works:
                os.environ.update(own)
            yield works
        finally:
            for name in own:
                os.environ.pop(name, None)
            _succeeds([control], own, "quit -t 5\n")


def _succeeds(command: list[str], environment: dict[str, str], stdin: str = "") -> bool:
    """Run a command; whether it exits with status 0 in time."""
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            input=stdin,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MPS_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
