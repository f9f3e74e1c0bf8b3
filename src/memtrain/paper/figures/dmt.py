"""The effect of DMT: drift along a rollout, the RNN's loss, one-step against rollout drift."""

import math
from collections.abc import Sequence

import numpy as np

from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict
from memtrain.paper.configs import loss_weight_jobs
from memtrain.paper.plots import average
from memtrain.plotting.style import COLOURS, panels
from memtrain.training.run import Run

STAGES = {"smt": "after SMT", "dmt": "after DMT"}


class Dmt(Experiment):
    name = "dmt"
    claim = "DMT lowers a rollout's drift and the RNN's loss across settings of SMT."
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        """The runs of the figure `lambdas` that have a uniformity loss."""
        return [job for job in loss_weight_jobs(setup) if job.tags["uniformity_weight"] != 0]

    def measure(self, run: Run) -> dict:
        found = {}
        for record in run.metrics.read():
            if "evaluation" in record:  # the last one of each stage is kept
                evaluation = record["evaluation"]
                path = evaluation["drift"]["unexplained"]
                found[record["stage"]] = {
                    "nats": evaluation["rnn"]["nats"],
                    "path": path,
                    "rollout": average(path[-max(1, len(path) // 4) :]),
                    "one_step": evaluation["drift"]["one_step_unexplained"],
                }
        return found

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers = {
            f"{stage}_{what}": average(result[stage][what] for result in results)
            for stage in STAGES
            for what in ("nats", "rollout", "one_step")
        }
        lower = sum(result["dmt"]["rollout"] < result["smt"]["rollout"] for result in results)
        better = sum(result["dmt"]["nats"] < result["smt"]["nats"] for result in results)
        together = _rank_correlation(
            [result["dmt"]["one_step"] for result in results],
            [result["dmt"]["rollout"] for result in results],
        )
        count = len(results)
        correlation = (
            f"too few runs, {count}, for a rank correlation of one-step and rollout drift"
            if math.isnan(together)
            else f"rank correlation of one-step and rollout drift {together:.2f}"
        )
        return Verdict(
            holds=lower == better == count,
            sentence=f"DMT lowers the drift in {lower} of {count} runs (1-R² at the end of the "
            f"rollout {numbers['smt_rollout']:.2f} → {numbers['dmt_rollout']:.2f}) and the loss in "
            f"{better} ({numbers['smt_nats']:.3f} → {numbers['dmt_nats']:.3f} nats); "
            f"{correlation}.",
            numbers=numbers | {"lower": lower, "better": better, "correlation": together},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 3, width=3.6, height=3.2)
        drift, loss, both = axes[0]
        for colour, (stage, label) in zip((1, 0), STAGES.items(), strict=True):
            style = {"color": COLOURS[colour]}
            for index, result in enumerate(results):
                path = result[stage]["path"]
                drift.plot(path, alpha=0.35, lw=1, label=None if index else label, **style)
            both.plot(
                [result[stage]["one_step"] for result in results],
                [result[stage]["rollout"] for result in results],
                "o", markersize=4, label=label, **style,
            )  # fmt: skip
        for result in results:
            loss.plot([0, 1], [result[s]["nats"] for s in STAGES], "o-", color=COLOURS[6], lw=1)
        loss.set_xticks([0, 1], list(STAGES.values()))
        loss.set(xlim=(-0.3, 1.3), ylabel="RNN's nats per token")
        drift.set(yscale="log", xlabel="timestep t", ylabel="drift, 1 − R²")
        drift.legend()
        both.set(xscale="log", xlabel="one-step drift, 1 − R²")
        both.set(yscale="log", ylabel="drift at the rollout's end")
        return figure


def _rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; nan for fewer than three pairs."""
    first, second = (np.argsort(np.argsort(values)) for values in (x, y))
    return float(np.corrcoef(first, second)[0, 1]) if len(x) > 2 else float("nan")


FIGURE = Dmt()
