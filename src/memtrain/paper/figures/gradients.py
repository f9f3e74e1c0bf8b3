"""Gradients of the loss with respect to each memory, before training, for scaled weights.

The yardstick is the trend of log10 of their norms over the whole sequence, fitted by least squares.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor, nn

from memtrain.config import BPTTConfig, Retrieval, RunConfig
from memtrain.losses import decode_loss, dynamics_loss, uniformity_loss
from memtrain.objectives.futures import gather_window, readout_loss
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import synthetic
from memtrain.paper.plots import distinct, where
from memtrain.plotting.style import legend, panels
from memtrain.training.run import Run

GAINS = (0.5, 1.0, 2.0, 4.0)
"""Factors of every weight matrix of the models."""
CELLS = ("transformer", "mlp")
METHODS = ("bptt", "smt")
FLAT, STEEP = 0.5, 2.0
"""Decades over the sequence: SMT's trend is to be below the first, BPTT's above the second."""
SEEDS = 5
"""Initialisations of each cell with each gain."""
LEAST = 1e-30
"""Norms below it are taken as it, because fp32 ends near there."""


class Gradients(Experiment):
    name = "gradients"
    claim = (
        "On retrieval, whose only loss is at the last step, BPTT's gradients with respect to the "
        "memories vanish or explode with distance, depending on the initial weights; SMT's are "
        "of similar size at every step."
    )

    def grid(self, setup: Setup) -> list[Job]:
        length = setup.pick(smoke=32, cpu=64, gpu=128, paper=128)

        def config(length: int, cell: str, gain: float, seed: int) -> RunConfig:
            base = synthetic(setup, Retrieval(sequence_length=length), seed=seed)
            return replace(
                base,
                cell=replace(base.cell, kind=cell),
                bptt=BPTTConfig(steps=1),
                # Norms span many decades.
                engine=replace(base.engine, precision="fp32"),
                # The gain is not a config field; the name makes the runs distinct.
                name=f"retrieval-gain{gain:g}",
            )

        tags = dict(length=(length // 2, length), cell=CELLS, gain=GAINS, seed=range(SEEDS))
        return jobs_over(config, train=False, **tags)

    def measure(self, run: Run) -> dict:
        gain = float(run.config.name.split("gain")[1])
        assert run.teacher is not None
        for model in (run.rnn, run.teacher):
            scale_matrices(model, gain)
        return {"bptt": bptt_norms(run), "smt": smt_norms(run)}

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        half, length = sorted(distinct(results, "length"))
        trends = {
            (method, tokens, cell, gain): mean_trend(
                [
                    fitted_trend(result[method])[0]
                    for result in where(results, length=tokens, cell=cell, gain=gain)
                ]
            )
            for method, tokens, cell, gain in product(METHODS, (half, length), CELLS, GAINS)
        }
        bptt, smt = (
            [trends[method, length, *setting] for setting in product(CELLS, GAINS)]
            for method in METHODS
        )
        growth = {
            method: max(
                abs(trends[method, length, *setting][0] - trends[method, half, *setting][0])
                for setting in product(CELLS, GAINS)
            )
            for method in METHODS
        }
        # A trend that is not known to half a decade is not called flat.
        flat = sum(abs(trend) <= FLAT + 2 * error and error <= FLAT / 2 for trend, error in smt)
        steep = sum(abs(trend) - 2 * error > STEEP for trend, error in bptt)
        return Verdict(
            holds=flat == len(smt) and steep >= len(bptt) / 2,
            sentence="Trend of log10 of the norms from the first step to the last, mean ± standard "
            f"error over {SEEDS} initialisations, T={length}: BPTT's is {_span(bptt)} "
            f"decades over {len(bptt)} settings of cell and weights, beyond ±{STEEP:g} in {steep}; "
            f"SMT's is {_span(smt)}, within ±{FLAT:g} in {flat} of {len(smt)}. From T={half} to "
            f"T={length} trends change by up to {growth['bptt']:.2f} (BPTT) and "
            f"{growth['smt']:.2f} (SMT) decades.",
            numbers={
                f"{method}_T{tokens}_{cell}_gain{gain:g}": list(trend)
                for (method, tokens, cell, gain), trend in trends.items()
            }
            | {"flat": flat, "steep": steep, "growth": growth},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        from matplotlib import colormaps

        figure, axes = panels(len(CELLS), 2, width=4.2, sharex=True)
        shades = colormaps["viridis"]
        length = max(distinct(results, "length"))
        for place, (cell, method) in zip(axes.flat, product(CELLS, METHODS), strict=True):
            trends = []
            for result in where(results, length=length, cell=cell):
                norms, gain = np.clip(result[method], LEAST, None), result["gain"]
                label = f"weights × {gain:g}" if result["seed"] == 0 else None
                colour = shades(GAINS.index(gain) / 3.5)
                place.semilogy(norms, color=colour, lw=0.9, alpha=0.8, label=label)
                trends.append(fitted_trend(result[method])[0])
            span = f"{min(trends):+.1f} to {max(trends):+.1f} decades, T={length}"
            place.set_title(f"{method.upper()}, {cell} cell: {span}", fontsize=9)
            place.set(ylabel="‖∂L/∂m_t‖")
        for place in axes[-1]:
            place.set_xlabel("timestep t")
        legend(figure, axes[0, 0])
        return figure


def fitted_trend(norms: Sequence[float]) -> tuple[float, float]:
    """The least-squares trend of log10 of norms from the first step to the last, in decades.

    Returns:
        The trend, and its standard error from the residuals; nan if a norm is not finite.
    """
    if not np.isfinite(norms).all():
        return math.nan, math.nan
    logs = np.log10(np.array(norms).clip(min=LEAST))
    steps = len(logs) - 1
    time = np.linspace(-0.5, 0.5, len(logs))
    trend = float(time @ logs / (time @ time))
    residuals = logs - logs.mean() - trend * time
    variance = float(residuals @ residuals) / max(1, steps - 1)
    return trend, math.sqrt(variance / float(time @ time))


def mean_trend(trends: Sequence[float]) -> tuple[float, float]:
    """The mean over initialisations, and its standard error; nan if there is only one."""
    error = stdev(trends) / math.sqrt(len(trends)) if len(trends) > 1 else math.nan
    return fmean(trends), error


def _span(trends: Sequence[tuple[float, float]]) -> str:
    least, most = min(trends), max(trends)
    return f"{least[0]:+.2f} ± {least[1]:.2f} to {most[0]:+.2f} ± {most[1]:.2f}"


def scale_matrices(model: nn.Module, gain: float) -> None:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(gain)


def bptt_norms(run: Run, rows: int = 16) -> list[float]:
    """Norms of BPTT's gradients with respect to each memory."""
    batch = run.task.sample(rows, torch.Generator().manual_seed(0)).to(run.engine.device)
    with run.engine.reference(run.rnn):
        memories = run.rnn.unroll(batch.inputs)
    # The reference loop stacks the memories; their gradients arrive at the stack's inputs.
    steps = memories.grad_fn.next_functions  # type: ignore[union-attr]
    norms = [math.nan] * len(steps)

    def record(grads: Sequence[Tensor], index: int) -> None:
        norms[index] = float(grads[0].float().norm())

    for index, (node, _) in enumerate(steps):
        assert node is not None
        node.register_prehook(partial(record, index=index))
    readout_loss(run.rnn, memories, batch.targets).backward()
    return norms


def smt_norms(run: Run, rows: int = 16) -> list[float]:
    """Norms of the gradients of SMT's loss with respect to the teacher's memory of each step."""
    batch = run.task.sample(rows, torch.Generator().manual_seed(0)).to(run.engine.device)
    teacher, config = run.teacher, run.config.smt
    assert teacher is not None
    length = batch.inputs.shape[1]
    steps = torch.arange(length, device=batch.inputs.device).expand(rows, length)
    with torch.no_grad():
        memory = teacher.encode(batch.inputs)
    memory.requires_grad_()
    window = gather_window(batch, steps, config.future_length)
    logits = teacher.decode(memory.flatten(0, 1), window.future_inputs.flatten(0, 1))
    predicted = run.rnn.cell(memory[:, :-1].flatten(0, 1), batch.inputs[:, 1:].flatten())
    loss = (
        config.decode_weight * decode_loss(logits, window.future_targets.flatten(0, 1))
        + config.dynamics_weight * dynamics_loss(predicted, memory[:, 1:].flatten(0, 1))
        + config.uniformity_weight
        * uniformity_loss(memory, 2**20, torch.Generator().manual_seed(0))
    )
    loss.backward()
    assert memory.grad is not None
    return memory.grad.square().sum(dim=(0, 2, 3)).sqrt().tolist()


FIGURE = Gradients()
