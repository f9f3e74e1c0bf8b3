"""The demo: train one cell by SMT -> DMT and by BPTT, and compare them in a table and on a page.

BPTT trains for the longer of equal steps and equal seconds, at the best of three learning rates
(docs/LOG.md has the search).
"""

import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from memtrain.config import Retrieval, RunConfig
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import Score
from memtrain.files import write_output
from memtrain.plotting.html import Chart, Columns, Heading, Series, Text, render_page
from memtrain.plotting.html import Table as PageTable
from memtrain.recipes import recipe
from memtrain.runs.processes import die_with_parent, hear_interrupts, start_process
from memtrain.runs.progress import MetricsFile
from memtrain.training.console import Reporter
from memtrain.training.run import Interrupted, Run

SEQUENCES = 2048
"""Held-out sequences behind every number of the table."""
MAX_STEPS_RATIO = 50
"""Upper bound on BPTT's steps, as a multiple of equal steps, however fast they are."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    score: Score
    cost: dict
    """Steps, tokens, sequential operations and seconds, under the names of `Run.totals`."""

    def cells(self) -> list[str]:
        """The row as text, under `HEADER`."""
        counts = [self.cost[f"total_{key}"] for key in ("steps", "tokens", "sequential_ops")]
        numbers = [f"{self.score.accuracy:.4f}", *(f"{count:,}" for count in counts)]
        return [self.name, *numbers, f"{self.cost['total_seconds']:.1f}"]


def run_demo(
    folder: Path,
    seed: int,
    length: int,
    make_reporter: Callable[[], Reporter],
    *,
    alongside: bool = False,
    command: str = "memtrain",
) -> list[Row]:
    """Train both ways, print the table and write the page.

    Args:
        folder: for the two runs and index.html; an earlier demo there is replaced.
        seed: of both runs.
        length: tokens per sequence.
        make_reporter: creates the progress display of each run.
        alongside: train at the same time, each in a process with one thread.
        command: how the user calls memtrain, for the closing hint.
    """
    smt_config = _config("retrieval", seed, length, alongside)
    bptt_config = _config("retrieval-bptt", seed, length, alongside)
    console = Console(highlight=False)
    console.print(
        f"[bold]memtrain demo[/bold]: remember one token for {length} steps, then output it. "
        "The same Transformer cell is trained twice.\n"
    )
    console.print("SMT → DMT: a teacher learns what to remember, the cell learns to follow it")
    run = Run.create(smt_config, folder / "smt-dmt", overwrite=True)
    steps = sum(stage.steps for stage in smt_config.stages().values())
    process = BaselineProcess(bptt_config, folder / "bptt", steps)
    with ExitStack() as stack:
        if alongside:
            stack.enter_context(process)
        rows = _train_smt_dmt(run, make_reporter())
        since = "it has been training at the same time" if alongside else "it starts now"
        console.print(f"BPTT: the same cell, unrolled; {since}")
        if not alongside:
            stack.enter_context(process)
        baseline = process.finish(run.totals()["total_seconds"], make_reporter())
    # At a constant learning rate its loss still spikes now and then: score its best checkpoint.
    best = Run.open(baseline.folder, best=True)
    rows.append(Row("RNN, BPTT", best.evaluate(SEQUENCES).rnn, baseline.totals()))

    console.print(_terminal_table(rows, length, alongside))
    page = folder / "index.html"
    write_output(page, _page(rows, run, baseline, alongside).encode())
    console.print(f"curves  {page.resolve().as_uri()}", soft_wrap=True)
    console.print(f"next    {command} train digits; {command} generate runs/digits", markup=False)
    return rows


def _config(name: str, seed: int, length: int, alongside: bool) -> RunConfig:
    config = recipe(name)
    log = replace(config.log, evaluate_every=50)
    config = replace(config, seed=seed, data=Retrieval(sequence_length=length), log=log)
    if not alongside:
        return config
    return replace(config, engine=replace(config.engine, threads=1, device="cpu"))


def _train_smt_dmt(run: Run, reporter: Reporter) -> list[Row]:
    after_smt = run.train(reporter, until="smt").evaluate(SEQUENCES)
    cost_of_smt = run.totals()
    after_dmt = run.train(reporter).evaluate(SEQUENCES)
    assert after_smt.teacher is not None and after_dmt.teacher is not None
    return [
        Row("teacher", after_smt.teacher, cost_of_smt),
        Row("RNN, SMT", after_smt.rnn, cost_of_smt),
        Row("RNN, SMT → DMT", after_dmt.rnn, run.totals()),
    ]


# ------------------------------------------------------------------------- BPTT in another process


class BaselineProcess:
    """Context manager that trains BPTT in a process of its own.

    The process trains for at least `steps` steps and for the seconds that `finish` sends it.
    """

    def __init__(self, config: RunConfig, folder: Path, steps: int) -> None:
        # The warm-up is a fraction of the steps, whose number is not known yet.
        ratio = MAX_STEPS_RATIO
        stage = replace(config.bptt, steps=ratio * steps, warmup=config.bptt.warmup / ratio)
        Run.create(replace(config, bptt=stage), folder, overwrite=True)
        self.folder, self.steps = folder, steps
        self.evaluate_every = max(1, config.log.evaluate_every)
        spawn = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        self.connection, self.far_end = spawn.Pipe()
        self.process = spawn.Process(target=_train, args=(self.far_end, folder, steps), daemon=True)

    def __enter__(self) -> "BaselineProcess":
        start_process(self.process)
        self.far_end.close()  # otherwise reading would not end when the process does
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.is_alive():
            self.process.kill()  # the next demo replaces its run
        self.process.join()

    def finish(self, seconds: float, reporter: Reporter) -> Run:
        """Wait until the run has trained for `seconds`, reporting its progress.

        Raises:
            MemtrainError: training failed.
        """
        with suppress(OSError):  # the process has ended: reported below
            self.connection.send(seconds)
        metrics, reported = MetricsFile(self.folder / "metrics.jsonl"), 0
        while not self.connection.poll(0.5):
            if not (lines := metrics.read()) or lines[-1]["step"] == reported:
                continue
            last = lines[-1]
            if reported:
                reporter.advance(last["step"], {"loss": last["loss"]})
            else:
                rate = last["step"] / max(1e-3, last["total_seconds"])
                steps = max(self.steps, last["step"], rate * seconds)
                steps = math.ceil(steps / self.evaluate_every) * self.evaluate_every
                reporter.stage("bptt", last["step"], steps)
            reported = last["step"]
        reporter.close()
        try:
            problem = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            problem = f"{self.folder}: the training process ended, exit code {code}"
        if problem:
            raise MemtrainError(problem)
        return Run.open(self.folder)


class _UntilEqual(Reporter):
    """Stops its run as a signal would, at the first evaluation after enough steps and seconds."""

    def __init__(self, run: Run, steps: int, connection: Connection) -> None:
        self.run, self.steps, self.connection = run, steps, connection
        self.seconds = math.inf

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if self.connection.poll():
            self.seconds = self.connection.recv()
        evaluated = step % self.run.config.log.evaluate_every == 0
        if evaluated and step >= self.steps and self.run.totals()["total_seconds"] >= self.seconds:
            signal.raise_signal(signal.SIGTERM)


def _train(connection: Connection, folder: Path, steps: int) -> None:
    """Entry point of the process; sends "" when training is done, or the error message."""
    die_with_parent()
    hear_interrupts(signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    try:
        run = Run.open(folder)
        with suppress(Interrupted):
            run.train(_UntilEqual(run, steps, connection))
        connection.send("")
    except MemtrainError as error:
        connection.send(str(error))
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone
    os._exit(0)  # a normal exit could still be aborted by torch's threads


# --------------------------------------------------------------------------------- table and page

HEADER = ("", "accuracy", "steps", "tokens", "sequential ops", "seconds")
GUESSING = 1 / (Retrieval().vocab_size - 1)
"""Accuracy of guessing."""


def _terminal_table(rows: list[Row], length: int, alongside: bool) -> Table:
    how = "side by side, one thread each" if alongside else "one after the other"
    table = Table(
        *(Column(name, justify="right" if name else "left", no_wrap=True) for name in HEADER),
        title=f"retrieval, T={length}: RNNs start from the empty memory, without a teacher",
        caption=f"{SEQUENCES:,} held-out sequences; guessing scores {GUESSING:.3f}; trained {how}; "
        "BPTT at its best checkpoint",
    )
    for row in rows:
        table.add_row(*row.cells(), style="bold" if row.name.endswith("DMT") else None)
    return table


def _page(rows: list[Row], ours: Run, baseline: Run, alongside: bool) -> str:
    config, cell, length = ours.config, ours.config.cell, ours.task.sequence_length
    how = "One trained after the other."
    if alongside:
        how = "Both trained at the same time, each in a process with one thread."
    smt, dmt = (_evaluations(ours, stage)[-1]["evaluation"]["drift"] for stage in ("smt", "dmt"))
    timesteps = list(range(len(smt["unexplained"])))
    return render_page(
        f"Remembering one token for {length} steps",
        "One recurrent cell, trained in two ways. SMT never unrolls it: a Transformer teacher "
        "provides memory labels, and the cell learns single steps in parallel. In DMT, which takes "
        f"{config.dmt.steps:,} steps after SMT's {config.smt.steps:,}, the cell is rolled out and "
        "learns to return to the teacher's memories. BPTT unrolls the cell and backpropagates the "
        "task's own loss through every step. RNNs are scored from the empty memory, without the "
        "teacher.",
        [
            PageTable(
                header=["method", *HEADER[1:]],
                rows=[row.cells() for row in rows],
                note=f"Accuracy on {SEQUENCES:,} held-out sequences; guessing scores "
                f"{GUESSING:.3f}. Sequential operations: the length of the critical path, forward "
                "and backward, counted on a step of plain operations. "
                f"{how} BPTT is scored at its best checkpoint, SMT → DMT at its last.",
                highlight=2,
            ),
            Heading(text="Accuracy during training"),
            Columns(
                parts=[
                    _accuracy_chart(ours, baseline, "total_seconds", "training seconds", False),
                    _accuracy_chart(
                        ours, baseline, "total_sequential_ops", "sequential operations", True
                    ),
                ]
            ),
            Heading(text="Why DMT"),
            Text(
                text="SMT trains single steps that start from the teacher's memories; an RNN "
                "starts each step from its own, and errors can add up. After SMT, one step from "
                f"the teacher's memory leaves {smt['one_step_unexplained']:.3f} of the variance "
                f"unexplained, and the rolled-out RNN ends at {smt['unexplained'][-1]:.3f}. DMT "
                "trains on the RNN's own memories: after it the rolled-out RNN ends at "
                f"{dmt['unexplained'][-1]:.3f}."
            ),
            Chart(
                title="Drift of the rolled-out memory",
                x_label="timestep t",
                y_label="1 − R²",
                series=[
                    Series(name="after SMT", x=timesteps, y=smt["unexplained"], dashed=True),
                    Series(name="after DMT", x=timesteps, y=dmt["unexplained"], emphasised=True),
                ],
                note="Distance from the teacher's memory as a fraction of its variance; "
                "0 is no drift.",
            ),
        ],
        f"Seed {config.seed}. Cell: {cell.layers}-layer Transformer, {cell.memory_tokens} memory "
        f"token of width {cell.memory_dim}; {config.teacher.encoder} encoder.\n"
        f"Batch {config.smt.batch_size}; learning rates: SMT {config.smt.learning_rate:g}, "
        f"DMT {config.dmt.learning_rate:g}, BPTT {baseline.config.bptt.learning_rate:g}. "
        f"DMT's gradients: {'through the rollout' if config.dmt.through_time else 'one step'}.",
    )


def _evaluations(run: Run, stage: str | None = None) -> list[dict]:
    lines = [line for line in run.metrics.read() if "evaluation" in line]
    return [line for line in lines if stage in (None, line["stage"])]


def _accuracy_chart(ours: Run, baseline: Run, key: str, label: str, log_x: bool) -> Chart:
    def curve(name: str, run: Run, model: str, stage: str | None = None, **style: bool) -> Series:
        records = _evaluations(run, stage)
        accuracy = [record["evaluation"][model]["accuracy"] for record in records]
        return Series(name=name, x=[record[key] for record in records], y=accuracy, **style)

    last_of_smt, last = _evaluations(ours, "smt")[-1], _evaluations(ours)[-1]
    before, after = (one["evaluation"]["rnn"]["accuracy"] for one in (last_of_smt, last))
    return Chart(
        title=f"Accuracy against {label}",
        x_label=label,
        y_label="accuracy",
        series=[
            curve("SMT → DMT", ours, "rnn", emphasised=True),
            curve("BPTT", baseline, "rnn"),
            curve("teacher", ours, "teacher", "smt", muted=True, dashed=True),
        ],
        log_x=log_x,
        y_range=(0, 1),
        note=f"SMT → DMT: the RNN, rolled out from the empty memory. It is at {before:.3f} where "
        f"DMT begins and at {after:.3f} at the end. Curves use "
        f"{ours.config.log.evaluate_sequences} held-out sequences, the table more.",
        marks={"DMT begins": last_of_smt[key]},
    )
