"""The networks of a race: pace, trials of learning rates, the last training, and scores."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean, median

import torch

from memtrain.demo.baselines import scientific
from memtrain.demo.race.plan import CONTENDERS, FACTORS, TRIALS, RaceFile, fit_parameters
from memtrain.errors import DivergedError
from memtrain.evaluation.evaluate import Evaluation, evaluate
from memtrain.generation.sampling import sample
from memtrain.models.build import build_rnn
from memtrain.models.teacher import count_parameters
from memtrain.training.console import Reporter, format_time
from memtrain.training.run import Run
from memtrain.training.schedule import START_STEPS
from memtrain.training.step import Trainer

SPEED_TOKENS = 128
"""Tokens of one sequence that are generated to time one."""


class RaceReporter(Reporter):
    """Passes the progress of a run on, and shows what is left of the race beside its name."""

    def __init__(self, inner: Reporter, label: str, rest: float, seconds: float) -> None:
        self.inner, self.label, self.rest, self.left = inner, label, rest, seconds

    def _named(self) -> str:
        return f"{self.label} [race {format_time(self.rest + self.left)}]"

    def stage(self, name: str, step: int, steps: int) -> None:
        self.name = name
        self.inner.stage(self._named(), step, steps)

    def clock(self, left: float) -> None:
        self.left = left
        self.inner.clock(left)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if shown := getattr(self.inner, "shown", None):
            shown.name = self._named()
        self.inner.advance(step, metrics)

    def evaluated(self, step: int, evaluation: Evaluation, unit: str) -> None:
        self.inner.evaluated(step, evaluation, unit)

    def say(self, message: str) -> None:
        self.inner.say(message)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Racing:
    """Trains the networks of a race one after another, each with all of the machine."""

    race: RaceFile
    vocab_size: int
    make_reporter: Callable[[], Reporter]
    say: Callable[[str], None]
    target: int = 0
    """Parameters that all networks have, up to a tenth."""

    def train(self) -> None:
        """Train and score every contender that is not done yet.

        Raises:
            Interrupted: a signal; what was trained so far is saved.
        """
        plan = self.race.plan
        names = plan.methods
        self.target = count_parameters(build_rnn(plan.recipe(names[0]), self.vocab_size))
        self.say(
            f"{plan.minutes:g} minutes of training, {plan.seconds:.0f} s per network: "
            f"{TRIALS} learning rates for {plan.trial:.0f} s each, the best for "
            f"{plan.last:.0f} s; evaluations come on top"
        )
        for name in names:
            if name not in self.race.pace:
                self.say(f"{CONTENDERS[name].title}: first steps, outside of the clock")
                self._rehearse(name)
                self.race.write()
        for name in names:
            if name not in self.race.results:
                self.race.results[name] = self._contender(name)
                self.race.write()

    def _rehearse(self, name: str) -> None:
        """Measure seconds per step of each stage, and of its start; compiles what they need."""
        config = fit_parameters(self.race.plan.recipe(name), self.target, self.vocab_size)
        run, pace, starts = Run(config), {}, {}
        for stage in run.stages:
            starts[stage] = 0.0
            if compiles(run):
                self._seconds_of_steps(run, stage, START_STEPS)  # compiles; no later run does
                taken = self._seconds_of_steps(run, stage, 2 * START_STEPS)
                pace[stage] = median(taken[START_STEPS:])
                extra = sum(taken[:START_STEPS]) - START_STEPS * pace[stage]
                starts[stage] = max(0.0, extra)
            else:
                pace[stage] = median(self._seconds_of_steps(run, stage, 3)[1:])
        self.race.pace[name], self.race.starts[name] = pace, starts

    @staticmethod
    def _seconds_of_steps(run: Run, stage: str, steps: int) -> list[float]:
        """Seconds of each of the first steps of a stage."""
        settings = run.config.stages()[stage]
        trainer = Trainer(run.objective(stage), settings, run.task, run.engine, seed=0)
        taken = []
        with trainer.frozen_rest():
            for _ in range(steps):
                began = time.perf_counter()
                trainer.train_step()
                trainer.check()
                taken.append(time.perf_counter() - began)
        return taken

    def _contender(self, name: str) -> dict:
        """Try the rates, train with the best, score it; returns what the table shows."""
        losses = self._try_rates(name)
        best = min(losses, key=losses.__getitem__)
        if losses[best] == math.inf:
            return {"problem": "diverged at every rate", "factor": None}
        try:
            run = self._run(name, best)
        except DivergedError as error:
            return {"problem": str(error), "factor": best}
        return {"factor": best, "problem": "", **self._score(run)}

    def _try_rates(self, name: str) -> dict[float, float]:
        """The losses of the recipe's rate, of a higher one, and of the next beyond the better."""
        lowest, recipe, higher, highest = FACTORS
        losses: dict[float, float] = {}
        for left, factor in ((2, recipe), (1, higher), (0, None)):
            if factor is None:
                factor = highest if losses[higher] < losses[recipe] else lowest
            loss = self._trial(name, factor, left)
            losses[factor] = math.inf if loss is None else loss
        return losses

    def _trial(self, name: str, factor: float, left: int) -> float | None:
        """The loss of a trial, after which `left` others come; None if it diverged."""
        key = f"{name}-{factor:.3g}"
        if key not in self.race.trials:
            self.race.trials[key] = None
            with suppress(DivergedError):
                self.race.trials[key] = self._validate(self._run(name, factor, trials_left=left))
            if not math.isfinite(self.race.trials[key] or math.inf):
                self.race.trials[key] = None
            self.race.write()
        return self.race.trials[key]

    def _run(self, name: str, factor: float, trials_left: int | None = None) -> Run:
        """A trained run, continued if it was stopped; the last one if it is not a trial."""
        plan, race, last = self.race.plan, self.race, trials_left is None
        folder = race.folder / (name if last else f"trials/{name}-{factor:.3g}")
        config = plan.config(name, factor, race.pace[name], race.starts[name], last=last)
        config = fit_parameters(config, self.target, self.vocab_size)
        run = Run.open(folder) if (folder / "config.json").exists() else Run.create(config, folder)
        stage = next(iter(stage for stage in config.stages().values() if stage.steps))
        rate = scientific(stage.learning_rate)
        seconds = sum(one.seconds for one in config.stages().values())
        label = f"{name} {rate}{'' if last else ' trial'}"
        reporter = RaceReporter(
            self.make_reporter(), label, self._after(name, trials_left), seconds
        )
        began, cpu = time.perf_counter(), time.process_time()
        try:
            run.train(reporter)
        finally:
            if last:
                known = race.shares.get(name, {"cpu": 0.0, "seconds": 0.0})
                race.shares[name] = {
                    "cpu": known["cpu"] + time.process_time() - cpu,
                    "seconds": known["seconds"] + time.perf_counter() - began,
                }
                race.write()
        return run

    def _after(self, name: str, trials_left: int | None) -> float:
        """Training seconds of the race after this run."""
        plan = self.race.plan
        others = len(plan.methods) - plan.methods.index(name) - 1
        own = 0.0 if trials_left is None else plan.last + trials_left * plan.trial
        return others * plan.seconds + own

    def _validate(self, run: Run) -> float:
        return self._nats(run, self.race.plan.validation)

    @staticmethod
    def _nats(run: Run, sequences: int, skip: int = 0) -> float:
        with run.engine.eval_mode():
            return evaluate(run.task, run.rnn, sequences=sequences, skip=skip).rnn.nats

    def _score(self, run: Run) -> dict:
        plan = self.race.plan
        groups = [
            self._nats(run, plan.group, plan.validation + index * plan.group)
            for index in range(plan.groups)
        ]
        stages = [stage for stage in run.config.stages().values() if stage.steps]
        return {
            "nats": mean(groups),
            "groups": groups,
            "parameters": count_parameters(run.rnn),
            "rates": [stage.learning_rate for stage in stages],
            "milliseconds": 1000 * seconds_per_token(run),
            **run.totals(),
        }


def compiles(run: Run) -> bool:
    """Whether a run's first steps compile kernels and capture a CUDA graph."""
    return run.engine.device.type == "cuda"


def seconds_per_token(run: Run) -> float:
    """Seconds to generate one token of one sequence, after a start."""
    device, rnn = run.engine.device, run.rnn.eval()
    prompt = torch.zeros(1, 1, dtype=torch.long, device=device)
    taken = []
    with run.engine.eval_mode():
        for _ in range(4):  # the first one compiles and captures
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            sample(rnn, prompt, SPEED_TOKENS, torch.Generator(device).manual_seed(0)).cpu()
            taken.append((time.perf_counter() - began) / SPEED_TOKENS)
    rnn.train()
    return min(taken[1:])
