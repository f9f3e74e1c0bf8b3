"""Check two claims on a GPU: a checkpoint costs less than a step, and resuming is bit-exact.

    python scripts/gpu_trust.py --out trust.json
    python scripts/gpu_trust.py --size tiny --device cpu

Stall: trains SMT on random tokens, compiled, with regular checkpoints, and records the time at
the end of each step on the device. Blocks of steps that begin with a checkpoint alternate with
blocks that do not; the difference of their times is the cost of checkpoints.

Resume: trains SMT, DMT and BPTT for a few steps with `engine.deterministic`, once without a stop,
once stopped in the middle of each stage (SIGTERM) and resumed in a new process. All checkpoints of
the two must be bit-exact (weights, optimizer and RNG state), and the metrics equal except for
seconds. The same without deterministic mode, for information; all runs train concurrently.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from memtrain.config import BPTTConfig, EngineConfig, LogConfig, RunConfig, Stream
from memtrain.config.serialize import read_config, to_json
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.store import Split, StoreMeta
from memtrain.recipes import recipe
from memtrain.recipes.sizes import SIZES
from memtrain.runs.checkpoint import Files, load_checkpoint, numbered
from memtrain.runs.processes import Interrupted
from memtrain.runs.progress import MetricsFile
from memtrain.training import run as run_module
from memtrain.training.console import Reporter
from memtrain.training.loop import Agreement, StageLoop
from memtrain.training.run import Run
from memtrain.training.stages import Training

STAGES = ("smt", "dmt", "bptt")
STEPS, STOP = 10, 5
"""Steps of each stage in the resume part, and where it is stopped: a GPU has captured its graph by
then, and again some steps after."""


def random_stream(folder: Path) -> Stream:
    """Write a stream of random tokens, enough to time and compare steps."""
    rng = np.random.default_rng(0)
    meta = StoreMeta(name="noise", vocab_size=256, source="random", document_length=784)
    splits = {
        name: Split(rng.integers(0, 256, 784 * documents, dtype=np.uint8))
        for name, documents in (("train", 1000), ("test", 20))
    }
    write_store(folder, meta, splits)
    return Stream(path=str(folder.resolve()), evaluate_length=32)


# ---------------------------------------------------------------------------------------- stall


class DiskClock(Files):
    """Record when each checkpoint was completely on disk."""

    def __init__(self) -> None:
        self.whole: list[float] = []

    def sync(self, path: Path) -> None:
        super().sync(path)
        if path.name == "checkpoints":  # the last thing that a save syncs
            self.whole.append(time.perf_counter())


class TimedRun(Run):
    """A run that records when its steps end and how long its checkpoints take."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.files = self.writer.files = DiskClock()
        self.ends: list[torch.cuda.Event | float] = []
        self.begun: list[float] = []
        self.host: list[float] = []
        """Seconds that the host spent on a checkpoint instead of launching steps."""

    def now(self) -> torch.cuda.Event | float:
        if self.engine.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step_seconds(self) -> list[float]:
        """Seconds from the end of each step to the end of the next."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        return [_between(one, other) for one, other in zip(self.ends, self.ends[1:], strict=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedLoop(StageLoop):
    """The stage loop of a timed run."""

    run: TimedRun

    def after_step(self, metrics: Mapping[str, Tensor]) -> None:
        StageLoop.after_step(self, metrics)
        self.run.ends.append(self.run.now())

    def save(self) -> None:
        self.trainer.check()  # wait for the device first
        self.run.begun.append(time.perf_counter())
        StageLoop.save(self)
        self.run.host.append(time.perf_counter() - self.run.begun[-1])


class TimedTraining(Training):
    """Trains a `TimedRun` by loops that note their times."""

    def _stage_loop(self, name: str, stop: Agreement) -> StageLoop:
        loop = super()._stage_loop(name, stop)
        if not isinstance(self.run, TimedRun):
            return loop
        parts = {one.name: getattr(loop, one.name) for one in fields(loop)}
        return TimedLoop(run=self.run, **parts)


run_module.Training = TimedTraining


def _between(one: torch.cuda.Event | float, other: torch.cuda.Event | float) -> float:
    if isinstance(one, torch.cuda.Event) and isinstance(other, torch.cuda.Event):
        return one.elapsed_time(other) / 1000
    assert isinstance(one, float) and isinstance(other, float)
    return other - one


def stall(options: argparse.Namespace, data: Stream) -> dict:
    """Measure the cost of checkpoints: blocks of steps with one against blocks without."""
    block, count = options.block, options.checkpoints
    base = recipe("text", options.size)
    config = RunConfig(
        name="stall",
        data=data,
        teacher=base.teacher,
        cell=base.cell,
        # One more pair of blocks first: it compiles, and takes memory that the next ones reuse.
        smt=replace(base.smt, steps=2 * block * (count + 2)),
        engine=EngineConfig(device=options.device, compile=options.compile),
        log=LogConfig(
            every=10**9, evaluate_every=0, evaluate_sequences=1, checkpoint_every=2 * block
        ),
    )
    run = TimedRun.create(config, options.folder / "stall")
    assert isinstance(run, TimedRun)
    run.train()
    seconds = run.step_seconds()  # seconds[n] is step n + 2, counted from 1
    blocks = [seconds[2 * block * n - 2 :][: 2 * block] for n in range(1, count + 2)]
    first, measured = blocks[0], blocks[1:]
    step = median(s for pair in measured for s in pair[block:])
    with_one, without = (sum(sum(pair[half]) for pair in measured) for half in _halves(block))
    on_disk = [whole - begun for begun, whole in zip(run.begun, run.files.whole, strict=True)][
        1 : count + 1
    ]
    extra = (with_one - without) / count
    worst = max(s for pair in measured for s in pair[:block])
    return {
        "device": run.engine.device.type,
        "steps": len(seconds) + 1,
        "checkpoints": count,
        "step_seconds": step,
        "worst_step_without": max(s for pair in measured for s in pair[block:]),
        "worst_step_with_checkpoint": worst,
        "extra_seconds_a_checkpoint": extra,
        "extra_seconds_of_the_first": sum(first[:block]) - sum(first[block:]),
        "host_seconds_a_checkpoint": median(run.host[1 : count + 1]),
        "seconds_until_on_disk": max(on_disk),
        "on_disk_before_the_block_ends": max(on_disk) < block * step,
        "below_one_step": max(extra, worst - step) < step,
    }


def _halves(block: int) -> tuple[slice, slice]:
    return slice(block), slice(block, 2 * block)


# --------------------------------------------------------------------------------------- resume


class StopAt(Reporter):
    """Send this process SIGTERM when a stage reaches a step, as a scheduler would."""

    def __init__(self, wanted: str) -> None:
        self.wanted, self.name = wanted, ""

    def stage(self, name: str, step: int, steps: int) -> None:
        self.name = name

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if self.name == self.wanted and step == STOP:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until(folder: Path, stage: str) -> None:
    """Start or resume a run of the resume part, and stop in the given stage."""
    if (folder / "config.json").exists():
        run = Run.open(folder)
    else:
        run = Run.create(read_config(folder.with_suffix(".json")), folder)
    with contextlib.suppress(Interrupted):
        run.train(StopAt(stage))


def three_stages(options: argparse.Namespace, data: Stream, deterministic: bool) -> RunConfig:
    """A few steps of each stage, a checkpoint every five; small batches, models of the size."""
    base = recipe("text", options.size)
    length = min(64, base.dmt.rollout_length)
    return RunConfig(
        name="resume",
        data=data,
        teacher=base.teacher,
        cell=base.cell,
        smt=replace(base.smt, steps=STEPS, batch_size=16),
        dmt=replace(base.dmt, steps=STEPS, batch_size=8, rollout_length=length),
        bptt=BPTTConfig(steps=STEPS, batch_size=8, sequence_length=length),
        engine=EngineConfig(
            device=options.device, compile=options.compile_resume, deterministic=deterministic
        ),
        log=LogConfig(
            every=1, evaluate_every=0, evaluate_sequences=2, checkpoint_every=STOP, keep=99
        ),
    )


def start(folder: Path, stage: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--train-until", stage, "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        errors = process.communicate()[1]
        if process.returncode:
            raise SystemExit(
                f"a run failed: {errors.strip().splitlines()[-1:]}; rerun with\n{process.args}"
            )


def resume(options: argparse.Namespace, data: Stream) -> dict:
    """Compare interrupted runs with uninterrupted ones."""
    modes = ["deterministic", "plain"] if options.plain else ["deterministic"]
    whole = [options.folder / f"{mode}-whole" for mode in modes]
    cut = [options.folder / f"{mode}-cut" for mode in modes]
    for folder in (*whole, *cut):
        deterministic = folder.name.startswith("deterministic")
        config = three_stages(options, data, deterministic)
        folder.with_suffix(".json").write_text(to_json(config))
    unstopped = [start(folder, "") for folder in whole]
    for stage in (*STAGES, ""):
        finish([start(folder, stage) for folder in cut])
    finish(unstopped)
    return {mode: difference(*pair) for mode, *pair in zip(modes, whole, cut, strict=True)}


def difference(one: Path, other: Path) -> dict:
    """Count the differing tensors of all checkpoints and lines of metrics."""
    paths = [numbered(folder / "checkpoints") for folder in (one, other)]
    names = [[path.name for path in found] for found in paths]
    if names[0] != names[1] or len(names[0]) != STEPS // STOP * len(STAGES):
        raise SystemExit(f"checkpoints {names[0]} and {names[1]}: not the expected ones")
    tensors, different = 0, []
    for left, right in zip(*paths, strict=True):
        pair = load_checkpoint(left), load_checkpoint(right)
        for kind in ("weights", "optimizer"):
            wanted, found = (getattr(checkpoint, kind) for checkpoint in pair)
            tensors += len(wanted)
            different += [
                f"{left.name}/{name}"
                for name in wanted.keys() | found.keys()
                if name not in wanted
                or name not in found
                or not torch.equal(wanted[name], found[name])
            ]
    lines = [
        [
            {key: value for key, value in line.items() if key != "total_seconds"}
            for line in MetricsFile(folder / "metrics.jsonl").read()
        ]
        for folder in (one, other)
    ]
    apart = [a for a, b in zip(*lines, strict=True) if a != b]
    first = f"{apart[0]['stage']} step {apart[0]['step']}" if apart else ""
    return {
        "tensors": tensors,
        "different_tensors": len(different),
        "lines": len(lines[0]),
        "different_lines": len(apart),
        "first_difference": first or next(iter(sorted(different)), ""),
        "equal_to_the_bit": not different and not apart,
    }


# ----------------------------------------------------------------------------------------- table


def rows(result: dict) -> list[tuple[str, str]]:
    """The results as rows of a table."""
    found = []
    if "stall" in result:
        one = result["stall"]
        found += [
            ("a step of SMT, median", f"{1000 * one['step_seconds']:.2f} ms"),
            ("worst step without a checkpoint", f"{1000 * one['worst_step_without']:.2f} ms"),
            ("worst step with one", f"{1000 * one['worst_step_with_checkpoint']:.2f} ms"),
            ("extra time of a checkpoint", f"{1000 * one['extra_seconds_a_checkpoint']:.2f} ms"),
            ("the first one's", f"{1000 * one['extra_seconds_of_the_first']:.2f} ms"),
            ("host busy with it", f"{1000 * one['host_seconds_a_checkpoint']:.2f} ms"),
            ("until it is on disk, longest", f"{one['seconds_until_on_disk']:.2f} s"),
            ("stall below one step", _yes(one["below_one_step"])),
        ]
        if not one["on_disk_before_the_block_ends"]:
            found.append(("", "blocks were too short for this disk: use a larger --block"))
    for mode, one in result.get("resume", {}).items():
        apart = f", {one['different_tensors']} of {one['tensors']} tensors and "
        apart += f"{one['different_lines']} of {one['lines']} lines differ, first "
        apart += one["first_difference"]
        counts = f" ({one['tensors']} tensors, {one['lines']} lines)"
        equal = one["equal_to_the_bit"]
        found.append((f"resume bit-exact, {mode}", _yes(equal) + (counts if equal else apart)))
    return found


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="paper")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", choices=["all", "stall", "resume"], default="all")
    parser.add_argument("--checkpoints", type=int, default=5, help="measured in the stall part")
    parser.add_argument("--block", type=int, default=60, help="steps in a block of the stall part")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the blocks in the stall part",
    )
    parser.add_argument(
        "--compile-resume",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compile the blocks in the resume part",
    )
    parser.add_argument(
        "--plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also compare without deterministic mode, for information",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu-trust"))
    parser.add_argument("--out", type=Path, help="write all measurements to this JSON file")
    parser.add_argument("--train-until", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train_until is not None:
        train_until(options.folder, options.train_until)
        return 0
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    data = random_stream(options.folder / "noise")
    began = time.perf_counter()
    result: dict = {"size": options.size, "torch": torch.__version__}
    if torch.cuda.is_available():
        result["gpu"] = torch.cuda.get_device_name()
    if options.part != "resume":
        result["stall"] = stall(options, data)
    if options.part != "stall":
        result["resume"] = resume(options, data)
    result["seconds"] = time.perf_counter() - began
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    table = rows(result)
    width = max(len(name) for name, _ in table)
    for name, value in table:
        print(f"{name:<{width}}  {value}")
    # On a CPU the thread that writes takes a core from the steps, so the stall is not judged.
    judged = result.get("stall", {}).get("device") == "cuda"
    good = not judged or result["stall"]["below_one_step"]
    exact = "resume" not in result or result["resume"]["deterministic"]["equal_to_the_bit"]
    return 0 if good and exact else 1


if __name__ == "__main__":
    sys.exit(main())
