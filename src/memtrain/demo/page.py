"""The results of the demo: a table for the terminal, the outcome in words, a page of curves."""

import math
from dataclasses import dataclass

from rich.table import Column, Table

from memtrain.config import Retrieval
from memtrain.demo.baselines import RATES, scientific
from memtrain.evaluation.evaluate import Score
from memtrain.plotting.html import Chart, Columns, Heading, Notice, Series, Text, render_page
from memtrain.plotting.html import Table as PageTable
from memtrain.training.run import Run

SEQUENCES = 2048
"""Sequences behind every number of the table, and as many others to choose BPTT's rate."""
SOLVED = 0.99
"""Accuracy from which the task counts as learned."""
HEADER = ("", "accuracy", "steps", "tokens", "sequential ops", "seconds")
GUESSING = 1 / (Retrieval().vocab_size - 1)
"""Accuracy of guessing."""
SMT_DMT, BEST = 2, -1
"""Rows of the table: the RNN after SMT -> DMT, and the best of BPTT's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    score: Score
    cost: dict
    """Steps, tokens, sequential operations and seconds, under the names of `Run.totals`."""

    @property
    def accuracy(self) -> float:
        assert self.score.accuracy is not None  # the demo's task has tokens
        return self.score.accuracy

    def cells(self) -> list[str]:
        """The row as text, under `HEADER`."""
        counts = [self.cost[f"total_{key}"] for key in ("steps", "tokens", "sequential_ops")]
        numbers = [f"{self.accuracy:.4f}", *(f"{count:,}" for count in counts)]
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


def terminal_table(results: Results) -> Table:
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


def verdict(results: Results) -> str:
    """The outcome in words, whichever it is."""
    ours, best = results.rows[SMT_DMT], results.rows[BEST]
    rate, (own, accuracy) = scientific(RATES[results.best]), (ours.accuracy, best.accuracy)
    learned = [own >= SOLVED, accuracy >= SOLVED]
    words = f"SMT → DMT {'learned' if learned[0] else 'did not learn'} the task: accuracy "
    words += f"{own:.3f}. "
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


def demo_page(results: Results) -> str:
    ours = results.ours
    config, cell, length = ours.config, ours.config.cell, ours.task.sequence_length
    smt, dmt = (_evaluations(ours, stage)[-1]["evaluation"]["drift"] for stage in ("smt", "dmt"))
    timesteps = list(range(len(smt["unexplained"])))
    rates = [scientific(stage.learning_rate) for stage in (config.smt, config.dmt)]
    rates += map(scientific, RATES)
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
            Notice(text=verdict(results)),
            PageTable(
                header=["method", *HEADER[1:]],
                rows=[row.cells() for row in results.rows],
                note=f"Accuracy on {SEQUENCES:,} test sequences; guessing scores {GUESSING:.3f}. "
                "Each rate of BPTT has its own cost, the last row that of all three together, with "
                f"the accuracy of rate {scientific(RATES[results.best])}: the best on "
                f"{SEQUENCES:,} validation sequences, which also chose the checkpoint of each "
                "rate; SMT → DMT is scored at its last. Sequential operations: the length of the "
                "critical path, forward and backward, counted on a step of plain operations. "
                f"{_how_trained(results)}",
                highlight=SMT_DMT,
            ),
            Text(
                text="BPTT can be helped: with sequences of 8 and of 16 tokens first, it learns "
                "the task with this cell in 1,350 steps, and SMT → DMT in 850. The commands, with "
                "--bptt.curriculum and --smt.curriculum, are in the project's docs/faq.md."
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
                Series(name=f"rate {scientific(rate)}", x=x, y=y, colour=index)
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
            *(curve(f"BPTT, rate {scientific(rate)}", run, "rnn") for rate, run in rates),
            curve("teacher", ours, "teacher", "smt", muted=True, dashed=True),
        ],
        log_x=log_x,
        y_range=(0, 1),
        note=f"SMT → DMT: the RNN, rolled out from the empty memory. It is at {before:.3f} where "
        f"DMT begins and at {after:.3f} at the end. Curves use "
        f"{ours.config.log.evaluate_sequences} validation sequences, the table others.",
        marks={"DMT begins": last_of_smt[key]},
    )
