"""A heat map over the weights of the dynamics loss and of the uniformity loss."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from memtrain.evaluation.evaluate import EVALUATION_SEED, encode_in_chunks
from memtrain.objectives.losses import uniformity_loss
from memtrain.paper.base import (
    Experiment,
    Job,
    Result,
    Setup,
    Verdict,
    distinct,
    mean,
    scores,
    where,
)
from memtrain.paper.configs import natural
from memtrain.paper.plots import heat
from memtrain.plotting.style import panels
from memtrain.training.run import Run


class Lambdas(Experiment):
    name = "lambdas"
    claim = (
        "The best RNN is near a dynamics weight of 0.1 and a uniformity weight of 0.001; without "
        "the uniformity loss the RNN is as good and the memory collapses."
    )
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        return weight_jobs(setup)

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
        nats, uniformity = _cells(results, "rnn_nats"), _cells(results, "uniformity")
        notes = {place: f"{nats[place]:.3f}\n{uniformity[place]:.2f}" for place in nats}
        heat(figure, axes[0, 0], nats, notes, ("dynamics weight", "uniformity weight"))
        axes[0, 0].set_title("RNN's nats (colour, upper number); L_unif (lower number)")
        return figure


def weight_jobs(setup: Setup) -> list[Job]:
    """Runs over the two weights, with the paper's DMT: the figure about it looks at them too."""
    dynamics = setup.pick(
        smoke=(0.1, 1.0), cpu=(0.01, 0.1, 1.0), gpu=(0.01, 0.1, 1.0), paper=(0.001, 0.01, 0.1, 1.0)
    )
    uniformity = setup.pick(
        smoke=(0.0, 0.001),
        cpu=(0.0, 0.001, 0.1),
        gpu=(0.0, 0.001, 0.1),
        paper=(0.0, 0.0001, 0.001, 0.01, 0.1),
    )
    jobs = []
    for dyn in dynamics:
        for unif in uniformity:
            for seed in setup.seeds:
                config = natural(setup, "tinystories", one_step=True, seed=seed)
                smt = replace(config.smt, dynamics_weight=dyn, uniformity_weight=unif)
                smt = replace(smt, steps=max(10, smt.steps // 2))
                tags = {"dynamics": dyn, "uniformity_weight": unif, "seed": seed}
                jobs.append(Job(config=replace(config, smt=smt), tags=tags))
    return jobs


@torch.no_grad()
def memory_uniformity(run: Run) -> float:
    """L_unif of the teacher's memories on held-out sequences; of the RNN's without a teacher."""
    count = min(32, run.config.log.evaluate_sequences)
    batch = run.task.held_out(count, torch.Generator().manual_seed(EVALUATION_SEED))
    inputs = batch.inputs.to(run.engine.device)[:, :256]
    with run.engine.eval_mode():
        memory = (
            encode_in_chunks(run.teacher, inputs)
            if run.teacher is not None
            else run.rnn.unroll(inputs)
        )
    return float(uniformity_loss(memory, 2048, torch.Generator().manual_seed(0)))


def _cells(results: Sequence[Result], value: str) -> dict[tuple[float, float], float]:
    """Means over seeds at each pair of weights."""
    return {
        (dyn, unif): mean(where(results, dynamics=dyn, uniformity_weight=unif), value)
        for dyn in distinct(results, "dynamics")
        for unif in distinct(results, "uniformity_weight")
    }


FIGURE = Lambdas()
