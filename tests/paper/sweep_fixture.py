"""A figure of the tests' own: small runs that take a moment each, one of which fails on demand."""

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conftest import TINY
from memtrain.config import BPTTConfig, DMTConfig, LogConfig
from memtrain.paper import load
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict
from memtrain.paper.plots import mean
from memtrain.paper.results import ResultsFile
from memtrain.paper.sweep import results_of
from memtrain.paper.workers import _serve as SERVE
from memtrain.training.run import Run

ALONE = replace(TINY, smt=replace(TINY.smt, steps=0), dmt=replace(TINY.dmt, steps=0))
"""Trained by BPTT only, which is quicker."""


def jobs_of(name: str, folder: Path) -> list[tuple[Experiment, Job]]:
    figure = load(name)
    return [(figure, job) for job in figure.grid(Setup(folder=folder))]


def stored(folder: Path, jobs: list[tuple[Experiment, Job]]) -> list[Result]:
    """The results of a figure's jobs in a folder."""
    return results_of(ResultsFile(folder).by_id(), jobs[0][0], [job for _, job in jobs])


class Twenty(Experiment):
    """Twenty runs, each long enough to be killed in the middle."""

    name = "sweep_fixture:Twenty"
    claim = "There are as many results as runs."
    runs, steps = 20, 200
    base = TINY

    def grid(self, setup: Setup) -> list[Job]:
        log = LogConfig(every=5, evaluate_every=0, evaluate_sequences=8, checkpoint_every=10)
        return [
            Job(
                config=replace(self.base, seed=seed, bptt=BPTTConfig(steps=self.steps), log=log),
                tags={"seed": seed},
            )
            for seed in range(self.runs)
        ]

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        return Verdict(
            holds=len(results) == self.runs,
            sentence=f"{len(results)} results.",
            numbers={"nats": mean(results, "rnn_nats")},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        from matplotlib.figure import Figure

        return Figure()


def die_before_reading(connection, folder, threads, on_gpu) -> None:
    """What a worker does, the first time; its work lies there unread."""
    if (folder / "died").exists():
        return SERVE(connection, folder, threads, on_gpu)
    connection.poll(30)
    (folder / "died").touch()
    os._exit(9)


class Quick(Twenty):
    """The same in less time."""

    name = "sweep_fixture:Quick"
    runs, steps = 9, 30


class Few(Twenty):
    """Four of them."""

    name = "few"  # the sweep calls it by where it is found
    runs, steps = 4, 3
    base = ALONE


class Faulty(Twenty):
    """Three runs, of which the second cannot be measured."""

    name = "sweep_fixture:Faulty"
    runs, steps = 3, 5

    def measure(self, run: Run) -> dict:
        if run.config.seed == 1:
            raise ZeroDivisionError("nothing to divide by")
        return super().measure(run)


class Deadly(Twenty):
    """Two runs; the process of the first is gone the first time it is measured."""

    name = "sweep_fixture:Deadly"
    runs, steps = 2, 5

    def measure(self, run: Run) -> dict:
        import os
        import signal

        mark = run.folder / "measured-once"
        if run.config.seed == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().measure(run)


class Greedy(Twenty):
    """Three runs; the first finds no memory when it is measured for the first time."""

    name = "sweep_fixture:Greedy"
    runs, steps = 3, 5
    base = ALONE

    def measure(self, run: Run) -> dict:
        import torch

        mark = run.folder / "measured-once"
        if run.config.seed == 0 and not mark.exists():
            mark.touch()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().measure(run)


class Followed(Twenty):
    """Two tries; then the better one again under another name, and a third run."""

    name = "sweep_fixture:Followed"
    runs, steps = 2, 6
    base = ALONE

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        first = self.grid(setup)[0]
        third = replace(first.config, seed=2)
        return [
            Job(config=first.config, tags={"seed": 0, "again": True}),
            Job(config=third, tags={"seed": 2, "again": True}),
        ]


FIRST = replace(TINY, dmt=replace(TINY.dmt, steps=0), bptt=replace(TINY.bptt, steps=0))
"""SMT alone."""


class Continued(Twenty):
    """SMT once, and two kinds of DMT that continue it."""

    name = "sweep_fixture:Continued"

    def grid(self, setup: Setup) -> list[Job]:
        kinds = {
            "one step": replace(TINY.dmt, steps=8),
            "through time": replace(TINY.dmt, steps=8, through_time=True),
        }
        first = replace(FIRST, dmt=DMTConfig())
        after = [
            Job(config=replace(first, dmt=stage), tags={"method": name}, start=first)
            for name, stage in kinds.items()
        ]
        return [Job(config=first, tags={"method": "SMT"}), *after]

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        return Verdict(holds=True, sentence=f"{len(results)} results.", numbers={"n": len(results)})


class Growing(Continued):
    """Drawn from the first result on; its follow-up begins once the run it depends on is done."""

    name = "sweep_fixture:Growing"
    incremental = True

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        done = [result for result in results if result["method"] == "SMT"]
        config = replace(FIRST, seed=3)
        return [Job(config=config, tags={"method": "SMT again"})] if done else []


ALIVE: list[weakref.ref] = []
"""Runs that were measured, if they are still there."""


class Watched(Twenty):
    """One run, which is remembered but not held."""

    name = "sweep_fixture:Watched"
    runs, steps = 1, 5
    base = ALONE

    def measure(self, run: Run) -> dict:
        ALIVE.extend(map(weakref.ref, (run, run.rnn, run.engine)))
        return super().measure(run)
