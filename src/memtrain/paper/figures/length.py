"""Sequences longer than in training: the paper's stack, and two harder kinds of state tracking."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from memtrain.config import S5, Parity, RunConfig, Stack
from memtrain.data.task import build_task
from memtrain.evaluation.evaluate import evaluate
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import synthetic
from memtrain.paper.plots import STYLES, average, where
from memtrain.plotting.style import GREY, legend, log_x_axis, panels
from memtrain.training.run import Run

TASKS = {"stack": Stack, "parity": Parity, "s5": S5}
TITLES = {"stack": "stack (the paper's)", "parity": "parity", "s5": "S5 words"}
CHANCE = {"stack": 1 / (Stack().vocab_size - 1), "parity": 1 / 2, "s5": 1 / 120}
FACTORS = (1, 2, 4, 8, 16)
"""Lengths of evaluation in multiples of the training length."""
TRAINED = 0.9
"""Accuracy below which a teacher has not learned the task, so that nothing can be compared."""


def tracking(setup: Setup, task: str, seed: int) -> RunConfig:
    """SMT and DMT on one of the three tasks."""
    steps = setup.pick(smoke=12, cpu=1200, gpu=3000, paper=20_000)
    length = setup.pick(smoke=8, cpu=16, gpu=16, paper=32)
    if task != "s5":
        data = TASKS[task](sequence_length=length)
        return synthetic(setup, data, memory_tokens=2, steps=steps, seed=seed)
    # A target is the whole state, so T_f = 1 is enough; with a longer future the decoder has to
    # multiply permutations too.
    data = S5(sequence_length=length * 3 // 4)
    base = synthetic(setup, data, memory_tokens=2, steps=steps, seed=seed)
    smt = replace(base.smt, future_length=1, decode_timesteps=0, dynamics_weight=1.0)
    layers = max(base.teacher.encoder_layers, setup.pick(smoke=2, cpu=3, gpu=4, paper=8))
    return replace(base, smt=smt, teacher=replace(base.teacher, encoder_layers=layers))


class Length(Experiment):
    name = "length"
    claim = (
        "On state tracking (the paper's stack) the teacher is at least as good as the RNN at the "
        "training length, and the RNN is better far beyond it."
    )
    version = 2

    def grid(self, setup: Setup) -> list[Job]:
        return jobs_over(partial(tracking, setup), task=TASKS, seed=setup.seeds)

    def measure(self, run: Run) -> dict:
        trained = run.task.sequence_length
        lengths = [trained * factor for factor in FACTORS]
        found = {"lengths": lengths, "rnn": [], "teacher": []}
        for length in lengths:
            task = build_task(replace(run.config.data, sequence_length=length))
            with run.engine.eval_mode():
                result = evaluate(
                    task,
                    run.rnn,
                    run.teacher,
                    sequences=max(16, run.config.log.evaluate_sequences * trained // length),
                    device=run.engine.device,
                )
            assert result.teacher is not None
            found["rnn"].append(result.rnn.accuracy)
            found["teacher"].append(result.teacher.accuracy)
        return found

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers, words, holds = {}, [], False
        for task in TASKS:
            runs = where(results, task=task)
            lengths = runs[0]["lengths"]
            rnn, teacher = _averages(runs, "rnn"), _averages(runs, "teacher")
            outcome = "does not hold"
            if teacher[0] < TRAINED:
                outcome = "teacher not trained"
            elif teacher[0] >= rnn[0] - 0.01 and rnn[-1] > teacher[-1] + 0.01:
                outcome = "holds"
            if task == "stack":
                holds = outcome == "holds"
            words.append(
                f"{task} ({outcome}): teacher {teacher[0]:.3f}, RNN {rnn[0]:.3f} at T="
                f"{lengths[0]}, {teacher[-1]:.3f} and {rnn[-1]:.3f} at T={lengths[-1]}"
            )
            curves = {"lengths": lengths, "rnn": rnn, "teacher": teacher}
            numbers[task] = curves | {"outcome": outcome}
        return Verdict(
            holds=holds,
            sentence=f"{'; '.join(words)}. The verdict is that on the stack.",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, len(TASKS), width=3.5, height=3.1, sharey=True)
        for place, task in zip(axes[0], TASKS, strict=True):
            runs = where(results, task=task)
            lengths = runs[0]["lengths"]
            for name, label in (("teacher", "teacher"), ("rnn", "SMT → DMT")):
                for result in runs:
                    place.plot(lengths, result[name], alpha=0.25, **STYLES[label])
                place.plot(lengths, _averages(runs, name), label=label, **STYLES[label])
            place.axvline(lengths[0], color=GREY, lw=1, ls=":")
            place.axhline(CHANCE[task], color=GREY, lw=0.8, ls="-.", label="chance")
            log_x_axis(place, lengths)
            place.set(title=TITLES[task], xlabel="sequence length (dotted: in training)")
        axes[0, 0].set(ylabel="accuracy", ylim=(-0.03, 1.03))
        legend(figure, axes[0, 0])
        return figure


def _averages(results: Sequence[Result], name: str) -> list[float]:
    return [average(values) for values in zip(*(result[name] for result in results), strict=True)]


FIGURE = Length()
