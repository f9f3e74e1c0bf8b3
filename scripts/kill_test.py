"""Kill a small run repeatedly at random moments, and check that nothing is lost.

    python scripts/kill_test.py --kills 200 --folder /tmp/kills

Trains a tiny model through SMT and DMT once without interruption. Then trains it again with
`kill -9` at random moments: about half during training, four in ten while a checkpoint is being
written, one in ten during start-up or resume. Each kill is followed by `memtrain train --resume`,
in a new process, until the run ends; then the next run begins. Every finished run must have the
weights of the first one, bit-exact, and the same lines of metrics except for seconds.
"""

import argparse
import contextlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from memtrain.config import (
    CellConfig,
    DMTConfig,
    EngineConfig,
    LogConfig,
    Retrieval,
    RunConfig,
    SMTConfig,
    TeacherConfig,
)
from memtrain.config.serialize import to_json
from memtrain.runs.checkpoint import latest_checkpoint
from memtrain.runs.progress import MetricsFile

TEACHER = TeacherConfig(
    encoder="causal",
    context_length=8,
    encoder_layers=1,
    decoder_layers=1,
    width=16,
    heads=2,
    head_dim=8,
)
CELL = CellConfig(memory_tokens=2, memory_dim=8, layers=1, width=16, heads=2, head_dim=8)
PATIENCE = 60.0
"""Seconds after which a process is killed, whatever it does."""


def tiny(steps: int) -> RunConfig:
    """Both stages; a checkpoint every few steps, so that many kills hit one."""
    return RunConfig(
        name="killed",
        data=Retrieval(sequence_length=8, vocab_size=5),
        teacher=TEACHER,
        cell=CELL,
        smt=SMTConfig(steps=steps, batch_size=4, timesteps=0, future_length=8),
        dmt=DMTConfig(steps=steps, batch_size=4),
        engine=EngineConfig(device="cpu", threads=1),
        log=LogConfig(every=1, evaluate_every=10, evaluate_sequences=8, checkpoint_every=4),
    )


def start(config: Path, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "memtrain", "train", str(config)]
    return subprocess.Popen(
        [*command, "--folder", str(folder), "--resume"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def half_written(folder: Path) -> set[tuple[str, int]]:
    """Remains of checkpoints that were being written or removed."""
    found = set()
    for path in (folder / "checkpoints").glob(".*"):
        with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def saved_lines(folder: Path) -> int:
    """Lines up to the newest checkpoint, from which a run resumes."""
    checkpoint, _ = latest_checkpoint(folder / "checkpoints")
    return checkpoint.progress.global_step if checkpoint is not None else 0


def wait(process: subprocess.Popen, happened: Callable[[], bool]) -> None:
    """Wait until something has happened, or the process has ended."""
    began = time.monotonic()
    while not happened() and process.poll() is None and time.monotonic() - began < PATIENCE:
        time.sleep(0.0005)


def kill_once(process: subprocess.Popen, folder: Path, rng: random.Random) -> bool:
    """Kill the process at a random moment; return whether it was still running."""
    moment = rng.random()
    if moment < 0.1:
        time.sleep(rng.uniform(0, 3))  # perhaps while it starts, or reads its checkpoint
    else:
        target = saved_lines(folder) + rng.randrange(1, 25)
        wait(process, lambda: lines(folder) >= target)
        if moment < 0.5:
            before = half_written(folder)
            wait(process, lambda: bool(half_written(folder) - before))
        time.sleep(rng.uniform(0, 0.01))
    alive = process.poll() is None
    process.kill()
    process.wait()
    return alive


def result(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict]]:
    checkpoint, problems = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None and not problems, problems
    lines = MetricsFile(folder / "metrics.jsonl").read()
    return dict(checkpoint.weights), [
        {key: value for key, value in line.items() if key != "total_seconds"} for line in lines
    ]


def same(one: tuple, other: tuple) -> str:
    """Describe how two results differ; empty if they do not."""
    if one[0].keys() != other[0].keys():
        return "weights have other names"
    for name, value in one[0].items():
        if not torch.equal(value, other[0][name]):
            return f"weight {name} differs"
    if len(one[1]) != len(other[1]):
        return f"{len(other[1])} lines of metrics, not {len(one[1])}"
    for number, (left, right) in enumerate(zip(one[1], other[1], strict=True), start=1):
        if left != right:
            return f"line {number} of the metrics differs"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=150, help="steps per stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kill-test"))
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    config = options.folder / "tiny.json"
    config.write_text(to_json(tiny(options.steps)))
    rng = random.Random(options.seed)

    whole = options.folder / "whole"
    process = start(config, whole)
    if process.communicate()[1] and process.returncode:
        print("the uninterrupted run failed")
        return 1
    expected = result(whole)

    kills = in_checkpoint = runs = 0
    stages = {"before the first line": 0, "smt": 0, "dmt": 0}
    while kills < options.kills:
        runs += 1
        folder = options.folder / f"run-{runs}"
        while True:
            before = half_written(folder)
            process = start(config, folder)
            if kills < options.kills and kill_once(process, folder, rng):
                kills += 1
                in_checkpoint += bool(half_written(folder) - before)
                done = MetricsFile(folder / "metrics.jsonl").read()
                stages[done[-1]["stage"] if done else "before the first line"] += 1
                continue
            errors = process.communicate()[1]
            if process.returncode not in (0, -9):
                print(f"run {runs} did not resume after kill {kills}: {errors.splitlines()[-1:]}")
                return 1
            if process.returncode == 0:
                break
        difference = same(expected, result(folder))
        if difference:
            print(f"run {runs}: {difference}; see {folder} and {whole}")
            return 1
        shutil.rmtree(folder)
        print(
            f"{kills} kills, {in_checkpoint} inside a checkpoint, {runs} runs the same", flush=True
        )
    print("kills per stage:", stages)
    print(
        f"{kills} of {kills} kills resumed, {in_checkpoint} of them while a checkpoint was written "
        f"or removed; {runs} runs ended with bit-exact weights and complete metrics"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
