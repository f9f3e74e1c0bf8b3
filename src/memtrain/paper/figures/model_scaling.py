"""Loss of teacher and RNN against the size of the models."""

import math
from collections.abc import Sequence

import numpy as np

from memtrain.errors import MemtrainError
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, scores
from memtrain.paper.configs import natural
from memtrain.paper.plots import STYLES, mean, standard_deviation, where
from memtrain.plotting.style import log_x_axis, panels
from memtrain.training.run import Run


class ModelScaling(Experiment):
    name = "model-scaling"
    claim = (
        "The teacher's loss follows a power law in the number of parameters, and the RNN gets "
        "closer to its teacher as both grow."
    )
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        sizes = setup.pick(
            smoke=((8, 1), (16, 1)),
            cpu=((16, 1), (32, 2), (64, 2)),
            gpu=((32, 2), (64, 2), (128, 4), (256, 4)),
            paper=((64, 2), (128, 4), (256, 8), (512, 8), (768, 12)),
        )
        return [
            Job(
                config=natural(setup, "tinystories", width=width, layers=layers, seed=seed),
                tags={"width": width, "layers": layers, "seed": seed},
            )
            for width, layers in sizes
            for seed in setup.seeds
        ]

    def measure(self, run: Run) -> dict:
        assert run.teacher is not None
        count = sum(p.numel() for p in run.teacher.parameters())
        return scores(run) | {"parameters": count}

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        sizes, teacher, rnn = _means(results)
        logs = np.log(sizes), np.log(teacher)
        if not np.isfinite(logs).all():  # LAPACK would print to stderr
            raise MemtrainError("teacher_nats and parameters: must be finite and above 0")
        power = np.polyfit(*logs, 1)
        residuals = logs[1] - np.polyval(power, logs[0])
        variance = np.var(logs[1])
        fit = 1 - float(np.var(residuals) / variance) if variance else math.nan
        gaps = [float(value) for value in rnn - teacher]
        return Verdict(
            holds=bool((np.diff(teacher) < 0).all()) and fit > 0.9 and gaps[-1] < gaps[0],
            sentence=f"From {sizes[0]:,.0f} to {sizes[-1]:,.0f} parameters the teacher goes from "
            f"{teacher[0]:.3f} to {teacher[-1]:.3f} nats (power {power[0]:.3f}, R² {fit:.2f} of "
            f"the log-log line), the RNN's gap from {gaps[0]:+.3f} to {gaps[-1]:+.3f}.",
            numbers={
                "parameters": sizes.tolist(),
                "teacher_nats": teacher.tolist(),
                "rnn_nats": rnn.tolist(),
                "power": float(power[0]),
                "fit": fit,
            },
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 1, width=5.2, height=3.6)
        place = axes[0, 0]
        sizes, teacher, rnn = _means(results)
        lines = (("teacher", teacher, "teacher_nats"), ("SMT → DMT", rnn, "rnn_nats"))
        for label, middle, value in lines:
            bars = [standard_deviation(where(results, width=w), value) for w in _widths(results)]
            place.errorbar(sizes, middle, bars, capsize=2, label=label, **STYLES[label])
        log_x_axis(place)
        size = "parameters of the teacher (the RNN has about as many)"
        place.set(xlabel=size, ylabel="nats per character")
        place.legend()
        return figure


def _widths(results: Sequence[Result]) -> list[int]:
    return sorted({result["width"] for result in results})


def _means(results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups = [where(results, width=width) for width in _widths(results)]
    sizes, teacher, rnn = (
        np.array([mean(group, value) for group in groups])
        for value in ("parameters", "teacher_nats", "rnn_nats")
    )
    return sizes, teacher, rnn


FIGURE = ModelScaling()
