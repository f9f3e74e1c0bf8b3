"""The contract of a figure: its runs, what is measured on each, what they say, how they look.

A figure of yours is a class like those beside this file; `memtrain reproduce my_file:MyFigure`.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from memtrain.config import RunConfig
from memtrain.errors import MemtrainError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memtrain.training.run import Run

Scale = Literal["smoke", "cpu", "gpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "gpu", "paper")
STAND_INS = {
    "mnist": "scikit-learn's 8x8 digits in MNIST's place",
    "tinystories": "stories told by a grammar in TinyStories' place",
    "sketchy": "outlines of polygons in Sketchy's place",
}
"""What the scales smoke and cpu learn instead of a data set; stand_ins.py makes it."""
TOO_SMALL = "too small to judge"
"""The word for every claim at the scale smoke."""
ROOT = "{folder}"
"""How configs write the folder of a sweep."""
LATER: dict[str, Any] = {
    "data.needle_within": 1.0,
    "smt.dynamics_steps": 1,
    "smt.normalize_dynamics": False,
    "smt.memory_noise": 0.0,
}
"""Fields that configs got after the first sweeps were run ("data.field"), with their defaults: at
its default such a field is not part of a key, so that earlier folders keep their results."""
Tag = str | int | float | bool
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How large, and where: everything a grid may depend on."""

    scale: Scale = "smoke"
    """smoke: seconds, shows that it runs; cpu: minutes; gpu: minutes of a large GPU; paper."""
    folder: Path
    """Where results, runs and pictures go."""
    data_dir: Path = Path("data")
    """Holds what `memtrain data` prepared, for the scales gpu and paper."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    root: str = ROOT
    """What configs write for the folder, so that a run's key is the same wherever the folder lies.
    Folders of earlier versions have the place where they were made."""
    prepares: bool = True
    """Whether a grid makes the data that it needs, or asks for it; a report does without."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise MemtrainError(f"scale={self.scale!r}: {did_you_mean(self.scale, SCALES)}")

    def pick(self, *, smoke: Value, cpu: Value, gpu: Value, paper: Value) -> Value:
        """What belongs to this scale."""
        return {"smoke": smoke, "cpu": cpu, "gpu": gpu, "paper": paper}[self.scale]

    @property
    def seeds(self) -> range:
        return range(self.pick(smoke=1, cpu=2, gpu=3, paper=3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a grid, and its place there."""

    config: RunConfig
    tags: Mapping[str, Tag] = field(default_factory=dict)
    """Where in the grid: the method, the swept values, the seed."""
    train: bool = True
    """Off: the models are measured as they are made."""

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.tags.items()) or self.config.name

    @property
    def key(self) -> str:
        """The same for the same config: such jobs share one run, whichever figure asks."""
        plain = asdict(self.config)
        for name, default in LATER.items():
            *section, field_name = name.split(".")
            at = plain[section[0]] if section else plain
            if at.get(field_name) == default:
                del at[field_name]
        text = json.dumps([plain, self.train], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What is known of a finished job: one line of results.jsonl."""

    figure: str
    version: int
    """Of the figure's `measure`: results of another version are not used."""
    job: str
    key: str
    tags: dict[str, Tag]
    measured: dict[str, Any]
    cost: dict[str, int | float]
    """Steps, tokens, sequential operations and training seconds of the whole run."""
    curve: list[dict[str, Any]]
    """The evaluations along the run: costs so far, losses and accuracies."""
    diverged: str = ""
    """Why training stopped early, if a number was not finite; measured at the last checkpoint."""

    def __getitem__(self, name: str) -> Any:
        """A tag, or what was measured."""
        return self.tags[name] if name in self.tags else self.measured[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the paper's claim holds here."""

    holds: bool | None
    """None: it was not judged."""
    sentence: str
    """What was found, with numbers, for a person."""
    numbers: dict[str, Any]
    """The same for a program."""
    unjudged: str = "not judged at this scale"
    """Why not, if it was not."""

    @property
    def word(self) -> str:
        return {True: "holds", False: "does not hold", None: self.unjudged}[self.holds]


class Experiment(ABC):
    """One table or figure."""

    name: str
    claim: str
    """What the paper says, in a sentence."""
    version: int = 1
    """Raise it when `measure` changes its meaning."""
    data_sets: tuple[str, ...] = ()
    """Of mnist, tinystories, sketchy, those that it learns; small scales have stand-ins."""

    @property
    def title(self) -> str:
        from memtrain.paper import FIGURES

        return FIGURES.get(self.name, self.name)

    @property
    def follows_up(self) -> bool:
        """Whether more runs wait for the grid's results."""
        return type(self).follow_up is not Experiment.follow_up

    @abstractmethod
    def grid(self, setup: Setup) -> list[Job]:
        """The runs."""

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        """More runs that depend on the grid's results, for example at the best learning rate."""
        return []

    def measure(self, run: "Run") -> dict[str, Any]:
        """Numbers and lists from one finished run, as JSON can hold them."""
        return scores(run)

    @abstractmethod
    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        """The claim against the results."""

    @abstractmethod
    def plot(self, setup: Setup, results: Sequence[Result]) -> "Figure":
        """The picture."""

    def verdict(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        """`judge`, not at the scale smoke, with the diverged runs counted."""
        found = self.judge(setup, results)
        diverged = sum(bool(result.diverged) for result in results)
        if diverged:
            found = replace(
                found,
                sentence=f"{found.sentence} {diverged} of {len(results)} runs diverged.",
                numbers=found.numbers | {"diverged_runs": diverged},
            )
        if setup.scale in ("smoke", "cpu") and self.data_sets:
            instead = ", ".join(STAND_INS[name] for name in self.data_sets)
            found = replace(found, sentence=f"{found.sentence} Data: {instead}.")
        if setup.scale == "smoke":
            found = replace(found, holds=None, unjudged=TOO_SMALL)
        return found


def scores(run: "Run") -> dict[str, Any]:
    """Held-out nats and accuracy of teacher and RNN, the RNN also before DMT."""
    result = run.evaluate(run.config.log.evaluate_sequences)
    found = {"rnn_nats": result.rnn.nats, "rnn_accuracy": result.rnn.accuracy}
    if result.teacher is not None:
        found |= {"teacher_nats": result.teacher.nats, "teacher_accuracy": result.teacher.accuracy}
    for record in run.metrics.read():
        if record["stage"] == "smt" and "evaluation" in record:
            found["smt_nats"] = record["evaluation"]["rnn"]["nats"]
            found["smt_accuracy"] = record["evaluation"]["rnn"]["accuracy"]
    return found


# -------------------------------------------------------------------------- looking at results


def where(results: Iterable[Result], **tags: Tag) -> list[Result]:
    """The results with these tags."""
    return [
        result
        for result in results
        if all(result.tags.get(name) == value for name, value in tags.items())
    ]


def distinct(results: Iterable[Result], tag: str) -> list[Any]:
    """The values of a tag, in the order in which they come."""
    return list(dict.fromkeys(result.tags[tag] for result in results if tag in result.tags))


def mean(results: Iterable[Result], value: str) -> float:
    """Of a measured value; nan if there is none."""
    return average(result.measured.get(value, math.nan) for result in results)


def spread(results: Iterable[Result], value: str) -> float:
    """Standard deviation of a measured value over results; 0 for one."""
    found = [result.measured[value] for result in results if value in result.measured]
    return stdev(found) if len(found) > 1 else 0.0


def best(results: Iterable[Result], value: str) -> Result:
    """The result with the lowest measured value."""

    def rank(result: Result) -> float:
        found = result.measured.get(value, math.inf)
        return found if math.isfinite(found) else math.inf

    return min(results, key=rank)


def average(values: Iterable[float]) -> float:
    """The mean; nan of nothing."""
    values = list(values)
    return fmean(values) if values else math.nan


def cost_ratio(ours: Iterable[Result], theirs: Iterable[Result], what: str) -> float:
    """How many times as much `theirs` took of a cost."""
    below = average(result.cost[what] for result in ours)
    return average(result.cost[what] for result in theirs) / below if below else math.nan
