"""A figure of the tests' own: small runs that take a moment each, one of which fails on demand."""

from collections.abc import Sequence
from dataclasses import replace

from conftest import TINY
from memtrain.config import BPTTConfig, LogConfig
from memtrain.experiments.experiment import Experiment, Job, Result, Setup, Verdict, mean
from memtrain.run import Run

RUNS = 20


class Twenty(Experiment):
    name = "twenty:Twenty"
    claim = "There are as many results as runs."
    steps = 40

    def grid(self, setup: Setup) -> list[Job]:
        log = LogConfig(every=5, evaluate_every=0, evaluate_sequences=8, checkpoint_every=10)
        return [
            Job(
                config=replace(TINY, seed=seed, bptt=BPTTConfig(steps=self.steps), log=log),
                tags={"seed": seed},
            )
            for seed in range(RUNS)
        ]

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        return Verdict(
            holds=len(results) == RUNS,
            sentence=f"{len(results)} results.",
            numbers={"nats": mean(results, "rnn_nats")},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        from matplotlib.figure import Figure

        return Figure()


class Long(Twenty):
    """The same, each run long enough to be killed in the middle."""

    name = "twenty:Long"
    steps = 400


class Faulty(Twenty):
    """Three runs, of which the second cannot be measured."""

    name = "twenty:Faulty"
    steps = 5

    def grid(self, setup: Setup) -> list[Job]:
        return super().grid(setup)[:3]

    def measure(self, run: Run) -> dict:
        if run.config.seed == 1:
            raise ZeroDivisionError("nothing to divide by")
        return super().measure(run)


class Deadly(Twenty):
    """Two runs; the process of the first is gone the first time it is measured."""

    name = "twenty:Deadly"
    steps = 5

    def grid(self, setup: Setup) -> list[Job]:
        return super().grid(setup)[:2]

    def measure(self, run: Run) -> dict:
        import os
        import signal

        mark = run.folder / "measured-once"
        if run.config.seed == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().measure(run)
