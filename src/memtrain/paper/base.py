"""The base class of all figures, and the values that sweeps and figures exchange.

A figure of your own is a class like those in `figures/`; `memtrain reproduce my_file:MyFigure`.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from memtrain.config import RunConfig
from memtrain.config.serialize import ADDED_FIELDS
from memtrain.errors import MemtrainError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memtrain.training.run import Run

Scale = Literal["smoke", "cpu", "gpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "gpu", "paper")
TOY_DATA = {
    "mnist": "scikit-learn's 8x8 digits instead of MNIST",
    "tinystories": "stories generated from a grammar instead of TinyStories",
    "sketchy": "outlines of polygons instead of Sketchy",
}
"""The toy data sets of the scales smoke and cpu; `toy_data.py` generates them."""
TOO_SMALL = "too small to judge"
"""The verdict on every claim at the scale smoke."""
ROOT = "{folder}"
"""Placeholder in configs for the sweep's folder."""
Tag = str | int | float | bool
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Scale, folders and device of a sweep: everything a grid may depend on."""

    scale: Scale = "smoke"
    """smoke: seconds, shows that it runs; cpu: minutes; gpu: minutes on a large GPU; paper."""
    folder: Path
    """Holds results, runs and figures."""
    data_dir: Path = Path("data")
    """Holds the data sets prepared by `memtrain data`, for the scales gpu and paper."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    root: str = ROOT
    """Stands for the folder in configs, so that a run's key does not depend on where the folder is.
    Older folders have the path at which they were created."""
    prepares: bool = True
    """Whether a grid generates its toy data and checks that data sets exist; off for reports."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise MemtrainError(f"scale={self.scale!r}: {did_you_mean(self.scale, SCALES)}")

    def pick(self, *, smoke: Value, cpu: Value, gpu: Value, paper: Value) -> Value:
        """The value for this scale."""
        return {"smoke": smoke, "cpu": cpu, "gpu": gpu, "paper": paper}[self.scale]

    @property
    def seeds(self) -> range:
        return range(self.pick(smoke=1, cpu=2, gpu=3, paper=3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a grid, and its position there."""

    config: RunConfig
    tags: Mapping[str, Tag] = field(default_factory=dict)
    """Position in the grid: the method, the swept values, the seed."""
    train: bool = True
    """Off: the models are measured as initialised."""
    start: RunConfig | None = None
    """A run that trains the first stages of this one, once for all jobs that start from it. The
    result, its costs and curve are those of the whole run."""
    rank: int = 0
    """Runs of a lower rank begin first. Not part of the key."""

    def __post_init__(self) -> None:
        if self.start is not None and not _begins(self.start, self.config):
            raise MemtrainError(
                f"start={self.start.name}: must be the config of the job without its last stages"
            )

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.tags.items()) or self.config.name

    @property
    def key(self) -> str:
        """A hash of the config: jobs with the same key share one run, also between figures.

        A field at the value that runs had before there was such a field is left out, whatever its
        default is now, so that older folders keep their results.
        """
        parts = [_plain(self.config), self.train]
        if self.start is not None:
            parts.append(_plain(self.start))
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _plain(config: RunConfig) -> dict[str, Any]:
    """A config as JSON, without added fields at the values from before them."""
    plain = asdict(config)
    for name, before in ADDED_FIELDS.items():
        *section, field_name = name.split(".")
        at = plain.get(section[0], {}) if section else plain
        if field_name in at and at[field_name] == before:
            del at[field_name]
    return plain


def _begins(start: RunConfig, config: RunConfig) -> bool:
    """Whether `start` is `config` without its last stages."""
    stages = start.stages()
    whole = [name for name, stage in config.stages().items() if stage.steps]
    first = [name for name, stage in stages.items() if stage.steps]
    later = {name: stage for name, stage in stages.items() if name not in first}
    return first == whole[: len(first)] != whole and start == replace(config, **later)


def jobs_over(
    config: Callable[..., RunConfig], *, train: bool = True, **tags: Iterable[Tag]
) -> list[Job]:
    """A job for each combination of tags, the last varying fastest; `config` makes its run."""
    settings = [dict(zip(tags, values, strict=True)) for values in product(*tags.values())]
    return [Job(config=config(**setting), tags=setting, train=train) for setting in settings]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a finished job: one line of results.jsonl."""

    figure: str
    version: int
    """Version of the figure's `measure`; results of other versions are ignored."""
    job: str
    key: str
    tags: dict[str, Tag]
    measured: dict[str, Any]
    cost: dict[str, int | float]
    """Steps, tokens, sequential operations and training seconds of the whole run."""
    curve: list[dict[str, Any]]
    """The evaluations during the run: costs so far, losses and accuracies."""
    diverged: str = ""
    """Why training stopped early on a non-finite number; measured at the last checkpoint."""

    def __getitem__(self, name: str) -> Any:
        """A tag, or a measured value."""
        return self.tags[name] if name in self.tags else self.measured[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the paper's claim holds here."""

    holds: bool | None
    """None: not judged."""
    sentence: str
    """The findings, with numbers."""
    numbers: dict[str, Any]
    """The same as JSON values."""
    unjudged: str = "not judged at this scale"
    """Why it was not judged, if it was not."""

    @property
    def word(self) -> str:
        return {True: "holds", False: "does not hold", None: self.unjudged}[self.holds]


class Experiment(ABC):
    """One table or figure: its runs, measurements, verdict and plot."""

    name: str
    claim: str
    """The paper's claim, in one sentence."""
    version: int = 1
    """Increase it when the meaning of `measure` changes."""
    data_sets: tuple[str, ...] = ()
    """Those of mnist, tinystories and sketchy that it trains on."""
    incremental: bool = False
    """Whether it is drawn and judged from the results so far, and its follow-ups too begin as soon
    as those results that they depend on are there."""

    @property
    def title(self) -> str:
        from memtrain.paper import FIGURES, MORE

        return {**FIGURES, **MORE}.get(self.name, self.name)

    @property
    def follows_up(self) -> bool:
        """Whether more runs depend on the grid's results."""
        return type(self).follow_up is not Experiment.follow_up

    @abstractmethod
    def grid(self, setup: Setup) -> list[Job]:
        """The runs."""

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        """More runs that depend on the grid's results, for example at the best learning rate.

        Called when the grid is complete; if `incremental`, after every run with the results so far,
        and a job that it once returned must be among those that it returns with more results.
        """
        return []

    def measure(self, run: "Run") -> dict[str, Any]:
        """Measure one finished run; the values must be JSON."""
        return scores(run)

    @abstractmethod
    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        """Compare the claim with the results."""

    @abstractmethod
    def plot(self, setup: Setup, results: Sequence[Result]) -> "Figure":
        """Draw the results."""

    def verdict(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        """`judge`, with diverged runs and toy data mentioned; the scale smoke is never judged."""
        found = self.judge(setup, results)
        diverged = sum(bool(result.diverged) for result in results)
        if diverged:
            found = replace(
                found,
                sentence=f"{found.sentence} {diverged} of {len(results)} runs diverged.",
                numbers=found.numbers | {"diverged_runs": diverged},
            )
        if setup.scale in ("smoke", "cpu") and self.data_sets:
            data = ", ".join(TOY_DATA[name] for name in self.data_sets)
            found = replace(found, sentence=f"{found.sentence} Data: {data}.")
        if setup.scale == "smoke":
            found = replace(found, holds=None, unjudged=TOO_SMALL)
        return found


# ------------------------------------------------------------------------------ measurements


def scores(run: "Run") -> dict[str, Any]:
    """Held-out nats and accuracy of teacher and RNN, and of the RNN before DMT."""
    found = flat_scores(asdict(run.evaluate(run.config.log.evaluate_sequences)))
    for record in run.metrics.read():
        if record["stage"] == "smt" and "evaluation" in record:
            found["smt_nats"] = record["evaluation"]["rnn"]["nats"]
            found["smt_accuracy"] = record["evaluation"]["rnn"]["accuracy"]
    return found


def flat_scores(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The nats, the accuracies and the spread of the memories of an evaluation, as JSON."""
    spread = evaluation.get("spread") or {}  # missing in older runs
    return {f"memory_{name}": value for name, value in spread.items()} | {
        f"{model}_{what}": evaluation[model][what]
        for model in ("rnn", "teacher")
        if evaluation[model] is not None
        for what in ("nats", "accuracy")
    }


def memory_uniformity(run: "Run") -> float:
    """L_unif of the teacher's memories on held-out sequences, or the RNN's without a teacher."""
    import torch

    from memtrain.evaluation.evaluate import EVALUATION_SEED, encode_in_chunks
    from memtrain.losses import uniformity_loss

    count = min(32, run.config.log.evaluate_sequences)
    batch = run.task.held_out(count, torch.Generator().manual_seed(EVALUATION_SEED))
    inputs = batch.inputs.to(run.engine.device)[:, :256]
    with torch.no_grad(), run.engine.eval_mode():
        if run.teacher is not None:
            memory = encode_in_chunks(run.teacher, inputs)
        else:
            memory = run.rnn.unroll(inputs)
    return float(uniformity_loss(memory, 2048, torch.Generator().manual_seed(0)))
