"""The demo: one task, one cell, trained by SMT -> DMT and by BPTT; a table and a page tell.

BPTT trains for the longer of equal steps and equal seconds, at the best of three learning rates
(docs/LOG.md has the search).
"""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from memtrain.config import Retrieval, RunConfig
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import Score
from memtrain.files import write_named
from memtrain.plotting.html import Chart, Columns, Heading, Mark, Series, Text, render_page
from memtrain.plotting.html import Table as PageTable
from memtrain.recipes import recipe
from memtrain.training.console import Reporter
from memtrain.training.metrics import MetricsFile
from memtrain.training.processes import die_with_parent, hear_interrupts, start_process
from memtrain.training.run import Interrupted, Run
from memtrain.training.step import Trainer

SEQUENCES = 2048
"""Held-out sequences behind every figure of the table."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    score: Score
    cost: dict
    """Steps, tokens, sequential operations and seconds, as `Run.totals` names them."""


def run_demo(
    folder: Path,
    seed: int,
    length: int,
    make_reporter: Callable[[], Reporter],
    *,
    alongside: bool = False,
    command: str = "memtrain",
) -> list[Row]:
    """Train both, print the table, write the page; returns the table's rows.

    With `alongside` they train at the same time, each in a process with one thread.
    """
    ours = _config("retrieval", seed, length, alongside)
    theirs = _config("retrieval-bptt", seed, length, alongside)
    console = Console(highlight=False)
    console.print(
        f"[bold]memtrain demo[/bold]: remember one token over {length} steps, "
        "then say it. The same Transformer cell twice.\n"
    )
    console.print("SMT → DMT: a teacher learns what to remember, the cell learns to follow it")
    train = _train_alongside if alongside else _train_in_turn
    run, rows, baseline = train(ours, theirs, folder, console, make_reporter)
    # At a constant rate its loss still jumps now and then: it is taken where it was best.
    best = Run.open(baseline.folder, best=True)
    rows.append(Row("RNN, BPTT", best.evaluate(SEQUENCES).rnn, baseline.totals()))

    console.print(_terminal_table(rows, length, alongside))
    page = folder / "index.html"
    write_named(page, _page(rows, run, baseline).encode())
    console.print(f"curves  {page.resolve().as_uri()}", soft_wrap=True)
    console.print(f"next    {command} train digits; {command} generate runs/digits", markup=False)
    return rows


def _train_in_turn(
    ours: RunConfig,
    theirs: RunConfig,
    folder: Path,
    console: Console,
    make_reporter: Callable[[], Reporter],
) -> tuple[Run, list[Row], Run]:
    run = Run.create(ours, folder / "smt-dmt", overwrite=True)
    rows = _train_ours(run, make_reporter())
    steps = _longer_of_equal_steps_and_seconds(theirs, run)
    theirs = replace(theirs, bptt=replace(theirs.bptt, steps=steps))
    baseline = Run.create(theirs, folder / "bptt", overwrite=True)
    console.print(f"BPTT: the same cell, unrolled, for {steps} steps")
    return run, rows, baseline.train(make_reporter())


def _train_alongside(
    ours: RunConfig,
    theirs: RunConfig,
    folder: Path,
    console: Console,
    make_reporter: Callable[[], Reporter],
) -> tuple[Run, list[Row], Run]:
    run = Run.create(ours, folder / "smt-dmt", overwrite=True)
    steps = sum(stage.steps for stage in ours.stages().values())
    with BaselineProcess(theirs, folder / "bptt", steps) as baseline:
        rows = _train_ours(run, make_reporter())
        console.print("BPTT: the same cell, unrolled; it has trained at the same time")
        return run, rows, baseline.finish(run.totals()["total_seconds"], make_reporter())


def _config(name: str, seed: int, length: int, alongside: bool) -> RunConfig:
    config = recipe(name)
    log = replace(config.log, evaluate_every=50)
    config = replace(config, seed=seed, data=Retrieval(sequence_length=length), log=log)
    if not alongside:
        return config
    return replace(config, engine=replace(config.engine, threads=1, device="cpu"))


def _train_ours(run: Run, reporter: Reporter) -> list[Row]:
    """SMT, a look, DMT, a look."""
    after_smt = run.train(reporter, until="smt").evaluate(SEQUENCES)
    cost_of_smt = run.totals()
    after_dmt = run.train(reporter).evaluate(SEQUENCES)
    assert after_smt.teacher is not None and after_dmt.teacher is not None
    return [
        Row("teacher", after_smt.teacher, cost_of_smt),
        Row("RNN, SMT", after_smt.rnn, cost_of_smt),
        Row("RNN, SMT → DMT", after_dmt.rnn, run.totals()),
    ]


def _longer_of_equal_steps_and_seconds(config: RunConfig, ours: Run, trial: int = 12) -> int:
    """How many BPTT steps take at least the steps and the seconds that SMT -> DMT took."""
    spare = Run(config, ours.folder)
    trainer = Trainer(spare.objective("bptt"), config.bptt, spare.task, spare.engine, 0)
    for _ in range(trial // 2):  # a GPU captures its step after three
        trainer.train_step()
    trainer.check()  # waits for the device
    began = time.perf_counter()
    for _ in range(trial):
        trainer.train_step()
    trainer.check()
    seconds_a_step = (time.perf_counter() - began) / trial
    totals = ours.totals()
    return max(int(totals["total_steps"]), math.ceil(totals["total_seconds"] / seconds_a_step))


# ------------------------------------------------------------------------- the baseline's process

MOST = 50
"""Times the equal steps that BPTT takes at most, however fast its steps are."""


class BaselineProcess:
    """`with Alongside(config, folder, steps) as baseline:` trains BPTT while the caller trains too.

    It goes on until it has had as many steps, and as many seconds as the caller then tells.
    """

    def __init__(self, config: RunConfig, folder: Path, steps: int) -> None:
        # The warm-up is a share of the steps, and these are not known yet.
        stage = replace(config.bptt, steps=MOST * steps, warmup=config.bptt.warmup / MOST)
        Run.create(replace(config, bptt=stage), folder, overwrite=True)
        self.folder, self.steps, self.look = folder, steps, max(1, config.log.evaluate_every)
        spawn = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        self.connection, self.there = spawn.Pipe()
        self.process = spawn.Process(target=_train, args=(self.there, folder, steps), daemon=True)

    def __enter__(self) -> "BaselineProcess":
        start_process(self.process)
        self.there.close()  # else nobody would hear that the process is gone
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.is_alive():
            self.process.kill()  # the next demo replaces its run
        self.process.join()

    def finish(self, seconds: float, reporter: Reporter) -> Run:
        """The run once it has trained for as many seconds; the reporter hears of it meanwhile.

        Raises:
            MemtrainError: it failed.
        """
        with suppress(OSError):  # it is gone: that is told below
            self.connection.send(seconds)
        metrics, told = MetricsFile(self.folder / "metrics.jsonl"), 0
        while not self.connection.poll(0.5):
            if not (lines := metrics.read()) or lines[-1]["step"] == told:
                continue
            last = lines[-1]
            if not told:
                rate = last["step"] / max(1e-3, last["total_seconds"])
                steps = max(self.steps, last["step"], rate * seconds)
                reporter.stage("bptt", last["step"], math.ceil(steps / self.look) * self.look)
            else:
                reporter.advance(last["step"], {"loss": last["loss"]})
            told = last["step"]
        reporter.close()
        self._receive()
        return Run.open(self.folder)

    def _receive(self) -> None:
        """Hear that it is done, or why not."""
        try:
            problem = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            problem = f"{self.folder}: the process that trains it ended, exit code {code}"
        if problem:
            raise MemtrainError(problem)


class _UntilEqual(Reporter):
    """Stops its run as a signal would, at the first look after it has had steps and seconds."""

    def __init__(self, run: Run, steps: int, connection: Connection) -> None:
        self.run, self.steps, self.connection = run, steps, connection
        self.seconds = math.inf

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if self.connection.poll():
            self.seconds = self.connection.recv()
        looked = step % self.run.config.log.evaluate_every == 0
        if looked and step >= self.steps and self.run.totals()["total_seconds"] >= self.seconds:
            signal.raise_signal(signal.SIGTERM)


def _train(connection: Connection, folder: Path, steps: int) -> None:
    """The process. It says "" when it is done, or what went wrong."""
    die_with_parent()
    hear_interrupts(signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this one
    try:
        run = Run.open(folder)
        with suppress(Interrupted):
            run.train(_UntilEqual(run, steps, connection))
        connection.send("")
    except MemtrainError as error:
        connection.send(str(error))
    except (EOFError, OSError):
        os._exit(1)  # nobody listens any more
    os._exit(0)  # torch's threads could still abort a process that ends as usual


# --------------------------------------------------------------------------------- table and page

HEADER = ("", "accuracy", "steps", "tokens", "sequential operations", "seconds")


def _cells(row: Row) -> list[str]:
    cost = row.cost
    return [
        row.name,
        f"{row.score.accuracy:.4f}",
        f"{cost['total_steps']:,}",
        f"{cost['total_tokens']:,}",
        f"{cost['total_sequential_ops']:,}",
        f"{cost['total_seconds']:.1f}",
    ]


def _terminal_table(rows: list[Row], length: int, alongside: bool) -> Table:
    chance = 1 / (Retrieval().vocab_size - 1)
    how = "side by side, one thread each" if alongside else "one after the other"
    table = Table(
        title=f"retrieval, T={length}: RNNs start from the empty memory, without a teacher",
        caption=f"{SEQUENCES:,} held-out sequences; chance is {chance:.3f}; trained {how}; "
        "BPTT at its best checkpoint",
    )
    for column in HEADER:
        name = column.replace("sequential operations", "sequential ops")
        table.add_column(name, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        style = "bold" if row.name.endswith("DMT") else None
        table.add_row(*_cells(row), style=style)
    return table


def _page(rows: list[Row], ours: Run, baseline: Run) -> str:
    length = ours.task.sequence_length
    return render_page(
        f"Remembering one token over {length} steps",
        "One recurrent cell, trained twice. SMT never unrolls it: a Transformer teacher makes "
        "memory labels, the cell learns single steps in parallel. In DMT, which takes "
        f"{ours.config.dmt.steps:,} steps after SMT's {ours.config.smt.steps:,}, the cell is "
        "rolled out and learns to come back to the teacher's memories. BPTT unrolls the cell and "
        "backpropagates the task's own loss through every step. RNNs are scored from the empty "
        "memory, without the teacher.",
        [
            PageTable(
                header=["method", *HEADER[1:]],
                rows=[_cells(row) for row in rows],
                note=f"Accuracy on {SEQUENCES:,} held-out sequences; chance is "
                f"{1 / (ours.task.vocab_size - 1):.3f}. Sequential operations: the length of the "
                "critical path, forward and backward, counted on a step of plain operations. "
                f"{_how(ours)} BPTT is scored at its best checkpoint, SMT → DMT at its last.",
                highlight=2,
            ),
            Heading(text="How they get there"),
            Columns(
                parts=[
                    _accuracy_chart(ours, baseline, "total_seconds", "training seconds", False),
                    _accuracy_chart(
                        ours, baseline, "total_sequential_ops", "sequential operations", True
                    ),
                ]
            ),
            Heading(text="Why DMT"),
            Text(text=_why_dmt(ours)),
            _drift_chart(ours),
        ],
        _footer(ours, baseline),
    )


def _how(ours: Run) -> str:
    if ours.config.engine.threads == 1:
        return "Both trained at the same time, each in a process with one thread."
    return "One trained after the other."


def _evaluations(run: Run, stage: str | None = None) -> list[dict]:
    return [
        record
        for record in run.metrics.read()
        if "evaluation" in record and stage in (None, record["stage"])
    ]


def _why_dmt(ours: Run) -> str:
    """How far errors add up, in this run's own numbers."""
    smt, dmt = (_evaluations(ours, stage)[-1]["evaluation"]["drift"] for stage in ("smt", "dmt"))
    return (
        "SMT trains single steps that start from the teacher's memories; an RNN starts each step "
        "from its own, and errors can add up. After SMT, one step from the teacher's memory leaves "
        f"{smt['one_step_unexplained']:.3f} of the variance unexplained, and the rolled-out RNN "
        f"ends at {smt['unexplained'][-1]:.3f}. DMT trains on the RNN's own memories: after it the "
        f"rolled-out RNN ends at {dmt['unexplained'][-1]:.3f}."
    )


def _accuracy_chart(ours: Run, baseline: Run, key: str, label: str, log_x: bool) -> Chart:
    def curve(name: str, run: Run, model: str, stage: str | None = None, **style) -> Series:
        records = _evaluations(run, stage)
        return Series(
            name=name,
            x=[record[key] for record in records],
            y=[record["evaluation"][model]["accuracy"] for record in records],
            **style,
        )

    last_of_smt = _evaluations(ours, "smt")[-1]
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
        note="SMT → DMT: the RNN, rolled out from the empty memory. It is at "
        f"{_rnn_accuracy(last_of_smt):.3f} where DMT begins and at "
        f"{_rnn_accuracy(_evaluations(ours)[-1]):.3f} at the end. Curves are of "
        f"{ours.config.log.evaluate_sequences} held-out sequences, the table is of more.",
        marks=[Mark(x=last_of_smt[key], label="DMT begins")],
    )


def _rnn_accuracy(record: dict) -> float:
    return record["evaluation"]["rnn"]["accuracy"]


def _drift_chart(ours: Run) -> Chart:
    def path(name: str, stage: str, **style) -> Series:
        values = _evaluations(ours, stage)[-1]["evaluation"]["drift"]["unexplained"]
        return Series(name=name, x=list(range(len(values))), y=values, **style)

    return Chart(
        title="Drift of the rolled-out memory",
        x_label="timestep t",
        y_label="1 − R²",
        series=[
            path("after SMT", "smt", dashed=True),
            path("after DMT", "dmt", emphasised=True),
        ],
        note="Distance from the teacher's memory as a share of its variance; 0 is no drift.",
    )


def _footer(ours: Run, baseline: Run) -> str:
    cell, smt, dmt = ours.config.cell, ours.config.smt, ours.config.dmt
    return (
        f"Seed {ours.config.seed}. Cell: {cell.layers}-layer Transformer, "
        f"{cell.memory_tokens} memory token of width {cell.memory_dim}; "
        f"{ours.config.teacher.encoder} encoder.\n"
        f"Batch {smt.batch_size}; learning rates: SMT {smt.learning_rate:g}, "
        f"DMT {dmt.learning_rate:g}, BPTT {baseline.config.bptt.learning_rate:g}. "
        f"DMT's gradients: {'through the rollout' if dmt.through_time else 'one step'}."
    )
