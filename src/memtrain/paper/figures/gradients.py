"""Gradients of the loss with respect to each memory, before training, for scaled weights."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from memtrain.config import BPTTConfig, Retrieval, RunConfig
from memtrain.objectives.futures import gather_window, readout_loss
from memtrain.objectives.losses import decode_loss, dynamics_loss, uniformity_loss
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import synthetic
from memtrain.paper.plots import average, where
from memtrain.plotting.style import legend, panels
from memtrain.training.run import Run

GAINS = (0.5, 1.0, 2.0, 4.0)
"""Factors of every weight matrix of the models."""
CELLS = ("transformer", "mlp")


class Gradients(Experiment):
    name = "gradients"
    claim = (
        "On retrieval, whose only loss is at the last step, BPTT's gradients with respect to the "
        "memories vanish or explode with distance, depending on the initial weights; SMT's are "
        "of similar size at every step."
    )

    def grid(self, setup: Setup) -> list[Job]:
        length = setup.pick(smoke=32, cpu=64, gpu=128, paper=128)

        def config(cell: str, gain: float, seed: int) -> RunConfig:
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

        return jobs_over(config, train=False, cell=CELLS, gain=GAINS, seed=range(3))

    def measure(self, run: Run) -> dict:
        gain = float(run.config.name.split("gain")[1])
        assert run.teacher is not None
        for model in (run.rnn, run.teacher):
            scale_matrices(model, gain)
        return {"bptt": bptt_norms(run), "smt": smt_norms(run)}

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        decades = {
            f"{method}_{cell}_gain{gain:g}": average(
                _decades(result[method]) for result in where(results, cell=cell, gain=gain)
            )
            for method in ("bptt", "smt")
            for cell in CELLS
            for gain in GAINS
        }
        bptt = [value for name, value in decades.items() if name.startswith("bptt")]
        smt = [value for name, value in decades.items() if name.startswith("smt")]
        unstable = sum(abs(value) > 1 for value in bptt)
        inner = [_decades(result["smt"], before_the_end=1) for result in results]
        return Verdict(
            holds=max(map(abs, smt)) < 1 and unstable >= len(bptt) / 2,
            sentence=f"From the last steps to the first ones, BPTT's gradients change by "
            f"{min(bptt):+.1f} to {max(bptt):+.1f} decades over {len(bptt)} initialisations "
            f"({unstable} of them by more than one decade), SMT's by "
            f"{min(smt):+.1f} to {max(smt):+.1f}. Without the last eighth of the sequence, where "
            f"memories have almost only a decode loss, SMT's change by "
            f"{min(inner):+.1f} to {max(inner):+.1f}.",
            numbers=decades | {"smt_without_the_last_eighth": [min(inner), max(inner)]},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        from matplotlib import colormaps

        figure, axes = panels(len(CELLS), 2, width=4.2, sharex=True)
        shades = colormaps["viridis"]
        for place, (cell, method) in zip(axes.flat, product(CELLS, ("bptt", "smt")), strict=True):
            for result in where(results, cell=cell):
                norms, gain = [max(norm, 1e-30) for norm in result[method]], result["gain"]
                label = f"weights × {gain:g}" if result["seed"] == 0 else None
                colour = shades(GAINS.index(gain) / 3.5)
                place.semilogy(norms, color=colour, lw=1.2, label=label)
            place.set(title=f"{method.upper()}, {cell} cell", ylabel="‖∂L/∂m_t‖")
        for place in axes[-1]:
            place.set_xlabel("timestep t")
        legend(figure, axes[0, 0])
        return figure


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


def _decades(norms: Sequence[float], before_the_end: int = 0) -> float:
    """Change from the last eighth of the steps to the first, in powers of ten.

    `before_the_end` is the number of eighths at the end to leave out.
    """
    eighth = max(1, len(norms) // 8)
    end = len(norms) - before_the_end * eighth
    first, last = average(norms[:eighth]), average(norms[end - eighth : end])
    return math.log10(max(first, 1e-30) / max(last, 1e-30))


FIGURE = Gradients()
