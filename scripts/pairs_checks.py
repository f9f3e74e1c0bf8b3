"""What must hold after two commands met on one folder (scripts/pairs.py): one function a promise.

Each returns what went wrong, in words; nothing if all is well.
"""

import json
import math
import signal
from pathlib import Path
from typing import NamedTuple

import torch

from memtrain.config.serialize import read_config
from memtrain.data.store import open_store
from memtrain.training.checkpoint import latest_checkpoint
from memtrain.training.progress import MetricsFile

SIGNALLED = (0, 130, 143, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)
"""How a command may end that was told to."""
RUN_NAMES = {"config.json", "metrics.jsonl", "checkpoints", "figures", "samples", "run.json"}
"""What belongs in a run's folder, beside its lock."""


class Alone(NamedTuple):
    """What a config comes to when nothing disturbs it."""

    weights: dict[str, torch.Tensor]
    nats: dict[int, float]
    """Held-out loss of the RNN after every step, 0 included."""
    data: str
    """The identity of what it learned."""


class Ended(NamedTuple):
    """A command that was started, and how it ended."""

    words: list[str]
    status: int
    out: str
    err: str
    signalled: bool


def check_ending(ended: Ended) -> list[str]:
    """A status that a shell can rely on, and a refusal in one line."""
    told = [line for line in ended.err.splitlines() if line.startswith("memtrain:")]
    problems, name = [], f"{ended.words[0]}: "
    if "Traceback" in ended.err or "Traceback" in ended.out:
        problems.append(f"{name}a traceback: " + ended.err.strip().splitlines()[-1])
    if ended.status not in ((*SIGNALLED, 2) if ended.signalled else (0, 2)):
        problems.append(f"{name}status {ended.status}: {ended.err.strip()[-200:]}")
    if ended.status == 2 and (len(told) != 1 or not ended.err.strip().endswith(told[0])):
        problems.append(f"{name}a refusal that is not one line: {ended.err.strip()[-300:]!r}")
    return problems


def check_run(folder: Path, alone: dict[int, Alone]) -> list[str]:
    """A finished run is the one that its config makes, and nothing else."""
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
        problems.append("it learned other data than its options make")
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
    """Whether two evaluations are of one state: sums are rounded by where in memory things lie."""
    return expected is not None and math.isclose(found, expected, rel_tol=1e-6)


def check_names(folder: Path) -> list[str]:
    """Nothing foreign and no draft in a run's folder."""
    drafts = [path for path in folder.rglob("*") if path.name.startswith((".draft", ".trash"))]
    drafts += list((folder / "checkpoints").glob("*.old"))
    names = {path.name for path in folder.iterdir() if "lock" not in path.name}
    foreign = sorted(names - RUN_NAMES - {path.name for path in drafts})
    found = [f"a draft stays: {path.relative_to(folder)}" for path in drafts]
    return found + [f"a foreign file: {name}" for name in foreign]


def check_evaluation(out: str, alone: dict[int, Alone]) -> list[str]:
    """What `eval --json` printed is true of a step of the run that it names."""
    record = json.loads(out.splitlines()[-1])
    nats, step = record["rnn"]["nats"], record["step"]
    expected = alone[record["seed"]].nats.get(step)
    if not same_loss(nats, expected):
        return [f"eval at step {step} of seed {record['seed']} says {nats}, not {expected}"]
    return []


def check_stores(root: Path) -> list[str]:
    """Every prepared data set is whole, and no draft stays beside it."""
    problems = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".draft"):
            problems.append(f"a draft stays: {path.name}")
        elif path.is_dir() and not path.name.startswith("."):
            try:
                open_store(path, verify=True)
            except Exception as error:
                problems.append(f"half a store: {error}")
    return problems


def result_of(folder: Path) -> Alone:
    """What a run came to."""
    checkpoint, _ = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    lines = MetricsFile(folder / "metrics.jsonl").read()
    nats = {line["total_steps"]: line["evaluation"]["rnn"]["nats"] for line in lines}
    return Alone(dict(checkpoint.weights), nats, checkpoint.progress.data)
