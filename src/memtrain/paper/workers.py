"""Where a sweep's runs happen: in processes of this machine, or on a Ray cluster.

A launcher takes work out of a queue when it can begin it, and yields events as they come; between
two of them the queue may grow or be emptied. It writes no results and keeps no state: a run's own
checkpoints are what a killed run goes on from.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from memtrain.errors import MemtrainError
from memtrain.paper.job import Event, Failed, Progress, Work, attempt
from memtrain.training.processes import cores, die_with_parent, hear_interrupts, start_process

RETRIES = 1
"""How often a run whose process died is given to another."""
LOOK = 1.0
"""Seconds after which a launcher asks again whether it is over."""
GRACE = 30.0
"""Seconds that all runs together have to save themselves when it is."""


ON_A_GPU = 12
"""Small runs that share a GPU; with more, kernels wait for one another."""
RUN_BYTES = 10 * 2**30
"""What such a run takes of a GPU's memory at most: its graphs, an evaluation, CUDA itself."""


def default_processes(device: str, scale: str) -> int:
    """As many as there are cores; on a GPU, small runs while there is room, large ones in turn."""
    import torch

    from memtrain.accel.engine import pick_device

    place = pick_device(device)
    if place.type != "cuda":
        return cores()
    if scale == "paper":
        return 1
    room = torch.cuda.get_device_properties(place).total_memory // RUN_BYTES
    return max(1, min(cores(), ON_A_GPU, room))


# ---------------------------------------------------------------------------- local processes


class _Worker:
    """A process that imports torch once and then does one run after another."""

    def __init__(self, folder: Path, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would share CUDA and threads
        self.connection, there = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(there, folder, threads), daemon=True)
        start_process(self.process)
        there.close()
        self.work: Work | None = None

    def give(self, work: Work) -> None:
        self.work = work
        with suppress(OSError):  # it died while it was idle: the next look at it will tell
            self.connection.send(work)

    def close(self) -> None:
        """Let it finish what it is saving, but not for long."""
        self.connection.close()
        self.process.join(timeout=20)
        self.process.kill()


def run_locally(
    queue: deque[Work],
    folder: Path,
    processes: int,
    over: Callable[[], bool] = lambda: False,
    fits: Callable[[Work, Sequence[Work]], bool] = lambda work, others: True,
) -> Iterator[Event]:
    """Events of all work, `processes` runs at a time.

    Of what waits, the first begins that `fits` beside the runs at work; alone every run does. One
    that finds no memory nevertheless is put back, and one process fewer goes on. When it is `over`,
    runs at work save themselves and end without an event.
    """
    # Who sets the variable knows better: threads that wait for a busy core cost more than they do.
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
                    workers.append(idle := _Worker(folder, threads))
                queue.remove(work)
                idle.give(work)
            busy = [worker for worker in workers if worker.work]
            wait([worker.connection for worker in busy], timeout=LOOK)
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
                if isinstance(event, Failed) and event.lacked_memory and len(workers) > 1:
                    queue.append(worker.work)
                    workers.remove(worker)
                    worker.close()
                    processes = len(workers)
                    continue
                if not isinstance(event, Progress):
                    worker.work = None
                yield event
        _save(worker for worker in workers if worker.work)
    finally:
        for worker in workers:
            worker.close()


def _save(workers: Iterable[_Worker]) -> None:
    """Ask runs to stop, and wait: one that could not tell its progress any more would not save."""
    asked = list(workers)
    for worker in asked:
        worker.process.terminate()
    ends = time.monotonic() + GRACE
    for worker in asked:
        worker.process.join(max(0.0, ends - time.monotonic()))


def _serve(connection: Connection, folder: Path, threads: int) -> None:
    die_with_parent(GRACE)
    hear_interrupts(signal.SIG_DFL)  # there is nothing to save: it just ends
    import torch

    from memtrain.training.run import Interrupted

    def tell(progress: Progress) -> None:
        try:
            connection.send(progress)
        except OSError:  # nobody listens any more: the run saves itself
            signal.raise_signal(signal.SIGTERM)

    torch.set_num_threads(threads)
    try:
        hear_interrupts(signal.default_int_handler)
        while True:
            connection.send(attempt(connection.recv(), folder, tell))
    except (EOFError, OSError, KeyboardInterrupt, Interrupted):
        os._exit(0)  # nobody listens any more; what a run had is saved


# ----------------------------------------------------------------------------------------- Ray


def run_on_ray(queue: deque[Work], folder: Path, processes: int, address: str) -> Iterator[Event]:
    """The same on a Ray cluster, whose machines must all see the folder.

    Args:
        queue: what to do.
        folder: the sweep's folder, on a disk that all machines share.
        processes: runs that share one GPU, where there are GPUs.
        address: of the cluster; empty starts one on this machine.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports]

        # A folder of that name is no Ray, and has no such function.
        from ray import init  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MemtrainError("launcher=ray: Ray is missing; pip install ray") from None
    try:
        init(address=address or None, log_to_driver=False, ignore_reinit_error=True)
    except ConnectionError as error:
        raise MemtrainError(f"address={address}: {str(error).splitlines()[0]}") from None
    resources = ray.cluster_resources()
    gpus = resources.get("GPU", 0)
    share = 1 / processes if gpus else 0
    places = max(1, int(gpus * processes if gpus else resources.get("CPU", 1)))
    # Ray starts a task again when its worker dies; the run then goes on from its checkpoint.
    task = ray.remote(num_cpus=1, num_gpus=share, max_retries=3)(_perform_on_ray)
    pending: dict[Any, str] = {}
    try:
        while queue or pending:
            while queue and len(pending) < places:
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


PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SECONDS = 30.0
"""To start it, to try it, to end it, each."""
PROBE = """
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
"""A process that uses the GPU as a run would; exit status 0 if it could."""


@contextmanager
def shared_gpu() -> Iterator[bool]:
    """Processes that are started inside share the GPU through a service of their own.

    Yields whether they do. One that the user has started is left alone.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or PIPES in os.environ:
        yield PIPES in os.environ
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as place:
        own = {PIPES: place, LOGS: str(Path(place) / "logs")}
        served = _call([control, "-d"], own) and _call([sys.executable, "-c", PROBE], own)
        try:
            if served:
                os.environ.update(own)
            yield served
        finally:
            for name in own:
                os.environ.pop(name, None)
            _call([control], own, "quit -t 5\n")


def _call(command: list[str], environment: dict[str, str], said: str = "") -> bool:
    """Whether a command ended well, in time."""
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            input=said,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
