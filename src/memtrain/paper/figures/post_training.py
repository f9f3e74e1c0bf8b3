"""Short BPTT after BPTT, SMT and SMT → DMT: a table that the paper's authors left out.

The paper says that SMT is for pretraining, to be followed by light post-training, but has no figure
of it; this one is not among the fifteen.
"""

from collections.abc import Sequence
from dataclasses import replace

from memtrain.config import BPTTConfig, Retrieval, RunConfig
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict
from memtrain.paper.configs import bptt_twin, natural, synthetic
from memtrain.paper.figures.length import tracking
from memtrain.paper.plots import STYLES, average, mean, standard_deviation, where
from memtrain.plotting.style import legend, panels

TASKS = {"retrieval": "retrieval", "s5": "S5 words", "tinystories": "TinyStories"}
PRETRAINING = ("BPTT", "SMT", "SMT → DMT")
SHARE = 10
"""Short BPTT has a tenth of the steps of pretraining by BPTT."""


class PostTraining(Experiment):
    name = "post-training"
    claim = (
        "A short phase of BPTT improves an RNN that was pretrained by SMT → DMT, and takes it "
        "further than BPTT alone."
    )
    data_sets = ("tinystories",)

    def grid(self, setup: Setup) -> list[Job]:
        rates = setup.pick(
            smoke=(1e-3,), cpu=(3e-4, 1e-3), gpu=(3e-4, 1e-3), paper=(1e-4, 3e-4, 1e-3)
        )
        return [
            job
            for task in TASKS
            for pretraining in PRETRAINING
            for rate in rates
            for job in _jobs(setup, task, pretraining, rate, 0)
        ]

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        """The other seeds, at the rate of BPTT that was best on seed 0."""
        return [
            job
            for task in TASKS
            for pretraining in PRETRAINING
            for seed in setup.seeds[1:]
            for job in _jobs(setup, task, pretraining, _best_rate(results, task, pretraining), seed)
        ]

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers, words, holds = {}, [], []
        for task, title in TASKS.items():
            table = {one: _before_and_after(results, task, one) for one in PRETRAINING}
            shown = ", ".join(f"{one} {old:.3f} → {new:.3f}" for one, (old, new) in table.items())
            words.append(f"{title}: {shown}")
            numbers[task] = {one: list(pair) for one, pair in table.items()}
            before, after = table["SMT → DMT"]
            holds.append(after >= before - 0.01 and after >= table["BPTT"][1] - 0.01)
        return Verdict(
            holds=all(holds),
            sentence=f"Accuracy before → after short BPTT. {'; '.join(words)}.",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, len(TASKS), width=3.4, height=3.1)
        for place, (task, title) in zip(axes[0], TASKS.items(), strict=True):
            for pretraining in PRETRAINING:
                values = _before_and_after(results, task, pretraining)
                runs = _tuned(results, task, pretraining)
                band = standard_deviation(where(runs, short_bptt=True), "rnn_accuracy")
                style = STYLES[pretraining]
                place.errorbar([0, 1], values, yerr=[0, band], label=pretraining, **style)
            place.set_xticks([0, 1], ["pretrained", "then short BPTT"])
            place.set(xlim=(-0.35, 1.35), title=title)
        axes[0, 0].set_ylabel("accuracy")
        legend(figure, axes[0, 0])
        return figure


def _jobs(setup: Setup, task: str, pretraining: str, rate: float, seed: int) -> list[Job]:
    """The run that ends in short BPTT; for BPTT, also the run without it.

    The other runs have an evaluation at the end of pretraining; BPTT's rate has to come down first.
    """
    config = _config(setup, task, seed)
    whole = config.smt.steps + config.dmt.steps
    if task == "tinystories":  # BPTT's steps are far slower there
        whole = setup.pick(smoke=6, cpu=200, gpu=300, paper=20_000)
    short = max(2, whole // SHARE)
    tags = {"task": task, "pretraining": pretraining, "rate": rate, "seed": seed}
    if pretraining != "BPTT":
        dmt = replace(config.dmt, steps=config.dmt.steps if "DMT" in pretraining else 0)
        bptt = _cosine(bptt_twin(setup, config, rate, steps=short).bptt)
        return [Job(config=replace(config, dmt=dmt, bptt=bptt), tags={**tags, "short_bptt": True})]
    jobs = []
    for more, steps in ((False, whole), (True, whole + short)):
        run = bptt_twin(setup, config, rate, steps=steps)
        run = replace(run, bptt=_cosine(run.bptt))
        jobs.append(Job(config=run, tags={**tags, "short_bptt": more}))
    return jobs


def _cosine(stage: BPTTConfig) -> BPTTConfig:
    return replace(stage, schedule="cosine")


def _config(setup: Setup, task: str, seed: int) -> RunConfig:
    """SMT and DMT on the task."""
    if task == "s5":
        return tracking(setup, task, seed)
    if task == "tinystories":
        return natural(setup, task, seed=seed)
    length = setup.pick(smoke=8, cpu=32, gpu=64, paper=128)
    data = Retrieval(sequence_length=length, needle_within=0.5)
    return synthetic(setup, data, memory_tokens=2, seed=seed)


def _best_rate(results: Sequence[Result], task: str, pretraining: str) -> float:
    """The rate of BPTT whose last accuracy on seed 0 is the highest."""
    tries = where(results, task=task, pretraining=pretraining, short_bptt=True, seed=0)
    return max(tries, key=lambda result: result["rnn_accuracy"])["rate"]


def _tuned(results: Sequence[Result], task: str, pretraining: str) -> list[Result]:
    rate = _best_rate(results, task, pretraining)
    return where(results, task=task, pretraining=pretraining, rate=rate)


def _before_and_after(
    results: Sequence[Result], task: str, pretraining: str
) -> tuple[float, float]:
    """Mean accuracy of the RNN without and with short BPTT."""
    runs = _tuned(results, task, pretraining)
    after = where(runs, short_bptt=True)
    if pretraining == "BPTT":
        before = mean(where(runs, short_bptt=False), "rnn_accuracy")
    else:
        before = average(
            [p["rnn_accuracy"] for p in result.curve if p["stage"] != "bptt"][-1]
            for result in after
        )
    return before, mean(after, "rnn_accuracy")


FIGURE = PostTraining()
