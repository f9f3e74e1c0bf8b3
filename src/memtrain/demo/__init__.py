"""The demo: train one cell by SMT -> DMT and by BPTT, and compare them in a table and on a page.

BPTT is trained at three learning rates, each for the longer of equal steps and equal seconds. The
best of them is chosen on other sequences than those that the table is about.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from memtrain.config import Retrieval, RunConfig
from memtrain.demo.baselines import RATES, BaselineQueue, BaselineTraining, scientific
from memtrain.demo.page import SEQUENCES, Results, Row, demo_page, terminal_table, verdict
from memtrain.evaluation.evaluate import EVALUATION_SEED, Evaluation, evaluate
from memtrain.files import write_output
from memtrain.recipes import recipe
from memtrain.training.console import Reporter
from memtrain.training.run import Run

TEST_SEED = EVALUATION_SEED - 1
"""Selects the sequences of the table. Those of `Run.evaluate` choose checkpoint and rate."""


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
        rows.append(Row(f"BPTT, rate {scientific(rate)}", _test(model).rnn, run.totals()))
    costs = [run.totals() for run in baselines]
    cost = {key: sum(one[key] for one in costs) for key in costs[0]}
    rows.append(Row("BPTT, best of 3", rows[3 + best].score, cost))

    results = Results(ours, baselines, best, rows, processes)
    console.print(terminal_table(results))
    console.print(verdict(results) + "\n", markup=False)
    page = folder / "index.html"
    write_output(page, demo_page(results).encode())
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
