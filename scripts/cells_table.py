"""Train many recurrent cells by SMT -> DMT and by BPTT, and print a table of what trains.

    python scripts/cells_table.py --folder runs/cells --processes 12

Cells: the built-in ones, torch's, and those of torchrecurrent and ncps (`pip install
memtrain[cells]`), each of width 64 and one layer. Tasks: retrieval of a token among 16, and the 8x8
digits. Both methods have the same steps, and at most the same seconds. One learning rate per
method, not tuned per cell. Results are appended to FOLDER/results.jsonl, one line per run; the same
command continues where it stopped, `--minutes` ends it, and `--only` selects cells.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from memtrain.config import (
    CELLS,
    TORCH_CELLS,
    BPTTConfig,
    CellConfig,
    DMTConfig,
    LogConfig,
    Retrieval,
    RunConfig,
    SMTConfig,
)
from memtrain.errors import MemtrainError
from memtrain.paper.workers import shared_gpu
from memtrain.recipes import recipe
from memtrain.runs.processes import cores
from memtrain.training.console import Reporter
from memtrain.training.run import Run

METHODS = ("smt-dmt", "bptt")
TASKS = ("retrieval", "digits")
SOLVED = 0.99
"""Accuracy at which retrieval counts as solved."""


def cells() -> list[str]:
    """The kinds of all cells, as in `--cell.kind`; packages that are not installed are left out."""
    found = [*CELLS, *TORCH_CELLS]
    if importlib.util.find_spec("ncps"):
        found.append("ncps.torch:CfCCell")
    if importlib.util.find_spec("torchrecurrent"):
        import torchrecurrent  # type: ignore[import-not-found]

        names = sorted(name for name in torchrecurrent.__all__ if name.endswith("Cell"))
        found += [f"torchrecurrent:{name}" for name in names]
    return found


def config_of(cell: str, task: str, method: str, options: argparse.Namespace) -> RunConfig:
    """One run; both methods have as many steps, and as many seconds at most."""
    base, normalized = recipe(task), cell in ("transformer", "mlp")
    smt_steps, dmt_steps = options.steps[task]
    shape = CellConfig(
        kind=cell, memory_dim=options.width, memory_tokens=2 if cell == "lstm" else 1
    )
    config = replace(
        base,
        name=f"{cell.split(':')[-1]}-{task}-{method}",
        data=Retrieval(sequence_length=options.length) if task == "retrieval" else base.data,
        cell=replace(base.cell, kind=cell) if normalized else shape,
        teacher=replace(base.teacher, normalize_memory=normalized),
        log=LogConfig(evaluate_every=0, checkpoint_every=10**6),
    )
    if method == "bptt":
        bptt = BPTTConfig(
            steps=smt_steps + dmt_steps,
            seconds=options.seconds,
            batch_size=base.smt.batch_size,
            learning_rate=1e-3,
            schedule="cosine",
        )
        return replace(config, smt=SMTConfig(), dmt=DMTConfig(), bptt=bptt)
    return replace(
        config,
        smt=replace(base.smt, steps=smt_steps, seconds=0.6 * options.seconds),
        dmt=replace(base.dmt, steps=dmt_steps, seconds=0.4 * options.seconds),
    )


def train(config: RunConfig, folder: Path, sequences: int) -> dict[str, Any]:
    """Train a run; returns its scores and cost."""
    import torch

    torch.set_num_threads(1)
    place = folder / "runs" / config.name
    run = Run.create(config, place, overwrite=True)
    untrained = run.evaluate(sequences).rnn
    run.train(Reporter())
    score = run.evaluate(sequences).rnn
    stages = run.progress.stages_json()
    result = {
        "nats": score.nats,
        "accuracy": score.accuracy,
        "untrained_nats": untrained.nats,
        "steps": sum(stage["steps"] for stage in stages),
        "seconds": sum(stage["seconds"] for stage in stages),
        "parameters": sum(parameter.numel() for parameter in run.rnn.cell.parameters()),
    }
    shutil.rmtree(place)
    return result


def attempt(config: RunConfig, tags: dict[str, str], folder: Path, sequences: int) -> None:
    """Train a run and append its line to the results."""
    try:
        result = tags | train(config, folder, sequences)
    except MemtrainError as error:
        result = tags | {"failed": str(error)}
    except Exception as error:  # a failed run must not end the others
        result = tags | {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    with (folder / "results.jsonl").open("a") as file:  # one write: lines stay whole
        file.write(json.dumps(result) + "\n")


def wrapping_problem(kind: str, width: int) -> str:
    """Why a cell cannot be built; empty if it can."""
    from memtrain.models.cells import build_cell

    try:
        build_cell(CellConfig(kind=kind, memory_dim=width, memory_tokens=2), 9)
    except MemtrainError as error:
        return str(error)
    return ""


# ----------------------------------------------------------------------------------------- table


def read_results(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(results: list[dict[str, Any]], problems: dict[str, str]) -> str:
    """A row per cell; accuracy of retrieval, nats per pixel of digits, by SMT -> DMT and BPTT."""
    names = ("cell", "wraps", "parameters", "trains", "retrieval, SMT → DMT", "retrieval, BPTT")
    names += ("digits, SMT → DMT", "digits, BPTT", "steps", "seconds")
    rows = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    found = {(one["cell"], one["task"], one["method"]): one for one in results}
    solved = dict.fromkeys(METHODS, 0)
    for kind, problem in problems.items():
        if problem:
            rows.append(f"| {kind} | no: {problem} |" + " |" * (len(names) - 2))
            continue
        own = {key[1:]: one for key, one in found.items() if key[0] == kind}
        shown = []
        for task in TASKS:
            for method in METHODS:
                one = own.get((task, method))
                key = "accuracy" if task == "retrieval" else "nats"
                shown.append(_shown(one, key))
                solved[method] += task == "retrieval" and bool(one and is_solved(one))
        whole = [one for one in own.values() if "failed" not in one]
        trained = f"{sum(map(is_trained, own.values()))} of {len(own)}"
        parameters = f"{whole[0]['parameters']:,}" if whole else ""
        steps = f"{sum(one['steps'] for one in whole):,}"
        seconds = f"{sum(one['seconds'] for one in whole):.0f}"
        rows.append(
            f"| {kind} | yes | {parameters} | {trained} | {' | '.join(shown)} | {steps} | "
            f"{seconds} |"
        )
    wrapped = sum(not problem for problem in problems.values())
    rows += ["", f"{wrapped} of {len(problems)} cells wrap. Retrieval reaches {SOLVED}: "]
    rows[-1] += ", ".join(f"{count} by {method}" for method, count in solved.items()) + "."
    return "\n".join(rows)


def _shown(one: dict[str, Any] | None, key: str) -> str:
    if one is None:
        return ""
    return "failed" if "failed" in one else f"{one[key]:.3f}"


def is_trained(one: dict[str, Any]) -> bool:
    """Whether training stayed finite and lowered the held-out loss."""
    return "failed" not in one and one["nats"] < one["untrained_nats"]


def is_solved(one: dict[str, Any]) -> bool:
    return "failed" not in one and one["accuracy"] >= SOLVED


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/cells"))
    parser.add_argument("--processes", type=int, default=cores())
    parser.add_argument("--only", nargs="*", help="kinds of cells")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--seconds", type=float, default=12.0, help="of training per run, at most")
    parser.add_argument("--length", type=int, default=16, help="tokens of retrieval")
    parser.add_argument("--width", type=int, default=64, help="of the states")
    parser.add_argument("--sequences", type=int, default=512, help="held-out sequences to score")
    for task, steps in (("retrieval", (900, 450)), ("digits", (1200, 300))):
        text = f"steps of SMT and of DMT on {task}"
        parser.add_argument(f"--{task}-steps", type=int, nargs=2, default=steps, help=text)
    options = parser.parse_args()
    options.steps = {"retrieval": options.retrieval_steps, "digits": options.digits_steps}
    options.folder.mkdir(parents=True, exist_ok=True)
    kinds = options.only or cells()
    problems = {kind: wrapping_problem(kind, options.width) for kind in kinds}
    done = {(one["cell"], one["task"], one["method"]) for one in read_results(options.folder)}
    plan = [
        {"cell": kind, "task": task, "method": method}
        for task in options.tasks
        for kind in kinds
        for method in METHODS
        if not problems[kind] and (kind, task, method) not in done
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with shared_gpu(), ProcessPoolExecutor(options.processes, context) as pool:
        jobs: dict[Future[None], dict[str, str]] = {
            pool.submit(
                attempt, config_of(**tags, options=options), tags, options.folder, options.sequences
            ): tags
            for tags in plan
        }
        for job in as_completed(jobs):
            if not job.cancelled():
                job.result()
                print(f"{time.monotonic() - began:.0f} s: {jobs[job]}", file=sys.stderr)
            if time.monotonic() - began > 60 * options.minutes:
                for other in jobs:
                    other.cancel()
    results = [one for one in read_results(options.folder) if one["cell"] in problems]
    text = table(results, problems)
    (options.folder / "table.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
