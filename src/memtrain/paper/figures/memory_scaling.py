"""The RNN's loss against context length and number of memory tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memtrain.config import RunConfig
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import natural
from memtrain.paper.plots import line, mean, where
from memtrain.plotting.style import legend, log_x_axis, panels

SWEEPS = {"context_length": "context length T_c", "memory_tokens": "memory tokens M"}


class MemoryScaling(Experiment):
    name = "memory-scaling"
    claim = "The loss of SMT → DMT falls with every doubling of the context and of the memory."
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        values = {
            "context_length": setup.pick(
                smoke=(8, 16), cpu=(8, 32, 128), gpu=(16, 64, 256), paper=(32, 64, 128, 256, 512)
            ),
            "memory_tokens": setup.pick(
                smoke=(1, 2), cpu=(1, 4, 16), gpu=(1, 4, 16), paper=(1, 2, 4, 8, 16, 32)
            ),
        }

        def config(sweep: str, value: Any, seed: int) -> RunConfig:
            base = natural(setup, "tinystories", seed=seed, **{sweep: value})
            if setup.scale != "gpu":
                return base
            # After the scale's 2,500 steps at a constant rate some seeds are still on a plateau,
            # and seeds differ more than contexts.
            return replace(base, smt=replace(base.smt, steps=6000, schedule="cosine"))

        return [
            job
            for sweep in SWEEPS
            for job in jobs_over(config, sweep=[sweep], value=values[sweep], seed=setup.seeds)
        ]

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        falls, numbers, words = True, {}, []
        for sweep, label in SWEEPS.items():
            of = where(results, sweep=sweep)
            values = sorted({result["value"] for result in of})
            nats = [mean(where(of, value=value), "rnn_nats") for value in values]
            teacher = [mean(where(of, value=value), "teacher_nats") for value in values]
            falls &= all(later < earlier for earlier, later in zip(nats, nats[1:], strict=False))
            numbers[sweep] = {"values": values, "rnn_nats": nats, "teacher_nats": teacher}
            words.append(f"{label} {values}: " + ", ".join(f"{value:.3f}" for value in nats))
        return Verdict(
            holds=falls,
            sentence=f"RNN's nats per character at {'; at '.join(words)}.",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 2, width=4.0, height=3.2, sharey=True)
        for place, (sweep, label) in zip(axes[0], SWEEPS.items(), strict=True):
            of = where(results, sweep=sweep)
            line(place, of, "value", "teacher_nats", "teacher")
            line(place, of, "value", "rnn_nats", "SMT → DMT")
            log_x_axis(place, {result["value"] for result in of})
            place.set_xlabel(label)
        axes[0, 0].set_ylabel("nats per character")
        legend(figure, axes[0, 0])
        return figure


FIGURE = MemoryScaling()
