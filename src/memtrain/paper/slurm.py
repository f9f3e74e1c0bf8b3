"""The Slurm launcher: each run of a sweep is a job, submitted by the package submitit."""

import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memtrain.errors import MemtrainError, describe_error
from memtrain.paper.job import Event, Failed, Work, attempt
from memtrain.paper.workers import POLL_SECONDS, RETRIES

JOBS = 16
"""Jobs queued or running at once, unless the user chooses."""
REQUEUES = 100
"""How often a job may be requeued at its time limit."""
MINUTES = 60
"""Time limit of a job, unless the user chooses: --slurm time 240."""
LOGS = "slurm"
"""Folder of the jobs' scripts, output and results, within the sweep's."""


def run_on_slurm(
    queue: deque[Work],
    folder: Path,
    jobs: int | None,
    options: Mapping[str, str],
    executor: Any = None,
) -> Iterator[Event]:
    """Execute the queue as jobs of a Slurm cluster, and yield their events.

    A job at its time limit is requeued and its run resumes. When this ends early, its jobs are
    cancelled.

    Args:
        queue: the work.
        folder: the sweep's folder, on a disk that all machines share.
        jobs: submitted at once.
        options: of the jobs, as of sbatch.
        executor: submitit's, in place of Slurm's own.
    """
    if executor is None:
        executor = _slurm_executor(folder, options)
    most, deaths = jobs or JOBS, Counter[str]()
    pending: dict[str, tuple[Work, Any]] = {}
    try:
        while queue or pending:
            while queue and len(pending) < most:
                work = queue.popleft()
                submitted = executor.submit(_SlurmTask(), work, str(folder.resolve()))
                pending[work.key] = (work, submitted)
            ended = [(work, job) for work, job in pending.values() if job.done()]
            for work, job in ended:
                del pending[work.key]
                try:
                    yield job.result()
                except Exception as error:  # the job died, or was cancelled
                    deaths[work.key] += 1
                    if deaths[work.key] <= RETRIES:
                        queue.appendleft(work)
                    else:
                        reason = describe_error(error)
                        yield Failed(work.key, f"job {job.job_id} ended twice ({reason})")
            if not ended:
                time.sleep(POLL_SECONDS)
    finally:
        for _, job in pending.values():
            job.cancel()


class _SlurmTask:
    """What a job does. submitit calls `checkpoint` when Slurm ends it, and requeues the result."""

    def __call__(self, work: Work, folder: str) -> Event:
        return attempt(work, Path(folder), lambda progress: None)

    def checkpoint(self, work: Work, folder: str) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, work, folder)


def _slurm_executor(folder: Path, options: Mapping[str, str]) -> Any:
    """submitit's executor with these options.

    Raises:
        MemtrainError: submitit or Slurm is missing, or it does not know an option.
    """
    try:
        from submitit import SlurmExecutor
    except ImportError:
        raise MemtrainError(
            'launcher=slurm: needs submitit: pip install "memtrain[slurm]"'
        ) from None
    if shutil.which("sbatch") is None:
        raise MemtrainError(
            "launcher=slurm: there is no sbatch here; run it where jobs are submitted, or take "
            "--launcher local"
        )
    executor = SlurmExecutor(folder / LOGS, max_num_timeout=REQUEUES)
    given = {name.replace("-", "_"): _number(value) for name, value in options.items()}
    try:
        executor.update_parameters(**{"job_name": "memtrain", "time": MINUTES, **given})
    except (ValueError, TypeError) as error:
        known = ", ".join(sorted(executor._valid_parameters()))
        first = str(error).strip().splitlines()[0]
        raise MemtrainError(f"--slurm: {first}; submitit knows {known}") from None
    return executor


def _number(value: str) -> int | str:
    return int(value) if value.isdecimal() else value
