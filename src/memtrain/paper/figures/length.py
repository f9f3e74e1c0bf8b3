"""Length generalisation on the stack task."""

from collections.abc import Sequence
from dataclasses import replace

from memtrain.config import RunConfig, Stack
from memtrain.data.task import build_task
from memtrain.evaluation.evaluate import evaluate
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import synthetic
from memtrain.paper.plots import STYLES, average
from memtrain.plotting.style import log_x_axis, panels
from memtrain.training.run import Run


class Length(Experiment):
    name = "length"
    claim = (
        "On the stack task the teacher is at least as good as the RNN at the training length, and "
        "the RNN is better far beyond it."
    )

    def grid(self, setup: Setup) -> list[Job]:
        length = setup.pick(smoke=8, cpu=16, gpu=16, paper=32)
        steps = setup.pick(smoke=12, cpu=1200, gpu=3000, paper=20_000)

        def config(T: int, seed: int) -> RunConfig:
            data = Stack(sequence_length=T)
            return synthetic(setup, data, memory_tokens=2, steps=steps, seed=seed)

        return jobs_over(config, T=[length], seed=setup.seeds)

    def measure(self, run: Run) -> dict:
        trained = run.task.sequence_length
        lengths = [trained * factor for factor in (1, 2, 4, 8)]
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
        lengths = results[0]["lengths"]
        rnn, teacher = _averages(results, "rnn"), _averages(results, "teacher")
        return Verdict(
            holds=teacher[0] >= rnn[0] - 0.01 and rnn[-1] > teacher[-1] + 0.01,
            sentence=f"Trained at T={lengths[0]}: teacher {teacher[0]:.3f}, RNN {rnn[0]:.3f} there;"
            f" at T={lengths[-1]} teacher {teacher[-1]:.3f}, RNN {rnn[-1]:.3f}.",
            numbers={"lengths": lengths, "rnn": rnn, "teacher": teacher},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 1, width=5.2, height=3.4)
        place = axes[0, 0]
        for name, label in (("teacher", "teacher"), ("rnn", "SMT → DMT")):
            for result in results:
                place.plot(result["lengths"], result[name], alpha=0.3, **STYLES[label])
            middle = _averages(results, name)
            place.plot(results[0]["lengths"], middle, label=label, **STYLES[label])
        place.axvline(results[0]["lengths"][0], color="#878d93", lw=1, ls=":")
        log_x_axis(place, results[0]["lengths"])
        place.set(xlabel="sequence length (dotted: in training)", ylabel="accuracy")
        place.legend()
        return figure


def _averages(results: Sequence[Result], name: str) -> list[float]:
    return [average(values) for values in zip(*(result[name] for result in results), strict=True)]


FIGURE = Length()
