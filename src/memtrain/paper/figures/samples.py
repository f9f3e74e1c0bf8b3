"""Images generated token by token: digits by RNNs trained in three ways, and sketches."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memtrain.config import RunConfig
from memtrain.generation.generate import generate
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over, scores
from memtrain.paper.configs import Method, TunedExperiment, natural, tuned
from memtrain.paper.plots import (
    album,
    component_size,
    grey,
    image_stream,
    mean,
    real_images,
    show_images,
)
from memtrain.paper.sample_quality import SAMPLES, sample_quality
from memtrain.paper.toy_data import check_labels
from memtrain.plotting.style import panels
from memtrain.training.run import Run

SHOWN = 32
"""Images that the pictures show of each kind."""
METHODS = ("BPTT, Transformer", "BPTT, GRU", "SMT → DMT, Transformer")
REFERENCES = (
    "floor_distance",
    "ceiling_distance",
    "floor_readable",
    "ceiling_readable",
    "classifier_accuracy",
)


class MnistSamples(TunedExperiment):
    name = "mnist-samples"
    version = 2
    claim = (
        "Of digits generated pixel by pixel, only those of the Transformer cell trained by SMT → "
        "DMT are recognisable; BPTT's are not, even with a GRU."
    )
    data_sets = ("mnist",)
    methods = [Method({"method": method}, "mnist", *method.split(", ")) for method in METHODS]

    def grid(self, setup: Setup) -> list[Job]:
        jobs = super().grid(setup)
        check_labels(setup, "mnist")
        return jobs

    def measure(self, run: Run) -> dict:
        return measure_samples(run)

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        runs = {method: tuned(results, method=method) for method in METHODS}
        nats, far, readable = (
            {method: mean(runs[method], value) for method in METHODS}
            for value in ("rnn_nats", "distance", "readable")
        )
        known = {name: mean(results, name) for name in REFERENCES}
        floor, ceiling = known["floor_distance"], known["ceiling_distance"]
        plain, gated, ours = METHODS
        gained = closed(far[ours], far[plain], floor)
        structure = closed(far[ours], ceiling, floor)
        shown = "; ".join(
            f"{method} {far[method]:.1f} ({readable[method]:.0%} readable, {nats[method]:.3f} nats "
            "per pixel)"
            for method in METHODS
        )
        return Verdict(
            holds=far[ours] < far[plain]
            and far[ours] < far[gated]
            and gained >= 0.5
            and structure >= 0.5,
            sentence=f"Fréchet distance to training images: {shown}; held-out images {floor:.1f} "
            f"({known['floor_readable']:.0%}), a model of four neighbours {ceiling:.1f} "
            f"({known['ceiling_readable']:.0%}). SMT → DMT closes {gained:.0%} of the gap from "
            f"BPTT with the same cell to held-out images, {structure:.0%} of that from the model "
            f"of neighbours. The classifier has {known['classifier_accuracy']:.1%} on held-out "
            "images; readable: it gives one class more than 0.9.",
            numbers=known
            | {"nats": nats, "distance": far, "readable": readable}
            | {"closed_from_bptt": gained, "closed_from_ceiling": structure},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(2, 2, width=4.6, height=2.7)
        floor = mean(results, "floor_distance")
        title = f"data, held out (distance {floor:.1f})"
        show_images(axes[0, 0], grey(results[0]["album"], "data"), title)
        for place, method in zip(axes.flat[1:], METHODS, strict=True):
            first = tuned(results, method=method)[0]
            title = f"{method} (distance {first['distance']:.1f}, {first['rnn_nats']:.2f} nats)"
            show_images(place, grey(first["album"], "samples"), title)
        return figure


class SketchySamples(Experiment):
    name = "sketchy-samples"
    version = 2
    claim = "An RNN trained by SMT → DMT captures the stroke structure of human sketches."
    data_sets = ("sketchy",)

    def grid(self, setup: Setup) -> list[Job]:
        jobs = jobs_over(lambda seed: longer(setup, "sketchy", seed), seed=setup.seeds)
        check_labels(setup, "sketchy")
        return jobs

    def measure(self, run: Run) -> dict:
        found = measure_samples(run)
        drawn, data = grey(found["album"], "samples"), grey(found["album"], "data")
        scattered = np.random.default_rng(0).permuted(drawn.reshape(len(drawn), -1), axis=1)
        return found | {
            "ink": float((drawn < 128).mean()),
            "ink_data": float((data < 128).mean()),
            "stroke": component_size(drawn),
            "stroke_data": component_size(data),
            "stroke_scattered": component_size(scattered.reshape(drawn.shape)),
        }

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        strokes = ("stroke", "stroke_data", "stroke_scattered", "ink", "ink_data", "rnn_nats")
        numbers = {name: mean(results, name) for name in (*strokes, "distance", *REFERENCES)}
        drawn, data, scattered = (numbers[name] for name in strokes[:3])
        share = math.nan
        if drawn > 0 and scattered > 0 and data > scattered:
            share = math.log(drawn / scattered) / math.log(data / scattered)
        floor, ceiling = numbers["floor_distance"], numbers["ceiling_distance"]
        structure = closed(numbers["distance"], ceiling, floor)
        return Verdict(
            holds=share > 0.5 and structure >= 0.5,
            sentence=f"Fréchet distance to training sketches: samples {numbers['distance']:.1f}, "
            f"held-out sketches {floor:.1f}, a model of four neighbours {ceiling:.1f}: "
            f"{structure:.0%} of the gap is closed (the classifier has "
            f"{numbers['classifier_accuracy']:.1%} on held-out sketches). A connected component of "
            f"ink has {drawn:.1f} pixels in samples, {data:.1f} in sketches, {scattered:.1f} in "
            f"samples with shuffled pixels: {share:.0%} of the way on a log scale; ink covers "
            f"{numbers['ink']:.1%} against {numbers['ink_data']:.1%}.",
            numbers=numbers | {"stroke_share": share, "closed_from_ceiling": structure},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(2, 1, width=8.4, height=4.4)
        first, floor = results[0], mean(results, "floor_distance")
        title = f"sketches, held out (distance {floor:.1f})"
        show_images(axes[0, 0], grey(first["album"], "data"), title)
        title = f"SMT → DMT (distance {first['distance']:.1f}, {first['rnn_nats']:.2f} nats)"
        show_images(axes[1, 0], grey(first["album"], "samples"), title)
        return figure


def longer(setup: Setup, name: str, seed: int) -> RunConfig:
    """At the scale gpu the paper's context and four times the steps: images need both."""
    if setup.scale != "gpu":
        return natural(setup, name, seed=seed)
    config = natural(setup, name, context_length=256, seed=seed)
    return replace(
        config,
        smt=replace(config.smt, steps=4 * config.smt.steps),
        dmt=replace(config.dmt, steps=4 * config.dmt.steps),
        log=replace(
            config.log, evaluate_every=config.smt.steps, checkpoint_every=2 * config.smt.steps
        ),
    )


def measure_samples(run: Run) -> dict:
    """Generate images: losses, distances, and an album of the first ones beside held-out data."""
    task, picture = image_stream(run)
    count = min(SAMPLES, len(task.tokens("test")) // picture.length)
    samples = generate(run, count=count, seed=0).tokens
    shown = album(run, samples=samples[:SHOWN], data=real_images(run, "test", SHOWN))
    return scores(run) | sample_quality(run, samples) | {"album": shown}


def closed(distance: float, start: float, floor: float) -> float:
    """The share of the way from `start` to the floor that a distance is."""
    return (start - distance) / (start - floor) if start > floor else math.nan


MNIST, SKETCHY = MnistSamples(), SketchySamples()
