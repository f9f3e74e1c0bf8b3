"""The effect of DMT: drift along a rollout, the RNN's loss, one-step against rollout drift."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memtrain.config import RunConfig
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import weighted_losses
from memtrain.paper.plots import average, distinct, where
from memtrain.plotting.style import COLOURS, INK, log_x_axis, log_y_axis, panels
from memtrain.training.run import Run

STAGES = {"smt": "after SMT", "dmt": "after DMT"}
STAGE_COLOURS = {"smt": COLOURS[1], "dmt": COLOURS[0]}
WEIGHT_MARKERS = "os^Dv"
START = 8
"""Steps of a rollout whose mean drift is the initial drift."""
PARTIAL = 0.9
"""One-step drift predicts the plateau in part if their rank correlation is below this."""


class Dmt(Experiment):
    name = "dmt"
    claim = (
        "Across weights of SMT's decoding and dynamics loss, DMT lowers the plateau of a rollout's "
        "drift and the RNN's loss; one-step drift predicts the plateau only in part."
    )
    version = 2
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        """The paper's lambda_dec and lambda_dyn of SMT; DMT is the same in all runs."""
        decode = setup.pick(smoke=(0.1, 1.0), cpu=(0.1, 1.0, 10.0), gpu=(0.1, 1.0, 10.0),
                            paper=(0.01, 0.1, 1.0, 10.0))  # fmt: skip
        dynamics = setup.pick(smoke=(0.1, 1.0), cpu=(0.1, 1.0), gpu=(0.01, 0.1, 1.0),
                              paper=(0.001, 0.01, 0.1, 1.0))  # fmt: skip

        def config(decode: float, dynamics: float, seed: int) -> RunConfig:
            base = weighted_losses(setup, dynamics, 0.001, seed)
            return replace(base, smt=replace(base.smt, decode_weight=decode))

        return jobs_over(config, decode=decode, dynamics=dynamics, seed=setup.seeds)

    def measure(self, run: Run) -> dict:
        found = {}
        for record in run.metrics.read():
            if "evaluation" in record:  # the last one of each stage is kept
                evaluation = record["evaluation"]
                path = evaluation["drift"]["unexplained"]
                found[record["stage"]] = {
                    "nats": evaluation["rnn"]["nats"],
                    "path": path,
                    "start": average(path[:START]),
                    "plateau": plateau(path),
                    "one_step": evaluation["drift"]["one_step_unexplained"],
                }
        return found

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers = {
            f"{stage}_{what}": average(result[stage][what] for result in results)
            for stage in STAGES
            for what in ("nats", "start", "plateau", "one_step")
        }
        count = len(results)
        lower, better, worse_start = (
            sum(sign * result["dmt"][what] < sign * result["smt"][what] for result in results)
            for what, sign in (("plateau", 1), ("nats", 1), ("start", -1))
        )
        together = _rank_correlation(
            [result["dmt"]["one_step"] for result in results],
            [result["dmt"]["plateau"] for result in results],
        )
        correlation = (
            f"too few runs, {count}, for a rank correlation of one-step drift and plateau"
            if math.isnan(together)
            else f"rank correlation of one-step drift and plateau {together:.2f}"
        )
        return Verdict(
            holds=lower == better == count and not together >= PARTIAL,
            sentence=f"DMT lowers the plateau of the drift in {lower} of {count} runs (1-R² "
            f"{numbers['smt_plateau']:.2f} → {numbers['dmt_plateau']:.2f}) and the loss in "
            f"{better} ({numbers['smt_nats']:.3f} → {numbers['dmt_nats']:.3f} nats); over the "
            f"first {START} steps the drift is higher after DMT in {worse_start}; {correlation}.",
            numbers=numbers
            | {"lower": lower, "better": better, "worse_start": worse_start}
            | {"correlation": together},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 3, width=3.9, height=3.4)
        drift, loss, both = axes[0]
        weights = distinct(results, "decode")
        for stage, colour in STAGE_COLOURS.items():
            paths = [result[stage]["path"] for result in results]
            time = np.arange(1, len(paths[0]) + 1)
            for path in paths:
                drift.plot(time, path, alpha=0.25, lw=0.8, color=colour)
            middle = np.exp(np.mean(np.log(np.maximum(paths, 1e-12)), axis=0))
            drift.plot(time, middle, lw=2.2, color=colour, label=STAGES[stage])
            drift.axhline(plateau(middle), lw=1, ls="--", color=colour)
            for marker, weight in zip(WEIGHT_MARKERS, weights, strict=False):
                some = [result[stage] for result in where(results, decode=weight)]
                both.plot(
                    [one["one_step"] for one in some], [one["plateau"] for one in some],
                    marker, markersize=4.5, color=colour, markeredgecolor="white", mew=0.4,
                )  # fmt: skip
        for marker, weight in zip(WEIGHT_MARKERS, weights, strict=False):
            both.plot([], [], marker, color=INK, markersize=4.5, label=f"λ_dec {weight:g}")
            for index, result in enumerate(where(results, decode=weight)):
                label = None if index else f"λ_dec {weight:g}"
                style = {"lw": 1, "markersize": 4, "alpha": 0.8, "label": label}
                colour = COLOURS[2 + weights.index(weight)]
                values = [result[stage]["nats"] for stage in STAGES]
                loss.plot([0, 1], values, f"{marker}-", color=colour, **style)
        loss.set_xticks([0, 1], list(STAGES.values()))
        loss.set(xlim=(-0.3, 1.3), ylabel="RNN's nats per token", title="RNN's loss")
        loss.legend()
        drift.set(xscale="log", yscale="log", xlabel="timestep t", ylabel="1 − R²")
        drift.set_title("drift along the rollout (dashed: plateau)")
        drift.legend()
        steps = [max(result[stage]["one_step"], 1e-6) for result in results for stage in STAGES]
        log_x_axis(both)
        both.set(xlim=(min(steps) / 1.6, max(steps) * 1.6), xlabel="one-step drift, 1 − R²")
        log_y_axis(both, [max(r[stage]["plateau"], 1e-6) for r in results for stage in STAGES])
        both.set(ylabel="plateau of the drift, 1 − R²", title="one step against plateau")
        both.legend()
        return figure


def plateau(path: Sequence[int | float] | np.ndarray) -> float:
    """The drift at which a rollout settles: the mean over its last quarter."""
    return average(float(value) for value in path[-max(1, len(path) // 4) :])


def _rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; nan for fewer than three pairs."""
    first, second = (np.argsort(np.argsort(values)) for values in (x, y))
    return float(np.corrcoef(first, second)[0, 1]) if len(x) > 2 else float("nan")


FIGURE = Dmt()
