"""Digits generated pixel by pixel, by RNNs trained in three ways."""

from collections.abc import Sequence

from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, scores
from memtrain.paper.configs import method_config
from memtrain.paper.plots import (
    album,
    best,
    distinct,
    generated_images,
    grey,
    mean,
    nearest_distance,
    real_images,
    show_images,
    where,
)
from memtrain.plotting.style import panels
from memtrain.training.run import Run

METHODS = ("SMT → DMT, Transformer", "BPTT, Transformer", "BPTT, GRU")


class MnistSamples(Experiment):
    name = "mnist-samples"
    claim = (
        "Of digits generated pixel by pixel, only those of the Transformer cell trained by SMT → "
        "DMT are recognisable; BPTT's are not, even with a GRU."
    )
    data_sets = ("mnist",)

    def grid(self, setup: Setup) -> list[Job]:
        """The same number of learning rates per method, with seed 0."""
        rates = setup.pick(
            smoke=(1e-3,), cpu=(1e-3, 3e-3), gpu=(3e-4, 1e-3), paper=(1e-4, 3e-4, 1e-3)
        )
        return [_job(setup, method, rate, 0) for method in METHODS for rate in rates]

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        rates = {m: best(where(results, method=m), "rnn_nats")["rate"] for m in METHODS}
        return [_job(setup, m, rates[m], seed) for m in METHODS for seed in setup.seeds if seed]

    def measure(self, run: Run) -> dict:
        samples = generated_images(run, 24 if run.task.sequence_length < 100 else 32)
        held_out, training = real_images(run, "test", 64), real_images(run, "train", 2000)
        images = album(run, samples=samples, data=held_out[:24])
        known = grey(album(run, known=training), "known")
        near = nearest_distance(grey(images, "samples"), known)
        return scores(run) | {
            "album": images,
            "distance": near / nearest_distance(grey(album(run, real=held_out), "real"), known),
        }

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        results = _best_rates(results)
        nats = {m: mean(where(results, method=m), "rnn_nats") for m in METHODS}
        far = {m: mean(where(results, method=m), "distance") for m in METHODS}
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
        results = _best_rates(results)
        show_images(axes[0, 0], grey(results[0]["album"], "data"), "data, held out")
        for place, method in zip(axes.flat[1:], METHODS, strict=True):
            first = where(results, method=method)[0]
            title = f"{method} ({first['rnn_nats']:.2f} nats per pixel)"
            show_images(place, grey(first["album"], "samples")[:24], title)
        return figure


def _job(setup: Setup, method: str, rate: float, seed: int) -> Job:
    tags = {"method": method, "rate": rate, "seed": seed}
    return Job(config=method_config(setup, "mnist", method, rate, seed), tags=tags)


def _best_rates(results: Sequence[Result]) -> list[Result]:
    """The runs of each method at its best learning rate."""
    kept = []
    for method in distinct(results, "method"):
        of = where(results, method=method)
        kept += where(of, rate=best(where(of, seed=0), "rnn_nats")["rate"])
    return kept


FIGURE = MnistSamples()
