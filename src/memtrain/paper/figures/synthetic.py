"""Five synthetic tasks, two sweeps each: SMT → DMT against BPTT on the same cell."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memtrain.config import Arithmetic, Copy, DataConfig, Recall, Retrieval, RunConfig, Stack
from memtrain.paper.base import Experiment, Job, Result, Setup, Tag, Verdict
from memtrain.paper.configs import bptt_twin, synthetic
from memtrain.paper.plots import cost_ratio, distinct, line, mean, where
from memtrain.plotting.style import legend, panels


class Try(NamedTuple):
    rate: float
    dynamics: float | None = None
    """SMT's weight of L^dyn, if not the default."""


TRIES = {
    "SMT → DMT": (Try(1e-3), Try(3e-3), Try(1e-3, dynamics=1.0)),
    "BPTT": (Try(3e-4), Try(1e-3), Try(3e-3)),
}
"""As many per method; the best is chosen per task, on its middle setting with seed 0."""
TIE = 0.01
"""Accuracies closer than this count as equal."""


class Sweep(NamedTuple):
    """One field of a task, with values from easy to hard at each scale."""

    label: str
    field: str
    smoke: tuple[Any, ...]
    cpu: tuple[Any, ...]
    gpu: tuple[Any, ...]
    paper: tuple[Any, ...]

    def values(self, setup: Setup) -> tuple[Any, ...]:
        return getattr(self, setup.scale)


class TaskSweeps(NamedTuple):
    data: DataConfig
    memory_tokens: int
    sweeps: tuple[Sweep, Sweep]


LENGTHS = Sweep(
    "sequence length", "sequence_length", (6, 8), (8, 16), (8, 16, 32), (16, 32, 64, 128)
)
TASKS = {
    "retrieval": TaskSweeps(Retrieval(sequence_length=16), 1, (
        LENGTHS._replace(cpu=(16, 32), gpu=(16, 32, 64), paper=(16, 64, 128, 256)),
        Sweep("noise", "noise", (0.0, 0.5), (0.0, 0.5), (0.0, 0.25, 0.5), (0.0, 0.2, 0.4, 0.6)),
    )),
    "copy": TaskSweeps(Copy(sequence_length=12), 4, (
        LENGTHS,
        Sweep("memory tokens", "memory_tokens", (1, 2), (2, 4), (1, 2, 4), (1, 2, 4, 8)),
    )),
    "stack": TaskSweeps(Stack(), 2, (
        LENGTHS,
        Sweep("depth", "depth", (2, 3), (2, 4), (2, 4, 6), (2, 4, 8, 16)),
    )),
    "recall": TaskSweeps(Recall(), 4, (
        Sweep("associations", "pairs", (2, 3), (2, 4), (2, 4, 6), (2, 4, 8, 16)),
        Sweep("symbols in a value", "value_length", (1, 2), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    )),
    "arithmetic": TaskSweeps(Arithmetic(), 2, (
        Sweep("difficulty", "difficulty", (2, 4), (2, 4), (2, 5, 11), (2, 4, 8, 11)),
        Sweep("examples", "examples", (3, 4), (4, 8), (4, 8, 12), (4, 8, 16, 32)),
    )),
}  # fmt: skip


class Synthetic(Experiment):
    name = "synthetic"
    claim = "SMT → DMT is at or above BPTT in every setting of five synthetic tasks."

    def grid(self, setup: Setup) -> list[Job]:
        """The tries of both methods on each task's middle setting."""
        tries = setup.pick(smoke=1, cpu=3, gpu=3, paper=3)
        jobs = []
        for task, sweeps in TASKS.items():
            sweep = sweeps.sweeps[0]
            values = sweep.values(setup)
            middle = values[len(values) // 2]
            for method, every in TRIES.items():
                for one in every[1:2] if tries == 1 else every:
                    config = _config(setup, sweeps, sweep, middle, method, one, seed=0)
                    tags: dict[str, Tag] = {"task": task, "method": method, "rate": one.rate}
                    if one.dynamics is not None:
                        tags |= {"dynamics": one.dynamics}
                    jobs.append(Job(config=config, tags=tags))
        return jobs

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        """All settings and seeds, with each method's best try."""
        jobs = []
        for task, sweeps in TASKS.items():
            for method, every in TRIES.items():
                tried = where(results, task=task, method=method)
                tags = max(tried, key=lambda result: result["rnn_accuracy"]).tags
                best = next(one for one in every if one == (tags["rate"], tags.get("dynamics")))
                for sweep in sweeps.sweeps:
                    for value in sweep.values(setup):
                        for seed in setup.seeds:
                            config = _config(setup, sweeps, sweep, value, method, best, seed)
                            tags = {"task": task, "method": method, "sweep": sweep.label}
                            tags |= {"value": value, "seed": seed}
                            jobs.append(Job(config=config, tags=tags))
        return jobs

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        results = [result for result in results if "sweep" in result.tags]
        gaps = {}
        for place in {(r["task"], r["sweep"], r["value"]): None for r in results}:
            task, sweep, value = place
            at = where(results, task=task, sweep=sweep, value=value)
            ours, theirs = where(at, method="SMT → DMT"), where(at, method="BPTT")
            gap = mean(ours, "rnn_accuracy") - mean(theirs, "rnn_accuracy")
            gaps[f"{task}, {sweep} {value}"] = gap
        won = sum(gap > TIE for gap in gaps.values())
        lost = [name for name, gap in gaps.items() if gap < -TIE]
        ours, theirs = where(results, method="SMT → DMT"), where(results, method="BPTT")
        ratios = {
            f"bptt_{what}_over_ours": cost_ratio(ours, theirs, what)
            for what in ("steps", "tokens", "sequential_ops", "seconds")
        }
        worst = min(gaps, key=lambda name: gaps[name])
        return Verdict(
            holds=not lost,
            sentence=f"SMT → DMT is above BPTT in {won} of {len(gaps)} settings, within {TIE} in "
            f"{len(gaps) - won - len(lost)}, below in {len(lost)}"
            f"{f' (worst: {worst}, {gaps[worst]:+.2f})' if lost else ''}; BPTT took "
            f"{ratios['bptt_steps_over_ours']:.2f} times the steps, "
            f"{ratios['bptt_tokens_over_ours']:.2f} the tokens, "
            f"{ratios['bptt_sequential_ops_over_ours']:.2f} the sequential operations and "
            f"{ratios['bptt_seconds_over_ours']:.2f} the seconds.",
            numbers={"won": won, "lost": lost, "accuracy_gaps": gaps, **ratios},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(2, len(TASKS), width=2.6, height=2.5, sharey=True)
        for column, task in enumerate(TASKS):
            swept = [r for r in where(results, task=task) if "sweep" in r.tags]
            for row, sweep in enumerate(distinct(swept, "sweep")):
                place = axes[row, column]
                at = where(swept, sweep=sweep)
                ours, theirs = where(at, method="SMT → DMT"), where(at, method="BPTT")
                line(place, ours, "value", "teacher_accuracy", "teacher")
                line(place, ours, "value", "smt_accuracy", "SMT")
                line(place, theirs, "value", "rnn_accuracy", "BPTT")
                line(place, ours, "value", "rnn_accuracy", "SMT → DMT")
                place.set(xticks=distinct(at, "value"), xlabel=sweep, ylim=(0, 1.05))
            axes[0, column].set_title(task)
        for row in range(2):
            axes[row, 0].set_ylabel("accuracy")
        legend(figure, axes[0, 0])
        return figure


def _config(
    setup: Setup, task: TaskSweeps, sweep: Sweep, value: Any, method: str, tried: Try, seed: int
) -> RunConfig:
    data, tokens = task.data, task.memory_tokens
    if sweep.field == "memory_tokens":
        tokens = value
    else:
        keys = {"key_symbols": max(8, value)} if sweep.field == "pairs" else {}  # keys are distinct
        data = replace(data, **{sweep.field: value}, **keys)
    config = synthetic(setup, data, memory_tokens=tokens, learning_rate=tried.rate, seed=seed)
    if tried.dynamics is not None:
        config = replace(config, smt=replace(config.smt, dynamics_weight=tried.dynamics))
    if method == "SMT → DMT":
        return config
    twin = bptt_twin(setup, config, tried.rate)
    return replace(twin, bptt=replace(twin.bptt, schedule=config.smt.schedule))


FIGURE = Synthetic()
