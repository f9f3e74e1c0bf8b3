"""A heat map over the weights of the dynamics loss and of the uniformity loss."""

from collections.abc import Sequence

import numpy as np

from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, memory_uniformity, scores
from memtrain.paper.configs import loss_weight_jobs
from memtrain.paper.plots import distinct, mean, where
from memtrain.plotting.style import panels
from memtrain.training.run import Run


class Lambdas(Experiment):
    name = "lambdas"
    claim = (
        "The best RNN is near a dynamics weight of 0.1 and a uniformity weight of 0.001; without "
        "the uniformity loss the RNN is as good, but the memory collapses."
    )
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        return loss_weight_jobs(setup)

    def measure(self, run: Run) -> dict:
        return scores(run) | {"uniformity": memory_uniformity(run)}

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        nats, uniformity = _cells(results, "rnn_nats"), _cells(results, "uniformity")
        dyn, unif = min(nats, key=lambda place: nats[place])
        paper, none = nats[0.1, 0.001], nats[0.1, 0.0]
        near = 0.01 <= dyn <= 1 and unif <= 0.01
        collapsed = uniformity[0.1, 0.0] > uniformity[0.1, 0.001] + 0.5
        return Verdict(
            holds=near and paper < 1.05 * nats[dyn, unif] and none < 1.05 * paper and collapsed,
            sentence=f"Best at ({dyn:g}, {unif:g}): {nats[dyn, unif]:.3f} nats; at (0.1, 0.001) "
            f"{paper:.3f}, L_unif {uniformity[0.1, 0.001]:.2f}; at (0.1, 0) {none:.3f}, L_unif "
            f"{uniformity[0.1, 0.0]:.2f} (0 is collapsed, -4 uniform).",
            numbers={
                "best": [dyn, unif],
                "nats": {f"{d:g},{u:g}": value for (d, u), value in nats.items()},
                "uniformity": {f"{d:g},{u:g}": value for (d, u), value in uniformity.items()},
            },
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 1, width=6.2, height=4.2)
        place = axes[0, 0]
        nats, uniformity = _cells(results, "rnn_nats"), _cells(results, "uniformity")
        rows, columns = (sorted({weights[axis] for weights in nats}) for axis in (0, 1))
        values = np.array([[nats[row, column] for column in columns] for row in rows])
        image = place.imshow(values, cmap="viridis_r", aspect="auto", origin="lower")
        figure.colorbar(image, ax=place)
        for (row, column), value in nats.items():
            colour = "white" if value > np.nanmean(values) else "black"
            note = f"{value:.3f}\n{uniformity[row, column]:.2f}"
            style = dict(ha="center", va="center", fontsize=8, color=colour)
            place.text(columns.index(column), rows.index(row), note, **style)
        place.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
        place.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
        place.set(xlabel="uniformity weight", ylabel="dynamics weight")
        place.set_title("RNN's nats (colour, upper number); L_unif (lower number)")
        place.grid(False)
        return figure


def _cells(results: Sequence[Result], value: str) -> dict[tuple[float, float], float]:
    """Means over seeds at each pair of weights."""
    return {
        (dyn, unif): mean(where(results, dynamics=dyn, uniformity_weight=unif), value)
        for dyn in distinct(results, "dynamics")
        for unif in distinct(results, "uniformity_weight")
    }


FIGURE = Lambdas()
