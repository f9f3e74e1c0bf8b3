"""Sketches drawn patch by patch by an RNN trained with SMT → DMT."""

import math
from collections.abc import Sequence

import numpy as np

from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, mean, scores
from memtrain.paper.configs import natural
from memtrain.paper.plots import album, component_size, draw, grey, real, strip
from memtrain.plotting.style import panels
from memtrain.training.run import Run


class SketchySamples(Experiment):
    name = "sketchy-samples"
    claim = "An RNN trained by SMT → DMT captures the stroke structure of human sketches."
    data_sets = ("sketchy",)

    def grid(self, setup: Setup) -> list[Job]:
        return [
            Job(config=natural(setup, "sketchy", seed=seed), tags={"seed": seed})
            for seed in setup.seeds
        ]

    def measure(self, run: Run) -> dict:
        pictures = album(run, samples=draw(run, 16), data=real(run, "test", 16))
        drawn, data = grey(pictures, "samples"), grey(pictures, "data")
        scattered = np.random.default_rng(0).permuted(drawn.reshape(len(drawn), -1), axis=1)
        return scores(run) | {
            "album": pictures,
            "ink": float((drawn < 128).mean()),
            "ink_data": float((data < 128).mean()),
            "stroke": component_size(drawn),
            "stroke_data": component_size(data),
            "stroke_scattered": component_size(scattered.reshape(drawn.shape)),
        }

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        names = ("stroke", "stroke_data", "stroke_scattered", "ink", "ink_data", "rnn_nats")
        numbers = {name: mean(results, name) for name in names}
        drawn, data, scattered = (numbers[name] for name in names[:3])
        share = math.nan
        if drawn > 0 and scattered > 0 and data > scattered:
            share = math.log(drawn / scattered) / math.log(data / scattered)
        return Verdict(
            holds=share > 0.5,
            sentence=f"A connected piece of ink has {drawn:.1f} pixels in drawings, {data:.1f} in "
            f"sketches, {scattered:.1f} when the drawings' pixels are scattered: "
            f"{share:.0%} of the way on a log scale; ink covers {numbers['ink']:.1%} against "
            f"{numbers['ink_data']:.1%}.",
            numbers=numbers | {"stroke_share": share},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(2, 1, width=8.4, height=2.4)
        strip(axes[0, 0], grey(results[0]["album"], "data"), "sketches, held out")
        strip(axes[1, 0], grey(results[0]["album"], "samples"), "drawn by the RNN from nothing")
        return figure


FIGURE = SketchySamples()
