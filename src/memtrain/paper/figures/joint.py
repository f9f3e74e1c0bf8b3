"""Joint against detached training on retrieval, over the length of the future T_f."""

from collections.abc import Sequence
from dataclasses import replace

from memtrain.config import RunConfig
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.plots import line, mean, where
from memtrain.paper.settings import retrieval, smt_config
from memtrain.plotting.style import COLOURS, log_x_axis, panels

SOLVED = 0.9


class Joint(Experiment):
    name = "joint"
    claim = (
        "Detached from the dynamics loss, the teacher solves retrieval only if its future T_f "
        "spans the whole sequence; joint training solves it even at T_f = 1."
    )

    def grid(self, setup: Setup) -> list[Job]:
        length = setup.pick(smoke=8, cpu=16, gpu=32, paper=64)
        futures = [future for future in (1, 2, 4, 8, 16, 32, 64) if future <= length]
        futures = setup.pick(smoke=[1, 8], cpu=[1, 4, 16], gpu=[1, 4, 16, 32], paper=futures)
        # The models of the synthetic figure, by SMT alone, because DMT through time would also
        # assign credit. All steps are decoded: with a short future few of them have a target.
        steps = setup.pick(smoke=12, cpu=1500, gpu=5000, paper=20_000)
        rate = setup.pick(smoke=3e-3, cpu=3e-3, gpu=1e-3, paper=3e-4)

        def config(T_f: int, joint: bool, T: int, seed: int) -> RunConfig:
            base = smt_config(setup, retrieval(T), rate, seed, noise=0.0)
            fields: dict = {"future_length": T_f, "joint": joint, "decode_timesteps": 0}
            return replace(base, smt=replace(base.smt, steps=steps, **fields))

        return jobs_over(config, T_f=futures, joint=(True, False), T=[length], seed=setup.seeds)

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers = {}
        for joint in (True, False):
            for future in sorted({result["T_f"] for result in results}):
                of = where(results, joint=joint, T_f=future)
                numbers[f"{'joint' if joint else 'detached'}_Tf{future}"] = mean(of, "rnn_accuracy")
        length = results[0]["T"]
        shortest, longest = min(r["T_f"] for r in results), max(r["T_f"] for r in results)
        joint_short = numbers[f"joint_Tf{shortest}"]
        detached_short = numbers[f"detached_Tf{shortest}"]
        detached_long = numbers[f"detached_Tf{longest}"]
        return Verdict(
            holds=joint_short >= SOLVED and detached_short < SOLVED <= detached_long,
            sentence=f"Accuracy of the rolled-out RNN after SMT, T={length}: at T_f={shortest} "
            f"joint {joint_short:.2f}, detached {detached_short:.2f}; at T_f={longest} joint "
            f"{numbers[f'joint_Tf{longest}']:.2f}, detached {detached_long:.2f} "
            f"(guessing gives 0.13; {SOLVED} counts as solved).",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, 2, width=4.2, height=3.2, sharey=True)
        for place, value, title in (
            (axes[0, 0], "rnn_accuracy", "RNN, rolled out"),
            (axes[0, 1], "teacher_accuracy", "teacher, which reads the whole sequence"),
        ):
            joint, detached = where(results, joint=True), where(results, joint=False)
            line(place, joint, "T_f", value, "joint", marker="o")
            line(place, detached, "T_f", value, "detached", marker="^", color=COLOURS[1])
            log_x_axis(place, {result["T_f"] for result in results})
            place.set(xlabel="future length T_f", ylim=(0, 1.05), title=title)
        axes[0, 0].set_ylabel("accuracy")
        axes[0, 0].legend()
        return figure


FIGURE = Joint()
