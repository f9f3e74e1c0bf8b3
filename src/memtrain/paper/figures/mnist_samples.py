"""Digits drawn pixel by pixel, by RNNs that were trained in three ways."""

from collections.abc import Sequence
from dataclasses import replace

from memtrain.config import RunConfig
from memtrain.paper.base import (
    Experiment,
    Job,
    Result,
    Setup,
    Verdict,
    best,
    distinct,
    mean,
    scores,
    where,
)
from memtrain.paper.configs import bptt_twin, natural, with_rate
from memtrain.paper.plots import album, draw, grey, nearest_distance, real, strip
from memtrain.plotting.style import panels
from memtrain.training.run import Run

METHODS = ("SMT → DMT, Transformer", "BPTT, Transformer", "BPTT, GRU")


class MnistSamples(Experiment):
    name = "mnist-samples"
    claim = (
        "Of digits drawn pixel by pixel, only those of the Transformer cell trained by SMT → DMT "
        "are recognisable; BPTT's are not, even with a GRU."
    )
    data_sets = ("mnist",)

    def grid(self, setup: Setup) -> list[Job]:
        """The tries, on seed 0: as many rates a method."""
        rates = setup.pick(
            smoke=(1e-3,), cpu=(1e-3, 3e-3), gpu=(3e-4, 1e-3), paper=(1e-4, 3e-4, 1e-3)
        )
        return [_job(setup, method, rate, 0) for method in METHODS for rate in rates]

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        rates = {m: best(where(results, method=m), "rnn_nats")["rate"] for m in METHODS}
        return [_job(setup, m, rates[m], seed) for m in METHODS for seed in setup.seeds if seed]

    def measure(self, run: Run) -> dict:
        samples = draw(run, 24 if run.task.sequence_length < 100 else 32)
        held_out, training = real(run, "test", 64), real(run, "train", 2000)
        pictures = album(run, samples=samples, data=held_out[:24])
        known = grey(album(run, known=training), "known")
        near = nearest_distance(grey(pictures, "samples"), known)
        return scores(run) | {
            "album": pictures,
            "distance": near / nearest_distance(grey(album(run, real=held_out), "real"), known),
        }

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        results = _best_rates(results)
        nats = {m: mean(where(results, method=m), "rnn_nats") for m in METHODS}
        far = {m: mean(where(results, method=m), "distance") for m in METHODS}
        ours, *others = METHODS
        shown = "; ".join(f"{m} {nats[m]:.3f} nats a pixel, distance {far[m]:.2f}" for m in METHODS)
        return Verdict(
            holds=all(nats[ours] < nats[o] and far[ours] < far[o] for o in others),
            sentence=f"{shown}. Distance: from a drawing to the nearest training image, 1 is that "
            "of held-out images.",
            numbers={"nats": nats, "distance": far},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(2, 2, width=4.4, height=2.2)
        results = _best_rates(results)
        strip(axes[0, 0], grey(results[0]["album"], "data"), "data, held out")
        for place, method in zip(axes.flat[1:], METHODS, strict=True):
            drawn = where(results, method=method)[0]
            title = f"{method} ({drawn['rnn_nats']:.2f} nats a pixel)"
            strip(place, grey(drawn["album"], "samples")[:24], title)
        return figure


def _job(setup: Setup, method: str, rate: float, seed: int) -> Job:
    return Job(
        config=method_config(setup, "mnist", method, rate, seed),
        tags={"method": method, "rate": rate, "seed": seed},
    )


def method_config(setup: Setup, data: str, method: str, rate: float, seed: int) -> RunConfig:
    """A method such as "BPTT, GRU" on a data set. BPTT's steps take longer and so are fewer."""
    way, cell = method.split(", ")
    config = with_rate(natural(setup, data, cell=cell.lower(), seed=seed), rate)
    if way != "BPTT":
        return config
    length = setup.pick(smoke=16, cpu=64, gpu=256, paper=784 if data == "mnist" else 256)
    steps = setup.pick(smoke=6, cpu=300, gpu=200, paper=20_000)
    config = replace(config, dmt=replace(config.dmt, batch_size=config.smt.batch_size))
    return bptt_twin(setup, config, rate, steps=steps, length=length)


def _best_rates(results: Sequence[Result]) -> list[Result]:
    """Of each method only the runs at its best rate."""
    kept = []
    for method in distinct(results, "method"):
        of = where(results, method=method)
        kept += where(of, rate=best(where(of, seed=0), "rnn_nats")["rate"])
    return kept


FIGURE = MnistSamples()
