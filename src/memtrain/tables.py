"""Results as tables for a terminal."""

import math

from rich.console import Console
from rich.table import Table

from memtrain.eval.evaluate import Evaluation, Score
from memtrain.run import Run

GAP = 0.1
"""How far above its teacher an RNN may be before it is said: in nats, and as a share."""


def print_evaluation(run: Run, result: Evaluation) -> None:
    """Scores, drift and cost of a run, on stdout."""
    console = Console(highlight=False)
    unit = run.task.unit
    scores = Table(
        title=f"{run.config.name}: {result.sequences} held-out sequences of {result.length}"
    )
    scores.add_column("")
    for column in (f"nats a {unit}", f"bits a {unit}", "accuracy"):
        scores.add_column(column, justify="right")
    rows: list[tuple[str, Score | None]] = [
        ("teacher", result.teacher),
        ("RNN, empty memory", result.rnn),
        (f"RNN, teacher's memory at t={result.start}", result.rnn_from_teacher),
        (f"RNN, empty memory, t>{result.start}", result.rnn_after_start),
    ]
    for name, score in rows:
        if score is not None:
            scores.add_row(name, f"{score.nats:.4f}", f"{score.bits:.4f}", f"{score.accuracy:.4f}")
    for baseline in result.baselines:
        scores.add_row(baseline.name, f"{baseline.nats:.4f}", f"{baseline.bits:.4f}", "")
    console.print(scores)
    if advice := what_is_missing(result):
        console.print(advice)
    if result.drift is not None:
        path = result.drift.unexplained
        places = sorted({0, len(path) // 4, len(path) // 2, len(path) - 1})
        along = ", ".join(f"{path[t]:.3f} at t={t}" for t in places)
        console.print(
            f"memory drift (1-R²): one step {result.drift.one_step_unexplained:.4f}; "
            f"rollout {along}"
        )
    cost = Table(title="cost of training")
    cost.add_column("stage")
    for column in ("steps", "tokens", "sequential operations", "seconds"):
        cost.add_column(column, justify="right")
    for stage in run.progress["stages"]:
        cost.add_row(
            stage["name"],
            f"{stage.get('steps', 0):,}",
            f"{stage.get('tokens', 0):,}",
            f"{stage.get('sequential_ops', 0):,}",
            f"{stage.get('seconds', 0):.1f}",
        )
    console.print(cost)


def what_is_missing(result: Evaluation) -> str:
    """What a person would do about these scores, if anything."""
    counts = min(result.baselines, key=lambda baseline: baseline.nats, default=None)
    counted = counts.nats if counts is not None else math.inf
    teacher, rnn = result.teacher, result.rnn
    if counts is not None and counted < rnn.nats and (teacher is None or counted < teacher.nats):
        longer = "--bptt.steps" if teacher is None else "--smt.steps"
        return (
            f"A table of counts ({counts.name}) is better than these networks: they want more "
            f"steps ({longer}), more data, or another size."
        )
    if teacher is None:
        return ""
    above = rnn.nats - teacher.nats
    if counted < rnn.nats or above > max(GAP, GAP * teacher.nats):
        return (
            f"The RNN is {above:.3f} nats above its teacher: more steps of DMT (--dmt.steps) bring "
            "it closer."
        )
    return ""
