"""Checks after two concurrent commands on one folder (scripts/pairs.py): one function per promise.

Each returns a list of problems, empty if there are none.
"""

import json
import math
import signal
from pathlib import Path
from typing import NamedTuple

import torch

from memtrain.config.serialize import read_config
from memtrain.data.store_reader import open_store
from memtrain.runs.checkpoint import latest_checkpoint
from memtrain.runs.progress import MetricsFile

SIGNALLED = (0, 130, 143, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)
"""Exit statuses of a command that got a signal."""
RUN_NAMES = {"config.json", "metrics.jsonl", "checkpoints", "figures", "samples", "run.json"}
"""Files and folders of a run's folder, except its lock."""


class Alone(NamedTuple):
    """The result of a config trained undisturbed."""

    weights: dict[str, torch.Tensor]
    nats: dict[int, float]
    """Held-out loss of the RNN after every step, 0 included."""
    data: str
    """The identity of the training data."""


class Ended(NamedTuple):
    """A command, and how it ended."""

    words: list[str]
    status: int
    out: str
    err: str
    signalled: bool


def check_ending(ended: Ended) -> list[str]:
    """Check the exit status, and that a refusal is one line."""
    errors = [line for line in ended.err.splitlines() if line.startswith("memtrain:")]
    problems, name = [], f"{ended.words[0]}: "
    if "Traceback" in ended.err or "Traceback" in ended.out:
        problems.append(f"{name}a traceback: " + ended.err.strip().splitlines()[-1])
    if ended.status not in ((*SIGNALLED, 2) if ended.signalled else (0, 2)):
        problems.append(f"{name}status {ended.status}: {ended.err.strip()[-200:]}")
    if ended.status == 2 and (len(errors) != 1 or not ended.err.strip().endswith(errors[0])):
        problems.append(f"{name}a refusal that is not one line: {ended.err.strip()[-300:]!r}")
    return problems


def check_run(folder: Path, alone: dict[int, Alone]) -> list[str]:
    """Check that a finished run is exactly the one of its config."""
    problems = []
    config = read_config(folder / "config.json")
    expected = alone[config.seed]
    checkpoint, broken = latest_checkpoint(folder / "checkpoints")
    problems += [f"a broken checkpoint: {one}" for one in broken]
    if checkpoint is None:
        return [*problems, "no checkpoint"]
    same = checkpoint.weights.keys() == expected.weights.keys() and all(
        torch.equal(value, expected.weights[name]) for name, value in checkpoint.weights.items()
    )
    if not same:
        problems.append(f"weights are not those of seed {config.seed} trained alone")
    if checkpoint.progress.data != expected.data:
        problems.append("it was trained on other data than its options make")
    lines = MetricsFile(folder / "metrics.jsonl").read()
    stages = {name: stage.steps for name, stage in config.stages().items() if stage.steps}
    due = [(name, step) for name, steps in stages.items() for step in range(1, steps + 1)]
    if [(line["stage"], line["step"]) for line in lines] != due:
        problems.append(f"{len(lines)} lines of metrics, not one for each of {len(due)} steps")
    for line in lines:
        nats = line["evaluation"]["rnn"]["nats"]
        if not same_loss(nats, expected.nats.get(line["total_steps"])):
            problems.append(f"the evaluation at step {line['total_steps']} differs: {nats}")
            break
    return problems + check_names(folder)


def same_loss(found: float, expected: float | None) -> bool:
    """Whether two evaluations are of one state; rounding of sums depends on memory alignment."""
    return expected is not None and math.isclose(found, expected, rel_tol=1e-6)


def check_names(folder: Path) -> list[str]:
    """Check that a run's folder has no foreign files and no drafts."""
    drafts = [path for path in folder.rglob("*") if path.name.startswith((".draft", ".trash"))]
    drafts += list((folder / "checkpoints").glob("*.old"))
    names = {path.name for path in folder.iterdir() if "lock" not in path.name}
    foreign = sorted(names - RUN_NAMES - {path.name for path in drafts})
    found = [f"a draft remains: {path.relative_to(folder)}" for path in drafts]
    return found + [f"a foreign file: {name}" for name in foreign]


def check_evaluation(out: str, alone: dict[int, Alone]) -> list[str]:
    """Check the output of `eval --json` against the step and run that it names."""
    record = json.loads(out.splitlines()[-1])
    nats, step = record["rnn"]["nats"], record["step"]
    expected = alone[record["seed"]].nats.get(step)
    if not same_loss(nats, expected):
        return [f"eval at step {step} of seed {record['seed']} is {nats}, not {expected}"]
    return []


def check_stores(root: Path) -> list[str]:
    """Check that every prepared data set is complete, and that no draft remains."""
    problems = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".draft"):
            problems.append(f"a draft remains: {path.name}")
        elif path.is_dir() and not path.name.startswith("."):
            try:
                open_store(path, verify=True)
            except Exception as error:
                problems.append(f"an incomplete store: {error}")
    return problems


def result_of(folder: Path) -> Alone:
    """Read the result of a run."""
    checkpoint, _ = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    lines = MetricsFile(folder / "metrics.jsonl").read()
    nats = {line["total_steps"]: line["evaluation"]["rnn"]["nats"] for line in lines}
    return Alone(dict(checkpoint.weights), nats, checkpoint.progress.data)
