"""Train many small runs at once on one machine, and print a table of their scores.

    python scripts/many_runs.py scripts/plans/retrieval.py --folder runs/many --processes 12

A plan is a Python file that defines `RUNS`, a dict from names to `RunConfig`s. Processes share an
NVIDIA GPU through its Multi-Process Service where that can be started. An existing run is resumed,
so the same command continues a plan; `--only` selects runs. Results are appended to
FOLDER/results.jsonl, one line per run: the evaluation at the end of each stage, and its cost.
"""

import argparse
import json
import multiprocessing
import os
import runpy
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memtrain.config import RunConfig
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.paper.workers import shared_gpu
from memtrain.runs.processes import cores, die_with_parent
from memtrain.training.console import Reporter
from memtrain.training.run import Run

GRACE = 30.0
"""Seconds in which runs may save themselves when this process was ended."""


def train(name: str, config: RunConfig, place: Path, sequences: int) -> dict[str, Any]:
    """Train a run to the end; returns the scores and cost of each stage."""
    import torch

    torch.set_num_threads(1)
    run = Run.open(place) if (place / "config.json").exists() else Run.create(config, place)
    scores = {}
    for stage in run.stages[run.progress.stage :]:
        run.train(Reporter(), until=stage)
        found = asdict(run.evaluate(sequences))
        scores[stage] = {
            "teacher": _brief(found["teacher"]),
            "rnn": _brief(found["rnn"]),
            "unexplained": _unexplained(found["drift"]),
        }
    return {"name": name, "scores": scores, "stages": run.progress.stages_json()}


def _brief(score: dict[str, Any] | None) -> dict[str, float] | None:
    return None if score is None else {key: score[key] for key in ("nats", "accuracy")}


def _unexplained(drift: dict[str, Any] | None) -> dict[str, float] | None:
    """1-R² of single steps from the teacher's memories, and of the second half of a rollout."""
    if drift is None:
        return None
    late = drift["unexplained"][len(drift["unexplained"]) // 2 :]
    return {"one_step": drift["one_step_unexplained"], "rollout": sum(late) / len(late)}


def _attempt(name: str, config: RunConfig, folder: Path, sequences: int) -> dict[str, Any]:
    try:
        result = train(name, config, folder / name, sequences)
    except MemtrainError as error:
        return {"name": name, "failed": str(error)}
    except Exception as error:  # a failed run must not end the others
        return {"name": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    with (folder / "results.jsonl").open("a") as file:  # one write: lines stay whole
        file.write(json.dumps(result) + "\n")
    return result


def table(results: list[dict[str, Any]]) -> str:
    """One row per run and stage; 1-R² is of single steps and of the rollout's second half."""
    names = ("run", "stage", "teacher", "RNN", "accuracy", "1-R² step, rollout", "steps", "seconds")
    rows = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for result in sorted(results, key=lambda one: one["name"]):
        if "failed" in result:
            rows.append(f"| {result['name']} | failed: {result['failed'][:120]} |" + " |" * 6)
            continue
        for stage in result["stages"]:
            score = result["scores"].get(stage["name"])
            if score is None:
                continue
            teacher = f"{score['teacher']['nats']:.4f}" if score["teacher"] else ""
            rnn, drift = score["rnn"], score["unexplained"]
            apart = f"{drift['one_step']:.3f}, {drift['rollout']:.3f}" if drift else ""
            rows.append(
                f"| {result['name']} | {stage['name']} | {teacher} | {rnn['nats']:.4f} | "
                f"{rnn['accuracy']:.4f} | {apart} | {stage['steps']:,} | {stage['seconds']:.0f} |"
            )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/many"))
    parser.add_argument("--processes", type=int, default=cores())
    parser.add_argument("--sequences", type=int, default=512, help="held-out sequences to score")
    parser.add_argument("--only", nargs="*", help="runs of the plan to train")
    options = parser.parse_args()
    runs: dict[str, RunConfig] = runpy.run_path(str(options.plan))["RUNS"]
    for name in options.only or ():
        if name not in runs:
            parser.error(
                f"--only {name}: {options.plan} has no such run; {did_you_mean(name, runs)}"
            )
    chosen = {name: runs[name] for name in options.only or runs}
    options.folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    with (
        shared_gpu(),
        ProcessPoolExecutor(
            options.processes,
            multiprocessing.get_context("spawn"),
            initializer=die_with_parent,
            initargs=(GRACE,),
        ) as pool,
    ):
        jobs = [
            pool.submit(_attempt, name, config, options.folder, options.sequences)
            for name, config in chosen.items()
        ]
        for job in as_completed(jobs):
            results.append(job.result())
            print(f"{time.monotonic() - began:.0f} s: {results[-1]['name']}", file=sys.stderr)
    print(table(results))
    return 1 if any("failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
