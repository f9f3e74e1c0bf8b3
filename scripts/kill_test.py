"""Kill a small run at random moments, over and over, and see that nothing is lost.

    python scripts/kill_test.py --kills 200 --folder /tmp/kills

Trains a tiny model through SMT and DMT once without trouble. Then trains it again with `kill -9`
at random moments: most of them while it trains or writes a checkpoint, some while it starts or
resumes. Each kill is followed by `memtrain train --resume`, in a new process, until the run ends;
then the next run begins. Every finished run must have the same weights as the first one to the
bit, and the same lines of metrics, but for seconds.
"""

import argparse
import random
import shutil
import subprocess
import sys
import time
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
from memtrain.config_json import to_json
from memtrain.train.checkpoint import latest_checkpoint
from memtrain.train.metrics import MetricsFile

SIZES = {"width": 16, "heads": 2, "head_dim": 8}
TEACHER = TeacherConfig(
    encoder="causal", context_length=8, encoder_layers=1, decoder_layers=1, **SIZES
)
START_SECONDS = 60.0
"""A process that has written nothing by then is killed all the same."""


def tiny(steps: int) -> RunConfig:
    """Both stages; a checkpoint every few steps, so that many kills hit one."""
    return RunConfig(
        name="killed",
        data=Retrieval(sequence_length=8, vocab_size=5),
        teacher=TEACHER,
        cell=CellConfig(memory_tokens=2, memory_dim=8, layers=1, **SIZES),
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


def changed(folder: Path) -> float:
    """When the run last wrote a line; 0 if it never did."""
    path = folder / "metrics.jsonl"
    return path.stat().st_mtime if path.exists() else 0.0


def half_written(folder: Path) -> set[tuple[str, int]]:
    """What a kill left of a checkpoint that was being written or removed."""
    return {(path.name, path.stat().st_mtime_ns) for path in (folder / "checkpoints").glob(".*")}


def kill_once(process: subprocess.Popen, folder: Path, chance: random.Random) -> bool:
    """Kill at a random moment; returns whether the process lived until then."""
    if chance.random() < 0.1:
        time.sleep(chance.uniform(0, 3))  # perhaps while it starts, or reads its checkpoint
    else:
        before, began = changed(folder), time.monotonic()
        while changed(folder) == before and process.poll() is None:
            if time.monotonic() - began > START_SECONDS:
                break
            time.sleep(0.005)
        time.sleep(chance.expovariate(2.0))
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
    """How two results differ, in words; nothing if they do not."""
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
    parser.add_argument("--steps", type=int, default=150, help="of each of the two stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kill-test"))
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    config = options.folder / "tiny.json"
    config.write_text(to_json(tiny(options.steps)))
    chance = random.Random(options.seed)

    whole = options.folder / "whole"
    process = start(config, whole)
    if process.communicate()[1] and process.returncode:
        print("the uninterrupted run failed")
        return 1
    expected = result(whole)

    kills = in_checkpoint = runs = 0
    while kills < options.kills:
        runs += 1
        folder = options.folder / f"run-{runs}"
        while True:
            before = half_written(folder)
            process = start(config, folder)
            if kills < options.kills and kill_once(process, folder, chance):
                kills += 1
                in_checkpoint += bool(half_written(folder) - before)
                continue
            said = process.communicate()[1]
            if process.returncode not in (0, -9):
                print(f"run {runs} did not resume after kill {kills}: {said.splitlines()[-1:]}")
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
    print(
        f"{kills} of {kills} kills resumed, {in_checkpoint} of them while a checkpoint was written "
        f"or removed; {runs} runs ended with the same weights to the bit and whole metrics"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
