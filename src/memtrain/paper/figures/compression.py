"""Iso-loss contours of the teacher over memory size and training compute."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memtrain.config import RunConfig
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import natural
from memtrain.paper.plots import average, where
from memtrain.plotting.style import log_x_axis, panels


class Compression(Experiment):
    name = "compression"
    claim = "For a given loss, a smaller memory suffices if training compute increases."
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        shapes = setup.pick(
            smoke=((1, 4), (1, 16)),
            cpu=((1, 4), (1, 16), (1, 64), (4, 64)),
            gpu=((1, 8), (1, 32), (1, 128), (4, 128), (16, 128)),
            paper=((1, 16), (1, 64), (1, 256), (4, 256), (16, 256), (64, 256)),
        )
        by_size = {tokens * width: (tokens, width) for tokens, width in shapes}

        def config(memory: int, seed: int) -> RunConfig:
            tokens, width = by_size[memory]
            base = natural(setup, "tinystories", memory_tokens=tokens, seed=seed)
            steps = base.smt.steps * setup.pick(smoke=1, cpu=1, gpu=4, paper=1)
            every = max(1, steps // setup.pick(smoke=4, cpu=12, gpu=20, paper=50))
            return replace(
                base,
                smt=replace(base.smt, steps=steps),
                cell=replace(base.cell, memory_dim=width),
                dmt=replace(base.dmt, steps=0),
                log=replace(base.log, evaluate_every=every, checkpoint_every=steps),
            )

        return jobs_over(config, memory=by_size, seed=setup.seeds)

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        sizes, steps, nats = _surface(results)
        target = float(nats[-1, len(steps) // 2])  # the largest memory after half of the steps
        needed = [_first_step(steps, row, target) for row in nats]
        reached = [value for value in needed if math.isfinite(value)]
        falling = all(later <= sooner for sooner, later in zip(needed, needed[1:], strict=False))
        shown = ", ".join(
            f"{size} numbers: {f'{value:.0f}' if math.isfinite(value) else 'not reached'}"
            for size, value in zip(sizes, needed, strict=True)
        )
        return Verdict(
            holds=falling and len(reached) > 1 and reached[0] > reached[-1],
            sentence=f"Steps until the teacher reaches {target:.3f} nats, by memory size: {shown}.",
            numbers={
                "target_nats": target,
                "memory": sizes,
                "steps_needed": [value if math.isfinite(value) else None for value in needed],
            },
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 2, width=4.6, height=3.4)
        sizes, steps, nats = _surface(results)
        curves, contours = axes[0]
        for size, row in zip(sizes, nats, strict=True):
            curves.plot(steps, row, label=f"{size}")
        log_x_axis(curves)
        curves.set(xlabel="training steps (equal batches)", ylabel="teacher's nats per character")
        curves.legend(title="memory size", fontsize=8)
        drawn = contours.contourf(steps, sizes, nats, levels=12, cmap="viridis_r")
        figure.colorbar(drawn, ax=contours, label="nats")
        log_x_axis(contours)
        contours.set_yscale("log", base=2)
        contours.set_yticks(sizes, sizes)
        contours.set(xlabel="training steps", ylabel="memory size M·D")
        return figure


def _surface(results: Sequence[Result]) -> tuple[list[int], list[int], np.ndarray]:
    """Memory sizes, steps of the evaluations, and the teacher's mean nats (size, step)."""
    sizes = sorted({result["memory"] for result in results})
    steps = [point["steps"] for point in results[0].curve]
    nats = [
        [
            average(r.curve[index]["teacher_nats"] for r in where(results, memory=size))
            for index in range(len(steps))
        ]
        for size in sizes
    ]
    return sizes, steps, np.array(nats)


def _first_step(steps: Sequence[int], nats: np.ndarray, target: float) -> int | float:
    return next((s for s, value in zip(steps, nats, strict=True) if value <= target), math.inf)


FIGURE = Compression()
