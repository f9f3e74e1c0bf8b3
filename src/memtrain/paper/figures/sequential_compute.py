"""Loss against sequential operations and tokens: steps, batch and length are swept."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from memtrain.config import RunConfig
from memtrain.paper.base import Job, Result, Setup, Verdict, memory_uniformity, scores
from memtrain.paper.configs import Method, TunedExperiment, tuned
from memtrain.paper.plots import STYLES, mean, where
from memtrain.plotting.style import GREY, legend, log_x_axis, panels
from memtrain.training.run import Run

CELLS = ("Transformer", "MLP", "GRU")
DATA = ("tinystories", "mnist")
TITLES = {"tinystories": "TinyStories", "mnist": "MNIST"}
WAYS = ("SMT → DMT", "BPTT")
COSTS = {"sequential_ops": "sequential operations", "tokens": "tokens"}
SWEEP = {
    "SMT → DMT": ("steps / 4", "batch / 4", "length / 4"),
    "BPTT": ("batch / 4", "length / 4"),
}
"""Runs besides those of full size, at the best rate. BPTT's rate is constant, so that fewer steps
are the beginning of a run's curve; SMT → DMT has to end SMT earlier."""
EVALUATIONS = 22
Point = tuple[int | float, int | float]
"""A cost and a loss."""


class SequentialCompute(TunedExperiment):
    name = "sequential-compute"
    claim = (
        "SMT → DMT needs far fewer sequential operations than BPTT for the same loss with "
        "Transformer and MLP cells; a GRU ends worse with it than with BPTT."
    )
    version = 2
    data_sets = DATA
    methods = [
        Method({"data": data, "cell": cell, "way": way}, data, way, cell)
        for data, cell, way in product(DATA, CELLS, WAYS)
    ]

    def grid(self, setup: Setup) -> list[Job]:
        return [_full(setup, job) for job in super().grid(setup)]

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        """The other seeds at the best rate of each method, and its sweep on seed 0."""
        jobs = [_full(setup, job) for job in super().follow_up(setup, results)]
        for method in self.methods:
            rate = tuned(_full_runs(results), **method.tags)[0]["rate"]
            full = _full(setup, method.job(setup, rate, 0))
            jobs += [
                Job(config=_smaller(full.config, change), tags={**full.tags, "sweep": change})
                for change in SWEEP[method.way][-1 if setup.scale == "smoke" else 0 :]
            ]
        return jobs

    def measure(self, run: Run) -> dict:
        return scores(run) | {"uniformity": memory_uniformity(run)}

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers, words, expected = {}, [], []
        for data, cell in product(DATA, CELLS):
            ours, theirs = (
                tuned(_full_runs(results), data=data, cell=cell, way=way) for way in WAYS
            )
            target, reached = mean(theirs, "rnn_nats"), mean(ours, "rnn_nats")
            needed = {
                (way, cost): cost_to_reach(
                    where(results, data=data, cell=cell, way=way), target, cost
                )
                for way, cost in product(WAYS, COSTS)
            }
            ratios = {cost: needed["BPTT", cost] / needed["SMT → DMT", cost] for cost in COSTS}
            numbers[f"{data}_{cell}"] = {
                "bptt_nats": target,
                "ours_nats": reached,
                "operations_bptt": needed["BPTT", "sequential_ops"],
                "operations_bptt_over_ours": ratios["sequential_ops"],
                "tokens_bptt_over_ours": ratios["tokens"],
                "uniformity_ours": mean(ours, "uniformity"),
            }
            ratio = ratios["sequential_ops"]
            shown = f"BPTT needs {ratio:.1f} times" if ratio else "not reached"
            words.append(
                f"{data} {cell} {target:.3f} nats ({shown}; SMT → DMT ends at {reached:.3f}, "
                f"L_unif {mean(ours, 'uniformity'):.2f})"
            )
            expected.append(reached > target if cell == "GRU" else ratio > 1)
        return Verdict(
            holds=all(expected),
            sentence="Sequential operations until BPTT's final loss, BPTT's over those of SMT → "
            f"DMT, each at its best setting: {'; '.join(words)}.",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):

        figure, axes = panels(4, len(CELLS), width=3.3, height=2.5)
        for place, (data, cost, cell) in zip(axes.flat, product(DATA, COSTS, CELLS), strict=True):
            runs = where(results, data=data, cell=cell)
            lines = {
                "teacher": (where(runs, way=WAYS[0]), "teacher_nats", None),
                "SMT": (where(runs, way=WAYS[0]), "rnn_nats", "smt"),
                "SMT → DMT": (where(runs, way=WAYS[0]), "rnn_nats", "dmt"),
                "BPTT": (where(runs, way=WAYS[1]), "rnn_nats", "bptt"),
            }
            for label, (some, loss, stage) in lines.items():
                style = STYLES[label] | {"markersize": 3}
                curves = [_points(result, cost, loss, stage) for result in some]
                curves = [curve for curve in curves if curve]
                for curve in curves:
                    thin = style | {"linewidth": 0.7, "marker": ""}
                    place.plot(*zip(*curve, strict=True), alpha=0.35, **thin)
                if curves:
                    best = lower_envelope([point for curve in curves for point in curve])
                    place.plot(*zip(*best, strict=True), label=label, **style)
            final = mean(tuned(_full_runs(runs), way="BPTT"), "rnn_nats")
            place.axhline(final, color=GREY, lw=0.9, ls=":", label="BPTT's final loss")
            log_x_axis(place)
            place.set_title(f"{TITLES[data]}, {cell}", fontsize=9)
            place.set_xlabel(COSTS[cost])
        for place in axes[:, 0]:
            place.set_ylabel("nats per token")
        legend(figure, axes[0, 0])
        return figure


# ------------------------------------------------------------------------------------- the runs


def _full(setup: Setup, job: Job) -> Job:
    """A run of full size. BPTT has more steps than in other figures; all are evaluated often."""
    config = job.config
    if config.bptt.steps:
        steps = setup.pick(smoke=6, cpu=300, gpu=300, paper=20_000)
        config = replace(config, bptt=replace(config.bptt, steps=steps))
    return Job(config=_often_evaluated(config), tags={**job.tags, "sweep": "full"})


def _smaller(config: RunConfig, change: str) -> RunConfig:
    """The run with a quarter of the steps, of the batch, or of the length T.

    T is the length of BPTT's sequences, of DMT's rollouts, and of the context in SMT.
    """
    smt, dmt, bptt, teacher = config.smt, config.dmt, config.bptt, config.teacher
    if change == "steps / 4":
        smt, dmt = (replace(stage, steps=_quarter(stage.steps)) for stage in (smt, dmt))
    elif change == "batch / 4":
        smt, dmt, bptt = (
            replace(stage, batch_size=_quarter(stage.batch_size)) for stage in (smt, dmt, bptt)
        )
    else:
        length = max(2 * dmt.label_stride, _quarter(dmt.rollout_length))
        dmt = replace(dmt, rollout_length=length)
        bptt = replace(bptt, sequence_length=_quarter(bptt.sequence_length))
        teacher = replace(teacher, context_length=_quarter(teacher.context_length))
    return _often_evaluated(replace(config, smt=smt, dmt=dmt, bptt=bptt, teacher=teacher))


def _quarter(value: int) -> int:
    return -(-value // 4)


def _often_evaluated(config: RunConfig) -> RunConfig:
    steps = sum(stage.steps for stage in config.stages().values())
    return replace(config, log=replace(config.log, evaluate_every=-(-steps // EVALUATIONS)))


# ------------------------------------------------------------------------------------ the curves


def _full_runs(results: Sequence[Result]) -> list[Result]:
    return where(results, sweep="full")


def cost_to_reach(results: Sequence[Result], target: float, cost: str) -> int | float:
    """The least cost at which an RNN's loss was at or below the target; infinite if none was."""
    points = [point for result in results for point in result.curve]
    return min((p[cost] for p in points if p["rnn_nats"] <= target), default=math.inf)


def lower_envelope(points: Sequence[Point]) -> list[Point]:
    """The points (cost, loss) with a lower loss than any that costs less."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _points(result: Result, cost: str, loss: str, stage: str | None) -> list[Point]:
    """A run's evaluations in a stage; those of the teacher end with SMT, which trains it."""
    kept = stage or "smt"
    return [(p[cost], p[loss]) for p in result.curve if p["stage"] == kept and loss in p]


FIGURE = SequentialCompute()
