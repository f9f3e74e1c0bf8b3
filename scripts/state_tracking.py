"""Train networks to track a state over short sequences, and test them on long ones.

    python scripts/state_tracking.py --folder runs/tracking --processes 2
    python scripts/state_tracking.py --folder runs/tracking-gpu --processes 12 --scale gpu

Tasks: parity, a running sum modulo 3, and words over the symmetric group S5, with a target at every
token; and retrieval, where one token of the first half is asked for at the end. Methods: SMT -> DMT
with a Transformer cell and with a GRU; BPTT with a GRU, an LSTM and a plain causal Transformer
(attention), for as many steps of as many sequences as SMT and DMT together. The teacher of the
first method is one more row, up to 1,024 tokens. All are trained on sequences of length T, SMT
first on shorter ones, and scored by their accuracy over all targets of sequences of T, 2T, 4T, 8T,
256 and 1,024, of retrieval 4,096, too.

A learning rate is chosen per task and method with seed 0, by the accuracy at T and 8T together on
other sequences than those that are reported; then the other seeds are trained at it. Results are
appended to FOLDER/results.jsonl, one line per run. The same command continues where it stopped and
tries failed runs again, `--minutes` ends it. It prints a table, and writes it to FOLDER/table.md.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

from memtrain.config import (
    S5,
    BPTTConfig,
    CellConfig,
    DMTConfig,
    LogConfig,
    ModularArithmetic,
    Parity,
    Retrieval,
    RunConfig,
    SMTConfig,
    model_shapes,
)
from memtrain.errors import MemtrainError
from memtrain.paper.workers import shared_gpu
from memtrain.runs.processes import cores
from memtrain.training.console import Reporter
from memtrain.training.run import Run

METHODS = {
    "smt-dmt": "SMT → DMT, Transformer cell",
    "smt-dmt-gru": "SMT → DMT, GRU",
    "bptt-gru": "BPTT, GRU",
    "bptt-lstm": "BPTT, LSTM",
    "bptt-attention": "BPTT, plain Transformer",
}
TEACHER = "teacher of the Transformer cell"
RATES = {
    "smt-dmt": (2e-3, 3e-3),
    "smt-dmt-gru": (2e-3, 3e-3),
    "bptt-gru": (1e-3, 3e-3),
    "bptt-lstm": (1e-3, 3e-3),
    "bptt-attention": (1e-3, 3e-3),
}
"""Learning rates to choose from; DMT has a third of SMT's."""
LONG = (256, 1024)
TRACKED = 0.9
"""Accuracy at 8 times the training length from which a network tracks the state."""
OTHER_SEQUENCES = 1
"""Seed of the sequences on which rates are chosen; the reported ones have the package's own."""
WIDTH = 64
CURRICULUM = ((4, 0.15), (2, 0.25))
"""SMT has sequences of T/4 for 0.15 of its steps, of T/2 for 0.25, then of T."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracking:
    """A task of state tracking, and the memory that its cells get."""

    data: Parity | ModularArithmetic | S5 | Retrieval
    memory_dim: int
    """Numbers in a memory. Few leave no room for anything but the state."""
    noise: float
    """On the memories that SMT steps from, so that a step corrects them."""
    chance: float
    future: int = 1
    """Targets that a memory has to predict: one, where a target is the whole state."""
    long: tuple[int, ...] = LONG
    sequences: int = 16
    """Least number of sequences that are scored at one length."""


TASKS = {
    "parity": Tracking(data=Parity(), memory_dim=4, noise=1.0, chance=1 / 2),
    "sum": Tracking(
        data=ModularArithmetic(sequence_length=12, modulus=3, operations="+"),
        memory_dim=4,
        noise=1.0,
        chance=1 / 3,
    ),
    "s5": Tracking(data=S5(), memory_dim=16, noise=0.7, chance=1 / 120),
    "retrieval": Tracking(
        data=Retrieval(),
        memory_dim=WIDTH,
        noise=1.0,
        chance=1 / 8,
        future=Retrieval().sequence_length,
        long=(*LONG, 4096),
        sequences=512,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is trained and scored."""

    smt_steps: int
    dmt_steps: int
    batch_size: int
    tokens: int
    """In the sequences that are scored at one length."""


SCALES = {
    "smoke": Scale(smt_steps=2, dmt_steps=1, batch_size=4, tokens=1),
    "cpu": Scale(smt_steps=2000, dmt_steps=1000, batch_size=32, tokens=2**14),
    "gpu": Scale(smt_steps=8000, dmt_steps=4000, batch_size=64, tokens=2**17),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run."""

    task: str
    method: str
    rate: float
    seed: int


def config_of(plan: Plan, scale: Scale) -> RunConfig:
    """One run; the methods have equally many steps of equally many sequences."""
    task = TASKS[plan.task]
    trained = task.data.sequence_length
    shorter = ((trained // part, round(share * scale.smt_steps)) for part, share in CURRICULUM)
    shapes = model_shapes(
        encoder="causal",
        context_length=max(LONG),
        width=WIDTH,
        layers=(2, 1, 1),
        heads=4,
        head_dim=16,
        memory_tokens=1,
        memory_dim=task.memory_dim,
    )
    config = RunConfig(
        name=f"{plan.task}-{plan.method}-{plan.rate:g}-seed{plan.seed}",
        seed=plan.seed,
        data=task.data,
        **shapes,
        smt=SMTConfig(
            steps=scale.smt_steps,
            batch_size=scale.batch_size,
            learning_rate=plan.rate,
            schedule="cosine",
            timesteps=0,
            future_length=task.future,
            dynamics_weight=1.0,
            memory_noise=task.noise,
            # A step must keep the state, which may be a small part of a memory's numbers.
            cell_decode_weight=1.0,
            curriculum=tuple((length, steps) for length, steps in shorter if steps),
        ),
        dmt=DMTConfig(
            steps=scale.dmt_steps, batch_size=scale.batch_size, learning_rate=plan.rate / 3
        ),
        log=LogConfig(every=50, evaluate_every=0, checkpoint_every=10**6),
    )
    gru = CellConfig(kind="gru", memory_tokens=1, memory_dim=WIDTH)
    cells = {
        "bptt-gru": gru,
        "bptt-lstm": replace(gru, kind="lstm", memory_tokens=2),
        "bptt-attention": replace(config.cell, kind="attention", memory_tokens=max(LONG), layers=3),
    }
    if plan.method == "smt-dmt-gru":  # its states cannot reach RMS 1
        return replace(config, cell=gru, teacher=replace(config.teacher, normalize_memory=False))
    if plan.method == "smt-dmt":
        return config
    bptt = BPTTConfig(
        steps=scale.smt_steps + scale.dmt_steps,
        batch_size=scale.batch_size,
        learning_rate=plan.rate,
        schedule="cosine",
    )
    return RunConfig(
        name=config.name,
        seed=plan.seed,
        data=config.data,
        teacher=config.teacher,  # its decoder is the readout
        cell=cells[plan.method],
        bptt=bptt,
        log=config.log,
    )


def lengths(task: str) -> list[int]:
    """T, 2T, 4T and 8T, and the long ones of the task."""
    trained = TASKS[task].data.sequence_length
    return sorted({trained * factor for factor in (1, 2, 4, 8)} | set(TASKS[task].long))


def accuracies(
    run: Run, length: int, sequences: int, **settings: Any
) -> tuple[float, float | None]:
    """Of the RNN and of its teacher, over all targets of sequences of one length."""
    from memtrain.data.task import build_task
    from memtrain.evaluation.evaluate import evaluate

    task = build_task(replace(run.config.data, sequence_length=length))
    with run.engine.eval_mode():
        found = evaluate(
            task,
            run.rnn,
            run.teacher if length <= max(LONG) else None,
            sequences=sequences,
            device=run.engine.device,
            **settings,
        )
    assert found.rnn.accuracy is not None  # only numbers have none
    return found.rnn.accuracy, found.teacher.accuracy if found.teacher else None


def train(plan: Plan, scale: Scale, folder: Path) -> dict[str, Any]:
    """Train a run; returns its accuracies and cost."""
    import torch

    torch.set_num_threads(1)
    config = config_of(plan, scale)
    place = folder / "runs" / config.name
    run = Run.create(config, place, overwrite=True)
    run.train(Reporter())
    at, least = lengths(plan.task), TASKS[plan.task].sequences
    counts = {length: max(least, scale.tokens // length) for length in at}
    choice = [
        accuracies(run, length, counts[length], seed=OTHER_SEQUENCES)[0]
        for length in (at[0], 8 * at[0])
    ]
    found = [accuracies(run, length, counts[length]) for length in at]
    stages = run.progress.stages_json()
    shutil.rmtree(place)
    return {
        "choice": sum(choice) / 2,
        "lengths": at,
        "rnn": [rnn for rnn, _ in found],
        "teacher": [teacher for _, teacher in found],
        "steps": sum(stage["steps"] for stage in stages),
        "seconds": sum(stage["seconds"] for stage in stages),
    }


def attempt(plan: Plan, scale: Scale, folder: Path) -> None:
    """Train a run and append its line to the results."""
    try:
        result = asdict(plan) | train(plan, scale, folder)
    except MemtrainError as error:
        result = asdict(plan) | {"failed": str(error)}
    except Exception as error:  # a failed run must not end the others
        result = asdict(plan) | {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    with (folder / "results.jsonl").open("a") as file:  # one write: lines stay whole
        file.write(json.dumps(result) + "\n")


# ----------------------------------------------------------------------------------------- plans


def read_results(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def best_rates(results: Iterable[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """For each task and method whose rates are all done: the best of them, of seed 0."""
    tried: dict[tuple[str, str], dict[float, float]] = {}
    for one in results:
        if one["seed"] == 0:
            found = tried.setdefault((one["task"], one["method"]), {})
            found[one["rate"]] = one.get("choice", -1.0)  # a run that failed is never the best
    return {
        key: max(found, key=lambda rate: found[rate])
        for key, found in tried.items()
        if set(RATES[key[1]]) <= set(found)
    }


def plans(options: argparse.Namespace, results: list[dict[str, Any]]) -> list[Plan]:
    """What can be trained now: rates with seed 0, then the other seeds at the best rate."""
    best, found = best_rates(results), []
    for task in options.tasks:
        for method in options.methods:
            for rate in RATES[method]:
                found.append(Plan(task=task, method=method, rate=rate, seed=0))
            if rate := best.get((task, method)):
                found += [
                    Plan(task=task, method=method, rate=rate, seed=seed)
                    for seed in range(1, options.seeds)
                ]
    names = ("task", "method", "rate", "seed")
    done = [{name: one[name] for name in names} for one in results if "failed" not in one]
    return [plan for plan in found if asdict(plan) not in done]


# ----------------------------------------------------------------------------------------- table


def table(results: list[dict[str, Any]]) -> str:
    """A row per task and method at its best rate: means over seeds, and the least at 8T."""
    text, best = [], best_rates(results)
    for task, tracking in TASKS.items():
        own = [one for one in results if best.get((task, one["method"])) == one["rate"]]
        own = [one for one in own if one["task"] == task and "failed" not in one]
        if not own:
            continue
        names = [task, "rate", *(f"T = {length:,}" for length in lengths(task))]
        names += ["seeds at 8T", "steps", "seconds"]
        text += ["", f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
        for method, name in METHODS.items():
            runs = sorted(
                (one for one in own if one["method"] == method), key=lambda one: one["seed"]
            )
            if runs:
                text.append(_row(name, runs, "rnn"))
            if runs and method == "smt-dmt":
                text.append(_row(TEACHER, runs, "teacher"))
        tracked = {method: 0 for method in METHODS}
        for one in own:
            tracked[one["method"]] += (
                one["rnn"][one["lengths"].index(8 * one["lengths"][0])] >= TRACKED
            )
        counts = ", ".join(
            f"{METHODS[method]} {count}" for method, count in tracked.items() if count
        )
        text += ["", f"Chance {tracking.chance:.3g}. Seeds of at least {TRACKED:g} at 8T: "]
        text[-1] += f"{counts or 'none'}."
    return "\n".join(text[1:])


def _row(name: str, runs: list[dict[str, Any]], of: str) -> str:
    at = runs[0]["lengths"]
    every = [[one[of][place] for one in runs] for place in range(len(at))]
    means = ["" if None in found else f"{mean(found):.3f}" for found in every]
    seeds = ", ".join(f"{found:.2f}" for found in every[at.index(8 * at[0])])
    steps, seconds = runs[0]["steps"], mean(one["seconds"] for one in runs)
    columns = [name, f"{runs[0]['rate']:g}", *means, seeds, f"{steps:,}", f"{seconds:.0f}"]
    return f"| {' | '.join(columns)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/tracking"))
    parser.add_argument("--processes", type=int, default=cores())
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="steps and batch")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=inf, help="begin no run after these")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began, started = time.monotonic(), set[Plan]()
    jobs: dict[Future[None], Plan] = {}
    context = multiprocessing.get_context("spawn")
    with shared_gpu(), ProcessPoolExecutor(options.processes, context) as pool:
        while True:
            late = time.monotonic() - began > 60 * options.minutes
            for plan in plans(options, read_results(options.folder)) if not late else ():
                if plan not in started and len(jobs) < options.processes:
                    started.add(plan)
                    scale = SCALES[options.scale]
                    jobs[pool.submit(attempt, plan, scale, options.folder)] = plan
            if not jobs:
                break
            done = next(as_completed(jobs))
            done.result()
            print(f"{time.monotonic() - began:.0f} s: {jobs.pop(done)}", file=sys.stderr)
    text = table(read_results(options.folder))
    (options.folder / "table.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
