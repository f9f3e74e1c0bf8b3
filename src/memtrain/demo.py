"""The demo: train one cell by SMT -> DMT and by BPTT, and compare them in a table and on a page.

BPTT is trained at three learning rates, each for the longer of equal steps and equal seconds. The
best of them is chosen on other sequences than those that the table is about.
"""

import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from memtrain.config import Retrieval, RunConfig
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import EVALUATION_SEED, Evaluation, Score, evaluate
from memtrain.files import write_output
from memtrain.plotting.html import Chart, Columns, Heading, Notice, Series, Text, render_page
from memtrain.plotting.html import Table as PageTable
from memtrain.recipes import recipe
from memtrain.runs.processes import die_with_parent, hear_interrupts, start_process
from memtrain.runs.progress import MetricsFile
from memtrain.training.console import Reporter
from memtrain.training.run import Interrupted, Run

RATES = (3e-4, 1e-3, 3e-3)
"""BPTT's learning rates."""
SEQUENCES = 2048
"""Sequences behind every number of the table, and as many others to choose BPTT's rate."""
TEST_SEED = EVALUATION_SEED - 1
"""Selects the sequences of the table. Those of `Run.evaluate` choose checkpoint and rate."""
MAX_STEPS_RATIO = 50
"""Upper bound on BPTT's steps, as a multiple of equal steps, however fast they are."""
SOLVED = 0.99
"""Accuracy from which the task counts as learned."""


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
        return [self.name, *numbers, f"{self.cost['total_seconds']:,.1f}"]


@dataclass(frozen=True, slots=True)
class Results:
    """What the demo measured."""

    ours: Run
    """Trained by SMT -> DMT."""
    baselines: list[Run]
    """Trained by BPTT, one per rate of `RATES`."""
    best: int
    """Index of the rate with the highest accuracy on the validation sequences."""
    rows: list[Row]
    """Teacher, RNN after SMT, after DMT; BPTT at each rate; the best of them with the cost of
    all."""
    processes: int
    """How many trained at the same time."""


def run_demo(
    folder: Path,
    seed: int,
    length: int,
    make_reporter: Callable[[], Reporter],
    *,
    processes: int = 1,
    command: str = "memtrain",
) -> list[Row]:
    """Train both ways, print the table and write the page.

    Args:
        folder: for the runs and index.html; an earlier demo there is replaced.
        seed: of all runs.
        length: tokens per sequence.
        make_reporter: creates the progress display of SMT -> DMT, then that of BPTT.
        processes: how many trainings at the same time, each with one thread on the CPU if there is
            more than one.
        command: how the user calls memtrain, for the closing hint.
    """
    smt_config = _config("retrieval", seed, length, processes)
    bptt_config = _config("retrieval-bptt", seed, length, processes)
    console = Console(highlight=False)
    console.print(
        f"[bold]memtrain demo[/bold]: remember one token of the first half of {length} tokens "
        "until the end, then output it. The same Transformer cell is trained in two ways.\n"
    )
    console.print("SMT → DMT: a teacher learns what to remember, the cell learns to follow it")
    ours = Run.create(smt_config, folder / "smt-dmt", overwrite=True)
    steps = sum(stage.steps for stage in smt_config.stages().values())
    trainings = [
        BaselineTraining(_at_rate(bptt_config, rate), folder / f"bptt-{rate:g}", steps)
        for rate in RATES
    ]
    with BaselineQueue(trainings, processes) as queue:
        queue.start(processes - 1)  # one process is this one
        rows = _train_smt_dmt(ours, make_reporter())
        console.print(f"BPTT: the same cell, unrolled, at {len(RATES)} learning rates")
        queue.finish(ours.totals()["total_seconds"], make_reporter())
    baselines = [Run.open(training.folder) for training in trainings]
    # At a constant learning rate the loss still spikes now and then: score the best checkpoint.
    scored = [Run.open(run.folder, best=True) for run in baselines]
    validation = [run.evaluate(SEQUENCES).rnn for run in scored]
    best = max(range(len(RATES)), key=lambda i: (validation[i].accuracy, -validation[i].nats))
    for rate, run, model in zip(RATES, baselines, scored, strict=True):
        rows.append(Row(f"BPTT, rate {_scientific(rate)}", _test(model).rnn, run.totals()))
    costs = [run.totals() for run in baselines]
    cost = {key: sum(one[key] for one in costs) for key in costs[0]}
    rows.append(Row("BPTT, best of 3", rows[3 + best].score, cost))

    results = Results(ours, baselines, best, rows, processes)
    console.print(_terminal_table(results))
    console.print(_verdict(results) + "\n", markup=False)
    page = folder / "index.html"
    write_output(page, _page(results).encode())
    console.print(f"curves  {page.resolve().as_uri()}", soft_wrap=True)
    console.print(f"next    {command} train digits; {command} generate runs/digits", markup=False)
    return rows


def _config(name: str, seed: int, length: int, processes: int) -> RunConfig:
    config = recipe(name)
    every = 50 if config.smt.steps else 100  # BPTT has more steps
    log = replace(config.log, evaluate_every=every)
    config = replace(config, seed=seed, data=Retrieval(sequence_length=length), log=log)
    if processes == 1:
        return config
    return replace(config, engine=replace(config.engine, threads=1, device="cpu"))


def _at_rate(config: RunConfig, rate: float) -> RunConfig:
    return replace(config, bptt=replace(config.bptt, learning_rate=rate))


def _scientific(rate: float) -> str:
    """A learning rate as 3e−4, with a minus sign, where no line is broken."""
    return f"{rate:.0e}".replace("e-0", "e\N{MINUS SIGN}")


def _train_smt_dmt(run: Run, reporter: Reporter) -> list[Row]:
    after_smt = _test(run.train(reporter, until="smt"))
    cost_of_smt = run.totals()
    after_dmt = _test(run.train(reporter))
    assert after_smt.teacher is not None and after_dmt.teacher is not None
    return [
        Row("teacher", after_smt.teacher, cost_of_smt),
        Row("RNN, SMT", after_smt.rnn, cost_of_smt),
        Row("RNN, SMT → DMT", after_dmt.rnn, run.totals()),
    ]


def _test(run: Run) -> Evaluation:
    """Score a run on sequences on which nothing was chosen."""
    with run.engine.eval_mode():
        return evaluate(
            run.task,
            run.rnn,
            run.teacher,
            sequences=SEQUENCES,
            device=run.engine.device,
            seed=TEST_SEED,
        )


# ----------------------------------------------------------------------- BPTT in other processes


class BaselineTraining:
    """BPTT in a process of its own.

    It trains for at least `steps` steps and for the seconds that `equal_seconds` sends it.
    """

    def __init__(self, config: RunConfig, folder: Path, steps: int) -> None:
        # The warm-up is a fraction of the steps, whose number is not known yet.
        ratio = MAX_STEPS_RATIO
        stage = replace(config.bptt, steps=ratio * steps, warmup=config.bptt.warmup / ratio)
        Run.create(replace(config, bptt=stage), folder, overwrite=True)
        self.folder, self.steps = folder, steps
        self.rate = config.bptt.learning_rate
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.last = {"step": 0, "total_seconds": 0.0, "loss": math.nan}
        """The latest line of its metrics."""
        self.began = math.inf
        self.done = False
        spawn = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        self.connection, self.far_end = spawn.Pipe()
        self.process = spawn.Process(target=_train, args=(self.far_end, folder, steps), daemon=True)

    def start(self) -> None:
        start_process(self.process)
        self.began = time.monotonic()
        self.far_end.close()  # otherwise reading would not end when the process does

    def kill(self) -> None:
        """End the process, if it runs; the next demo replaces its run."""
        if not self.waiting:
            self.process.kill()
            self.process.join()

    @property
    def waiting(self) -> bool:
        """Whether it has not been started."""
        return self.began == math.inf

    @property
    def running(self) -> bool:
        return not self.waiting and not self.done

    def equal_seconds(self, seconds: float) -> None:
        """Send how long to train at least."""
        with suppress(OSError):  # the process has ended: `poll` reports it
            self.connection.send(seconds)

    def poll(self) -> None:
        """Read how far it is.

        Raises:
            MemtrainError: training failed.
        """
        self.last = (self.metrics.read() or [self.last])[-1]
        if not self.running or not self.connection.poll():
            return
        try:
            problem = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            problem = f"{self.folder}: the training process ended, exit code {code}"
        if problem:
            raise MemtrainError(problem)
        self.done = True

    def fraction(self, seconds: float) -> float:
        """How much of the training is done."""
        if self.done:
            return 1.0
        steps, trained = self.last["step"] / self.steps, self.last["total_seconds"]
        return min(1.0, steps, trained / max(1e-3, seconds))


class BaselineQueue:
    """Context manager that runs trainings, a few at the same time; at its end none is left."""

    def __init__(self, trainings: Sequence[BaselineTraining], at_once: int) -> None:
        self.trainings, self.at_once = trainings, at_once

    def __enter__(self) -> "BaselineQueue":
        return self

    def __exit__(self, *error: object) -> None:
        for training in self.trainings:
            training.kill()

    def start(self, at_once: int) -> list[BaselineTraining]:
        """Start trainings until this many run; returns them."""
        running = sum(training.running for training in self.trainings)
        waiting = [training for training in self.trainings if training.waiting]
        started = waiting[: max(0, at_once - running)]
        for training in started:
            training.start()
        return started

    def finish(self, seconds: float, reporter: Reporter) -> None:
        """Run all trainings to their end, each for at least these seconds; report the progress.

        Raises:
            MemtrainError: one of them failed.
        """
        for training in self.trainings:
            if training.running:
                training.equal_seconds(seconds)
                training.poll()
        began = self.steps
        reporter.stage("bptt", began, sum(MAX_STEPS_RATIO * one.steps for one in self.trainings))
        while not all(training.done for training in self.trainings):
            for training in self.start(self.at_once):
                training.equal_seconds(seconds)
            for training in self.trainings:
                training.poll()
            if self.steps > began:
                self._report(seconds, reporter)
            running = [training.connection for training in self.trainings if training.running]
            multiprocessing.connection.wait(running, timeout=0.5)
        reporter.close()

    @property
    def steps(self) -> int:
        """Steps of all trainings so far."""
        return sum(training.last["step"] for training in self.trainings)

    def _report(self, seconds: float, reporter: Reporter) -> None:
        reporter.clock(self._left(seconds))
        begun = [training for training in self.trainings if training.last["step"]]
        losses = {f"loss({_scientific(one.rate)})": one.last["loss"] for one in begun}
        reporter.advance(self.steps, losses)

    def _left(self, seconds: float) -> float:
        """Seconds until all trainings have ended; at least one while one still runs."""
        fractions = [training.fraction(seconds) for training in self.trainings]
        now = time.monotonic()
        took = [
            (now - training.began) / fraction
            for training, fraction in zip(self.trainings, fractions, strict=True)
            if training.running and fraction
        ]
        typical = sum(took) / len(took) if took else seconds
        left = [typical * (1 - fraction) for fraction in fractions]
        least = 0.0 if all(training.done for training in self.trainings) else 1.0
        return max(*left, sum(left) / self.at_once, least)


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
SMT_DMT, BEST = 2, -1
"""Rows of the table: the RNN after SMT -> DMT, and the best of BPTT's."""


def _terminal_table(results: Results) -> Table:
    length = results.ours.task.sequence_length
    table = Table(
        *(Column(name, justify="right" if name else "left", no_wrap=True) for name in HEADER),
        title=f"retrieval, T={length}: RNNs start from the empty memory, without a teacher",
        caption=f"{SEQUENCES:,} held-out sequences; guessing scores {GUESSING:.3f}. "
        f"{_how_trained(results)} BPTT: at the best checkpoint of each rate; the last line is the "
        "best rate, chosen on other sequences, with the cost of all three.",
        caption_justify="left",
    )
    for index, row in enumerate(results.rows):
        table.add_row(*row.cells(), style="bold" if index == SMT_DMT else None)
    return table


def _how_trained(results: Results) -> str:
    if results.processes == 1:
        return "Trained one after the other."
    count = ("two", "three", "four")[min(results.processes, 1 + len(RATES)) - 2]
    return f"Trained {count} at a time, each in a process with one thread."


def _verdict(results: Results) -> str:
    """The outcome in words, whichever it is."""
    ours, best = results.rows[SMT_DMT], results.rows[BEST]
    rate, accuracy = _scientific(RATES[results.best]), best.score.accuracy
    learned = [row.score.accuracy >= SOLVED for row in (ours, best)]
    words = f"SMT → DMT {'learned' if learned[0] else 'did not learn'} the task: accuracy "
    words += f"{ours.score.accuracy:.3f}. "
    if learned[1]:
        words += f"BPTT learned it at rate {rate}: {accuracy:.3f}. "
    elif accuracy < GUESSING + 0.05:
        words += f"BPTT did not, at any of three rates: the best, {rate}, scores {accuracy:.3f}, "
        words += f"guessing {GUESSING:.3f}. "
    else:
        words += f"BPTT learned a part of it: its best rate, {rate}, scores {accuracy:.3f}, "
        words += f"guessing {GUESSING:.3f}. "
    for name, run, did in zip(
        ("SMT → DMT", "BPTT"),
        (results.ours, results.baselines[results.best]),
        learned,
        strict=True,
    ):
        if did and (first := _first_solved(run)):
            words += f"{name} first reached {SOLVED} after {first['total_steps']:,} steps, "
            words += f"{first['total_sequential_ops']:,} sequential operations and "
            words += f"{first['total_seconds']:.1f} seconds. "
    ratios = [best.cost[key] / ours.cost[key] for key in ("total_seconds", "total_sequential_ops")]
    return (
        f"{words}Every rate of BPTT had at least the steps and the seconds of SMT → DMT; all three "
        f"together took {ratios[0]:.1f} times its seconds and {ratios[1]:.0f} times its sequential "
        "operations."
    )


def _first_solved(run: Run) -> dict | None:
    """The first evaluation during training with an accuracy of `SOLVED`."""
    solved = (r for r in _evaluations(run) if r["evaluation"]["rnn"]["accuracy"] >= SOLVED)
    return next(solved, None)


def _page(results: Results) -> str:
    ours = results.ours
    config, cell, length = ours.config, ours.config.cell, ours.task.sequence_length
    smt, dmt = (_evaluations(ours, stage)[-1]["evaluation"]["drift"] for stage in ("smt", "dmt"))
    timesteps = list(range(len(smt["unexplained"])))
    rates = [_scientific(stage.learning_rate) for stage in (config.smt, config.dmt)]
    rates += map(_scientific, RATES)
    gradients = "through the rollout" if config.dmt.through_time else "of one step"
    return render_page(
        f"Remembering one of {length} tokens",
        f"A marked token in the first half of {length} has to be output at the end, as the paper's "
        "authors have it. One recurrent cell is trained in two ways. SMT never unrolls it: a "
        "Transformer teacher provides memory labels, and the cell learns single steps in parallel. "
        f"In DMT, which takes {config.dmt.steps:,} steps after SMT's {config.smt.steps:,}, the "
        "cell is rolled out and learns to return to the teacher's memories. BPTT unrolls the cell "
        "and backpropagates the task's own loss through every step, at three learning rates. RNNs "
        "are scored from the empty memory, without the teacher.",
        [
            Notice(text=_verdict(results)),
            PageTable(
                header=["method", *HEADER[1:]],
                rows=[row.cells() for row in results.rows],
                note=f"Accuracy on {SEQUENCES:,} test sequences; guessing scores {GUESSING:.3f}. "
                "Each rate of BPTT has its own cost, the last row that of all three together, with "
                f"the accuracy of rate {_scientific(RATES[results.best])}: the best on "
                f"{SEQUENCES:,} validation sequences, which also chose the checkpoint of each "
                "rate; SMT → DMT is scored at its last. Sequential operations: the length of the "
                "critical path, forward and backward, counted on a step of plain operations. "
                f"{_how_trained(results)}",
                highlight=SMT_DMT,
            ),
            Heading(text="Accuracy during training"),
            Columns(
                parts=[
                    _accuracy_chart(results, "total_seconds", "training seconds", False),
                    _accuracy_chart(results, "total_sequential_ops", "sequential operations", True),
                ]
            ),
            _loss_chart(results),
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
        f"Batch {config.smt.batch_size}; learning rates: SMT {rates[0]}, DMT {rates[1]}, BPTT "
        f"{', '.join(rates[2:])}. DMT's gradients: {gradients}.\n"
        "SMT → DMT has the settings of the recipe retrieval, from earlier runs; BPTT has those "
        "of retrieval-bptt, and its rate is chosen here.",
    )


def _loss_chart(results: Results) -> Chart:
    """BPTT's rates one by one; their accuracies can be hard to tell apart."""
    curves = [_evaluations(run) for run in results.baselines]
    steps = [[record["total_steps"] for record in records] for records in curves]
    nats = [[record["evaluation"]["rnn"]["nats"] for record in records] for records in curves]
    rates = zip(RATES, steps, nats, strict=True)
    guessing = -math.log(GUESSING)
    return Chart(
        title="BPTT at three learning rates",
        x_label="steps",
        y_label="held-out loss, nats",
        series=[
            *(
                Series(name=f"rate {_scientific(rate)}", x=x, y=y, colour=index)
                for index, (rate, x, y) in enumerate(rates, start=1)  # as beside SMT → DMT
            ),
            Series(
                name="guessing",
                x=[0, max(x[-1] for x in steps)],
                y=[guessing, guessing],
                muted=True,
                dashed=True,
            ),
        ],
        note=f"Guessing with equal probabilities has a loss of {guessing:.3f}. Curves use "
        f"{results.ours.config.log.evaluate_sequences} validation sequences.",
    )


def _evaluations(run: Run, stage: str | None = None) -> list[dict]:
    lines = [line for line in run.metrics.read() if "evaluation" in line]
    return [line for line in lines if stage in (None, line["stage"])]


def _accuracy_chart(results: Results, key: str, label: str, log_x: bool) -> Chart:
    def curve(name: str, run: Run, model: str, stage: str | None = None, **style: bool) -> Series:
        records = _evaluations(run, stage)
        accuracy = [record["evaluation"][model]["accuracy"] for record in records]
        return Series(name=name, x=[record[key] for record in records], y=accuracy, **style)

    ours = results.ours
    last_of_smt, last = _evaluations(ours, "smt")[-1], _evaluations(ours)[-1]
    before, after = (one["evaluation"]["rnn"]["accuracy"] for one in (last_of_smt, last))
    rates = zip(RATES, results.baselines, strict=True)
    return Chart(
        title=f"Accuracy against {label}",
        x_label=label,
        y_label="accuracy",
        series=[
            curve("SMT → DMT", ours, "rnn", emphasised=True),
            *(curve(f"BPTT, rate {_scientific(rate)}", run, "rnn") for rate, run in rates),
            curve("teacher", ours, "teacher", "smt", muted=True, dashed=True),
        ],
        log_x=log_x,
        y_range=(0, 1),
        note=f"SMT → DMT: the RNN, rolled out from the empty memory. It is at {before:.3f} where "
        f"DMT begins and at {after:.3f} at the end. Curves use "
        f"{ours.config.log.evaluate_sequences} validation sequences, the table others.",
        marks={"DMT begins": last_of_smt[key]},
    )
