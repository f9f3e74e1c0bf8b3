"""The resources table: sequential operations, credit path and memory of a step against T."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from memtrain.config import Arithmetic, BPTTConfig, RunConfig
from memtrain.evaluation.cost import CountedCell, recurrent_depth, sequential_ops
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import synthetic
from memtrain.plotting.style import COLOURS, legend, log_x_axis, panels
from memtrain.training.run import Run

STAGES = {"smt": "SMT", "dmt": "DMT", "bptt": "BPTT"}
LINE_STYLES = {
    "smt": dict(color=COLOURS[0], linewidth=2.5, marker="o"),
    "bptt": dict(color=COLOURS[1], linewidth=2.5, marker="^"),
    "dmt": dict(color=COLOURS[2], linestyle="--", marker="s", markersize=4),
}
"""DMT is dashed, because its line may coincide with SMT's or BPTT's."""
MEASURES = {
    "operations": "sequential operations per step",
    "credit": "credit path (applications of the cell)",
    "bytes": "bytes saved for the backward pass",
}


class Resources(Experiment):
    name = "resources"
    claim = (
        "SMT's sequential operations, credit path and memory do not depend on the sequence length "
        "T; BPTT's all grow with T; DMT's operations and memory grow, its credit path does not."
    )

    def grid(self, setup: Setup) -> list[Job]:
        longest = setup.pick(smoke=128, cpu=512, gpu=1024, paper=2048)
        lengths = [length for length in (32, 64, 128, 256, 512, 1024, 2048) if length <= longest]

        def config(T: int) -> RunConfig:
            # T_c and T_f are constant while T grows; one timestep per sequence is trained.
            base = synthetic(setup, Arithmetic(examples=T // 2))
            smt = replace(base.smt, timesteps=1, decode_timesteps=0, future_length=8)
            return replace(
                base,
                teacher=replace(base.teacher, encoder="bidirectional", context_length=16),
                smt=replace(smt, short_contexts=0.0),
                dmt=replace(base.dmt, through_time=False),
                bptt=BPTTConfig(steps=1),
            )

        return jobs_over(config, train=False, T=lengths)

    def measure(self, run: Run) -> dict:
        batch = run.task.sample(4, torch.Generator().manual_seed(0)).to(run.engine.device)
        plain = run.rnn.cell
        found = {}
        for stage in STAGES:
            objective = run.objective(stage)

            def loss(objective=objective) -> torch.Tensor:
                return objective(batch, torch.Generator().manual_seed(0)).total

            with run.engine.reference(objective):  # fused code would hide operations
                found[f"{stage}_operations"] = sequential_ops(loss)
                found[f"{stage}_bytes"] = kept_bytes(loss)
                run.rnn.cell = CountedCell(plain)
                found[f"{stage}_credit"] = recurrent_depth(loss())
                run.rnn.cell = plain
        return found

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        growth = {
            f"{stage}_{what}": _exponent(results, f"{stage}_{what}")
            for stage in STAGES
            for what in MEASURES
        }
        flat = ("smt_operations", "smt_credit", "smt_bytes", "dmt_credit")
        holds = all(
            abs(power) < 0.1 if name in flat else power > 0.7 for name, power in growth.items()
        )
        shown = "; ".join(
            f"{title} " + ", ".join(f"{growth[f'{stage}_{what}']:.2f}" for what in MEASURES)
            for stage, title in STAGES.items()
        )
        return Verdict(
            holds=holds,
            sentence="Power of T in operations, credit path, memory from "
            f"T={_upper(results)[0]['T']} to {results[-1]['T']}: {shown}.",
            numbers=growth,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 3)
        lengths = [result["T"] for result in results]
        for place, (what, label) in zip(axes[0], MEASURES.items(), strict=True):
            for stage, style in LINE_STYLES.items():
                values = [result[f"{stage}_{what}"] for result in results]
                place.plot(lengths, values, label=STAGES[stage], **style)
            log_x_axis(place, lengths)
            place.set(yscale="log", title=label, xlabel="sequence length T")
        legend(figure, axes[0, 0])
        return figure


def kept_bytes(function: Callable[[], torch.Tensor]) -> int:
    """Bytes of all tensors saved for the backward pass of `function`; each storage counts once."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function()  # kept alive, so that no storage is reused
    del result
    return sum(kept.values())


def _upper(results: Sequence[Result]) -> tuple[Result, Result]:
    """The ends of the upper half of the lengths."""
    return results[len(results) // 2 - 1], results[-1]


def _exponent(results: Sequence[Result], what: str) -> float:
    """The power of T with which a measure grows over the upper half of the lengths."""
    first, last = _upper(results)
    return math.log(last[what] / first[what]) / math.log(last["T"] / first["T"])


FIGURE = Resources()
