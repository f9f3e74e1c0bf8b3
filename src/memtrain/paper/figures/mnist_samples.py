"""Digits generated pixel by pixel, by RNNs trained in three ways."""

from collections.abc import Sequence

from memtrain.generation.generate import generate
from memtrain.paper.base import Result, Setup, Verdict, scores
from memtrain.paper.configs import Method, TunedExperiment, tuned
from memtrain.paper.plots import album, grey, mean, nearest_distance, real_images, show_images
from memtrain.plotting.style import panels
from memtrain.training.run import Run

METHODS = ("SMT → DMT, Transformer", "BPTT, Transformer", "BPTT, GRU")


class MnistSamples(TunedExperiment):
    name = "mnist-samples"
    claim = (
        "Of digits generated pixel by pixel, only those of the Transformer cell trained by SMT → "
        "DMT are recognisable; BPTT's are not, even with a GRU."
    )
    data_sets = ("mnist",)
    methods = [Method({"method": method}, "mnist", *method.split(", ")) for method in METHODS]

    def measure(self, run: Run) -> dict:
        count = 24 if run.task.sequence_length < 100 else 32
        samples = generate(run, count=count, seed=0).tokens
        held_out, training = real_images(run, "test", 64), real_images(run, "train", 2000)
        images = album(run, samples=samples, data=held_out[:24])
        known = grey(album(run, known=training), "known")
        near = nearest_distance(grey(images, "samples"), known)
        return scores(run) | {
            "album": images,
            "distance": near / nearest_distance(grey(album(run, real=held_out), "real"), known),
        }

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        runs = {m: tuned(results, method=m) for m in METHODS}
        nats = {m: mean(runs[m], "rnn_nats") for m in METHODS}
        far = {m: mean(runs[m], "distance") for m in METHODS}
        ours, *others = METHODS
        shown = "; ".join(
            f"{m} {nats[m]:.3f} nats per pixel, distance {far[m]:.2f}" for m in METHODS
        )
        return Verdict(
            holds=all(nats[ours] < nats[o] and far[ours] < far[o] for o in others),
            sentence=f"{shown}. Distance: from a generated to the nearest training image, relative "
            "to that of held-out images.",
            numbers={"nats": nats, "distance": far},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(2, 2, width=4.4, height=2.2)
        show_images(axes[0, 0], grey(results[0]["album"], "data"), "data, held out")
        for place, method in zip(axes.flat[1:], METHODS, strict=True):
            first = tuned(results, method=method)[0]
            title = f"{method} ({first['rnn_nats']:.2f} nats per pixel)"
            show_images(place, grey(first["album"], "samples")[:24], title)
        return figure


FIGURE = MnistSamples()
