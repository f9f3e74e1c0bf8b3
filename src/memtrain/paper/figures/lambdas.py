"""A heat map over the weights of the dynamics loss and of the uniformity loss."""

from collections.abc import Sequence

import numpy as np

from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict
from memtrain.paper.configs import loss_weight_jobs
from memtrain.paper.plots import average, distinct, mean, where
from memtrain.plotting.style import COLOURS, panels

PAPER, WITHOUT = (0.1, 0.001), (0.1, 0.0)
"""The paper's weights of the dynamics and the uniformity loss, and the same without the latter."""
SPREADS = {"memory_uniformity": "L_unif", "memory_effective_rank": "effective rank"}
Weights = tuple[float, float]


class Lambdas(Experiment):
    name = "lambdas"
    version = 2
    claim = (
        "The best RNN is near a dynamics weight of 0.1 and a uniformity weight of 0.001; without "
        "the uniformity loss the RNN is as good, but the memory collapses."
    )
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        return loss_weight_jobs(setup)

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        nats = by_weights(results, "rnn_nats")
        dyn, unif = min(nats, key=lambda weights: nats[weights])
        near = 0.01 <= dyn <= 1 and unif <= 0.01
        close = nats[PAPER] < 1.05 * nats[dyn, unif] and nats[WITHOUT] < 1.05 * nats[PAPER]
        late = {
            name: {weights: late_mean(results, weights, name) for weights in nats}
            for name in SPREADS
        }
        uniformity, rank = late.values()
        collapsed = uniformity[WITHOUT] > uniformity[PAPER] + 0.5 and rank[WITHOUT] < rank[PAPER]
        return Verdict(
            holds=near and close and collapsed,
            sentence=f"Best at ({dyn:g}, {unif:g}): {nats[dyn, unif]:.3f} nats; at (0.1, 0.001) "
            f"{nats[PAPER]:.3f}, at (0.1, 0) {nats[WITHOUT]:.3f}. In the second half of SMT, "
            f"L_unif is {uniformity[PAPER]:.2f} with and {uniformity[WITHOUT]:.2f} without the "
            f"uniformity loss (0 is collapsed, -4 uniform), the memories' effective rank "
            f"{rank[PAPER]:.1f} and {rank[WITHOUT]:.1f}.",
            numbers={"best": [dyn, unif], "nats": _named(nats)}
            | {name.removeprefix("memory_"): _named(values) for name, values in late.items()},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 3, width=4.6, height=3.8, width_ratios=(1.3, 1, 1))
        _heat_map(figure, axes[0, 0], results)
        nats = by_weights(results, "rnn_nats")
        weights = sorted({unif for dyn, unif in nats if dyn == PAPER[0]})
        for place, (name, label) in zip(axes[0, 1:], SPREADS.items(), strict=True):
            for colour, unif in zip(COLOURS, weights, strict=False):
                curves = [smt_curve(run, name) for run in _runs(results, (PAPER[0], unif))]
                for number, curve in enumerate(curves):
                    place.plot(
                        *np.array(curve).reshape(-1, 2).T, "o-", color=colour, markersize=3, lw=1.2,
                        label=None if number else f"uniformity weight {unif:g}",
                    )  # fmt: skip
            place.set(xlabel="step of SMT", ylabel=f"{label} of the memories")
            place.set_title(f"{label} at dynamics weight {PAPER[0]:g}")
        axes[0, 1].legend(fontsize=8)
        return figure


def by_weights(results: Sequence[Result], value: str) -> dict[Weights, float]:
    """Means over seeds at each pair of weights."""
    return {
        (dyn, unif): mean(_runs(results, (dyn, unif)), value)
        for dyn in distinct(results, "dynamics")
        for unif in distinct(results, "uniformity_weight")
    }


def smt_curve(result: Result, name: str) -> list[tuple[int, float]]:
    """Steps of SMT and the value there; the teacher does not change after SMT."""
    points = [point for point in result.curve if point["stage"] == "smt" and name in point]
    return [(int(point["steps"]), point[name]) for point in points]


def late_mean(results: Sequence[Result], weights: Weights, name: str) -> float:
    """The mean over seeds of a value's mean over the second half of SMT's evaluations."""

    def late(result: Result) -> float:
        curve = smt_curve(result, name)
        # Runs of earlier versions have no curve, only the value at the end.
        return average(value for _, value in curve[len(curve) // 2 :]) if curve else result[name]

    return average(late(result) for result in _runs(results, weights))


def _runs(results: Sequence[Result], weights: Weights) -> list[Result]:
    return where(results, dynamics=weights[0], uniformity_weight=weights[1])


def _named(values: dict[Weights, float]) -> dict[str, float]:
    return {f"{dyn:g},{unif:g}": value for (dyn, unif), value in values.items()}


def _heat_map(figure, place, results: Sequence[Result]) -> None:
    nats = by_weights(results, "rnn_nats")
    uniformity = by_weights(results, "memory_uniformity")
    rows, columns = (sorted({weights[axis] for weights in nats}) for axis in (0, 1))
    values = np.array([[nats[row, column] for column in columns] for row in rows])
    image = place.imshow(values, cmap="viridis_r", aspect="auto", origin="lower")
    figure.colorbar(image, ax=place)
    for (row, column), value in nats.items():
        dark = value > (np.nanmin(values) + np.nanmax(values)) / 2
        note = f"{value:.3f}\n{uniformity[row, column]:.2f}"
        style = dict(ha="center", va="center", fontsize=8, color="white" if dark else "black")
        place.text(columns.index(column), rows.index(row), note, **style)
    place.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
    place.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
    place.set(xlabel="uniformity weight", ylabel="dynamics weight")
    place.set_title("RNN's nats (colour, upper number), L_unif (lower)")
    place.grid(False)


FIGURE = Lambdas()
