"""What bptt_comparison.py found, as a record and as a table."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bptt_comparison_plan import NAME, OURS, TITLES, BPTTComparison, Plan

from memtrain.paper.base import Job, Result, Setup
from memtrain.paper.job import collect
from memtrain.paper.sweep import results_of
from memtrain.plotting.style import save
from memtrain.training.metrics import MetricsFile


def state_of(folder: Path, job: Job, result: Result | None) -> dict[str, Any]:
    """How far a run is, and what went wrong."""
    (work,) = collect([(NAME, job)])
    place = folder / work.place
    trace = place.with_name(place.name + ".error.txt")
    lines = MetricsFile(place / "metrics.jsonl").read()
    step = lines[-1]["step"] if lines else 0
    state = {"folder": str(place), "steps": job.config.bptt.steps, "step": step}
    if result is not None:
        return state | {"state": "diverged" if result.diverged else "done", "why": result.diverged}
    if trace.exists():
        tail = trace.read_text().splitlines()[-12:]
        return state | {"state": "failed", "log": str(trace), "tail": tail}
    return state | {"state": "to go on" if step else "to begin"}


def summary(plan: Plan, folder: Path, protocol: str) -> dict[str, Any]:
    """Everything that is known, for beside.json."""
    setup, figure = Setup(scale="paper", folder=folder), BPTTComparison()
    runs, results = [], []
    for job in [*figure.grid(setup), *figure.follow_up(setup, [])]:
        (result,) = results_of(folder, [(NAME, job)]) or [None]
        results += [result] if result else []
        run = {**job.tags, **state_of(folder, job, result)}
        if result:
            run |= {"measured": result.measured, "cost": result.cost, "curve": result.curve}
        runs.append(run)
    save(figure.plot(setup, results), folder / "beside.png")
    verdict = asdict(figure.verdict(setup, results))
    return {"protocol": protocol, "plan": asdict(plan), "verdict": verdict, "runs": runs}


def table(record: Mapping[str, Any]) -> str:
    """The full runs and what they are to be compared with, as Markdown."""
    plan = record["plan"]
    lines = [
        "| data | trained by | seed | nats | state | rate | steps | tokens | "
        "sequential operations | ms a step, alone | seconds |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for data, seconds in plan["seconds"].items():
        for one in plan["ours"].get(data, []):
            counts = f"{one['steps']:,} | {one['tokens']:,} | {one['sequential_ops']:,}"
            spent = f"{one['seconds']:.0f}"
            lines.append(
                f"| {data} | {OURS} | {one.get('seed', '')} | {one['nats']:.4f} | done | | "
                f"{counts} | | {spent} |"
            )
        counted: dict[str, float] = {}
        for run in record["runs"]:
            if run["data"] != data or run["tuning"]:
                continue
            nats, counts = "", f"{run['step']:,} of {run['steps']:,} | |"
            if "measured" in run:
                nats, cost = f"{run['measured']['rnn']['nats']:.4f}", run["cost"]
                counts = f"{cost['steps']:,} | {cost['tokens']:,} | {cost['sequential_ops']:,}"
                counted = {one["name"]: one["nats"] for one in run["measured"]["baselines"]}
            step = 1000 * plan["timed"][run["cell"]]["seconds"]
            lines.append(
                f"| {data} | {TITLES[run['cell']]} | {run['seed']} | {nats} | {run['state']} | "
                f"{run['rate']:g} | {counts} | {step:.1f} | {seconds:.0f} |"
            )
        if counted:
            name = min(counted, key=lambda one: counted[one])
            lines.append(
                f"| {data} | best count model ({name}) | | {counted[name]:.4f} | | | | | | | |"
            )
    lines += ["", "Nats on held-out documents that chose the learning rate:", ""]
    for run in record["runs"]:
        if run["tuning"]:
            nats = run.get("measured", {}).get("validation_nats")
            told = f"{nats:.4f}" if nats is not None and run["state"] == "done" else run["state"]
            lines.append(f"- {run['data']}, {TITLES[run['cell']]}, {run['rate']:g}: {told}")
    for who, rate in plan["chosen"].items():
        if rate in (min(tried := plan["rates"][who.partition("/")[2]]), max(tried)):
            lines.append(f"- {who}: {rate:g} is at the edge of what was tried")
    lines += [
        f"- failed: {run['log']}: {run['tail'][-1]}" for run in record["runs"] if "tail" in run
    ]
    lines += [
        f"- {cell} was not timed: {one['error']}"
        for cell, one in plan["timed"].items()
        if "error" in one
    ]
    return "\n".join(lines)
