"""Evaluations as tables for the terminal, with advice on weak scores."""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.table import Column, Table

from memtrain.config import RunConfig
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import Evaluation, Score
from memtrain.evaluation.forecasts import ForecastEvaluation
from memtrain.runs.progress import MetricsFile, Progress

GAP = 0.1
"""Advice is given if the RNN is this far above its teacher, in nats and as a fraction."""
SHOWN_COLUMNS = 20
"""Target columns of a series that are printed; the JSON has all."""
FOLLOWS = 0.1
"""A cell follows its teacher if 1-R² of single steps is at most this."""
FALLING = 0.02
"""DMT still improves if the loss falls by this fraction of the gap between two evaluations."""


@runtime_checkable
class EvaluatedRun(Protocol):
    """What is printed of a `memtrain.Run`, which is above this room."""

    config: RunConfig
    task: Task
    metrics: MetricsFile
    progress: Progress


def print_evaluation(result: Evaluation, run: EvaluatedRun) -> None:
    """Print scores, advice, drift and training cost of a run to stdout."""
    console, unit = Console(highlight=False), run.task.unit
    title = f"{run.config.name}: {result.sequences} held-out sequences of {result.length}"
    columns, fields = (f"bits per {unit}", "accuracy"), ("nats", "bits", "accuracy")
    if result.rnn.bits_per_byte is not None:
        columns, fields = ("bits per byte", "accuracy"), ("nats", "bits_per_byte", "accuracy")
    if result.of_numbers:
        columns, fields = ("MSE", "CRPS"), ("nats", "mse", "crps")
    scores = _table(title, "", f"{result.loss_name} per {unit}", *columns)
    rows: list[tuple[str, Score | None]] = [
        ("teacher", result.teacher),
        ("RNN, empty memory", result.rnn),
        (f"RNN, teacher's memory at t={result.start}", result.rnn_from_teacher),
        (f"RNN, empty memory, t>{result.start}", result.rnn_after_start),
    ]
    for name, score in rows:
        if score is not None:
            scores.add_row(name, *_numbers(score, fields))
    for baseline in result.baselines:
        scores.add_row(baseline.name, *_numbers(baseline, fields))
        if baseline.fitted_tokens < (baseline.training_tokens or 0):
            scores.caption = (
                f"counts: of {baseline.fitted_tokens:,} of the {baseline.training_tokens:,} "
                "training tokens, evenly spread"
            )
    console.print(scores)
    if result.rnn.column_mse is not None:
        console.print(_columns_table(result))
    if advice := advice_on(result, _held_out_losses(run)):
        console.print(advice)
    if result.drift is not None:
        path = result.drift.unexplained
        places = sorted({0, len(path) // 4, len(path) // 2, len(path) - 1})
        along = ", ".join(f"{path[t]:.3f} at t={t}" for t in places)
        console.print(
            f"memory drift (1-R²): one step {result.drift.one_step_unexplained:.4f}; "
            f"rollout {along}"
        )
    columns = ("stage", "steps", "tokens", "sequential operations", "seconds")
    cost = _table("cost of training", *columns)
    for stage in run.progress.stages:
        counts = [f"{count:,}" for count in (stage.steps, stage.tokens, stage.sequential_ops)]
        cost.add_row(stage.name, *counts, f"{stage.seconds:.1f}")
    console.print(cost)


def print_forecasts(result: ForecastEvaluation, name: str) -> None:
    """Print the scores of forecasts by method, and the coverage of the RNN's band, to stdout."""
    console, horizon = Console(highlight=False), result.horizon
    steps = sorted({1, (horizon + 1) // 2, horizon})
    several = "" if horizon == 1 else "s"
    title = f"{name}: forecasts of {horizon} step{several} from {result.origins} held-out origins"
    table = _table(title, "", "MSE", "MAE", "CRPS", *(f"at {step}" for step in steps))
    table.caption = "at: the CRPS at a step of the horizon"
    for method, score in result.methods.items():
        along = [f"{score.crps_by_step[step - 1]:.4f}" for step in steps]
        table.add_row(method, *_numbers(score, ("mse", "mae", "crps")), *along)
    console.print(table)
    units = _table("forecasts in the data's units", "", "column", "MSE", "MAE", "CRPS")
    columns = list(result.methods["RNN"].columns)
    for column in columns[:SHOWN_COLUMNS]:
        for method, score in result.methods.items():
            errors = [f"{number:.4g}" for number in score.columns[column].values()]
            units.add_row(method, column, *errors)
    if columns:
        console.print(units)
    console.print(
        f"The RNN's 80 % band holds {result.coverage:.1%} of what followed "
        f"({result.count} sample paths)."
    )


def _numbers(record: object, fields: Sequence[str]) -> list[str]:
    """Some fields as text, empty if they are missing or None."""
    found = [getattr(record, name, None) for name in fields]
    return ["" if number is None else f"{number:.4f}" for number in found]


def _columns_table(result: Evaluation) -> Table:
    """Scores of the next number in the data's units, by target column."""
    models = {"teacher": result.teacher, "RNN": result.rnn}
    there = {name: score for name, score in models.items() if score is not None}
    heads = [f"{name}, {what}" for name in there for what in ("MSE", "CRPS")]
    table = _table("in the data's units", "column", *heads)
    for column in list(result.rnn.column_mse or ())[:SHOWN_COLUMNS]:
        cells = []
        for score in there.values():
            for by_column in (score.column_mse, score.column_crps):
                cells.append(f"{(by_column or {})[column]:.4g}")
        table.add_row(column, *cells)
    return table


def _table(title: str, first: str, *numbers: str) -> Table:
    """An empty table whose columns are flush right but for the first."""
    return Table(first, *(Column(name, justify="right") for name in numbers), title=title)


def advice_on(result: Evaluation, history: Sequence[tuple[str, float]] = ()) -> str:
    """Advice that the evidence supports, or "".

    Args:
        result: the scores.
        history: stage and RNN loss of each evaluation during training, in order.
    """
    counts = min(result.baselines, key=lambda baseline: baseline.nats, default=None)
    counted = counts.nats if counts is not None else math.inf
    teacher, rnn = result.teacher, result.rnn
    if counts is not None and counted < rnn.nats and (teacher is None or counted < teacher.nats):
        longer = "--bptt.steps" if teacher is None else "--smt.steps"
        simple = f"A table of counts ({counts.name})"
        if result.of_numbers:
            simple = f"A forecast without a network ({counts.name})"
        return (
            f"{simple} is better than these networks: more steps "
            f"({longer}), more data or another size may help."
        )
    if teacher is None or result.drift is None:
        return ""
    above = rnn.nats - teacher.nats
    if not (counted < rnn.nats or above > max(GAP, GAP * teacher.nats)):
        return ""
    measure = "nats" if result.loss_name == "nats" else f"of {result.loss_name}"
    one_step = result.drift.one_step_unexplained
    if one_step > FOLLOWS:
        return (
            f"The RNN is {above:.3f} {measure} above its teacher: its cell does not follow the "
            f"teacher's memory even for one step (1-R² {one_step:.2f}). More steps of SMT "
            "(--smt.steps), a larger cell (--cell.width) or another kind (--cell.kind) may help."
        )
    if result.drift.unexplained[-1] < 2 * one_step:
        return ""  # the rollout is not the problem
    return _advice_on_dmt(above, history, measure)


def _advice_on_dmt(above: float, history: Sequence[tuple[str, float]], measure: str) -> str:
    """Advice for an RNN that follows its teacher for single steps, but drifts in rollouts."""
    if not history or history[-1][0] not in ("smt", "dmt"):
        return ""
    begins = (
        f"The RNN is {above:.3f} {measure} above its teacher: single steps are right, rollouts "
        "drift"
    )
    if history[-1][0] == "smt":
        return f"{begins}. DMT (--dmt.steps), which trains rollouts, has not been run."
    before = [nats for stage, nats in history if stage == "smt"][-1:]
    losses = before + [nats for stage, nats in history if stage == "dmt"]
    if len(losses) < 2:
        return ""
    last, best = losses[-1], min(losses[:-1])
    if last < best - FALLING * above:
        return f"{begins}, and DMT was still improving: more steps of it (--dmt.steps) may help."
    if last > best + GAP * above:
        return (
            f"{begins}. During DMT the held-out loss has risen, from {best:.3f} to {last:.3f}: "
            "--best takes the checkpoint where it was lowest."
        )
    return ""


def _held_out_losses(run: EvaluatedRun) -> list[tuple[str, float]]:
    """Stage and RNN loss of each evaluation during training; empty if the file is damaged."""
    try:
        return [
            (one["stage"], one["evaluation"]["rnn"]["nats"])
            for one in run.metrics.read()
            if "evaluation" in one
        ]
    except (MemtrainError, OSError, LookupError, TypeError):
        return []  # a damaged file must not hide the scores
