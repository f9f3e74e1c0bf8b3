"""The plan of a race: who takes part, how long each trains, and with which settings.

Every network gets the same seconds of training and the same care: three learning rates, each for a
tenth of its seconds; then the best of them, from the beginning, for the other seven tenths. The
rates are the recipe's, three times that, and the next one beyond the better of the two. Everything
else is the recipe's own.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memtrain.config import EngineConfig, LogConfig, RunConfig, Stream
from memtrain.config.serialize import structure
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import read_json, write_atomic
from memtrain.models.build import build_rnn
from memtrain.models.teacher import count_parameters
from memtrain.recipes import recipe
from memtrain.recipes.sizes import RECURRENT_CELLS
from memtrain.runs.checkpoint import DISK

FACTORS = (1 / 3, 1.0, 3.0, 9.0)
"""Multiples of the recipe's learning rates: 1 and 3 are tried, then 1/3 or 9."""
TRIALS, TRIAL = 3, 0.1
"""Rates that are tried, and the part of a network's seconds for each of them."""
CURVE = 16
"""Held-out sequences of the evaluations during training."""
EVALUATIONS = 8
"""About as many evaluations during the last training."""
HEADROOM = 10
"""A stage has this many times the steps that its seconds should allow, so that they end it."""
ALIKE = 0.1
"""Parameters of all networks are equal up to this fraction."""
FILE, VERSION = "race.json", 3
FIGURES = ("race.png", "race.svg")
MAX_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Contender:
    """A network that takes part."""

    title: str
    method: str
    """Of the recipe: smt-dmt, smt, bptt or pieces."""
    cell: str


CONTENDERS = {
    "smt-dmt": Contender("SMT -> DMT", "smt-dmt", "transformer"),
    "smt": Contender("SMT in segments, GRU", "smt", "gru"),
    "bptt": Contender("BPTT, Transformer cell", "bptt", "transformer"),
    "gru": Contender("BPTT, GRU", "bptt", "gru"),
    "lstm": Contender("BPTT, LSTM", "bptt", "lstm"),
    "pieces": Contender("BPTT in pieces, GRU", "pieces", "gru"),
    "attention": Contender("plain Transformer", "bptt", "attention"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RacePlan:
    """What decides the result; a race is only continued with the same plan."""

    store: str
    """The folder of the prepared data."""
    kind: str
    """The recipe: text, images or tokens."""
    identity: str
    """Of the tokens."""
    length: int
    """Tokens per held-out sequence."""
    minutes: float
    size: str
    seed: int
    device: str
    threads: int
    methods: list[str]
    validation: int
    """Held-out sequences that choose learning rates and PPMd's order."""
    groups: int
    """Groups of other held-out sequences for the result; their spread is its error."""
    group: int
    """Sequences per group."""

    @property
    def seconds(self) -> float:
        """Training seconds of each network, its trials included."""
        return 60 * self.minutes / len(self.methods)

    @property
    def trial(self) -> float:
        return TRIAL * self.seconds

    @property
    def last(self) -> float:
        """Seconds of the last training."""
        return self.seconds - TRIALS * self.trial

    def recipe(self, name: str) -> RunConfig:
        """The recipe of a contender on this data, with about as many parameters as the others."""
        one = CONTENDERS[name]
        config = recipe(self.kind, self.size, one.method, one.cell)
        assert isinstance(config.data, Stream)
        return replace(
            config,
            name=name,
            seed=self.seed,
            data=replace(config.data, path=self.store, evaluate_length=self.length),
            # Compilation would take a part of the minutes.
            engine=EngineConfig(device=self.device, threads=self.threads),
        )

    def config(
        self,
        name: str,
        factor: float,
        pace: dict[str, float],
        starts: dict[str, float],
        *,
        last: bool,
    ) -> RunConfig:
        """A run of a contender.

        Args:
            name: the contender.
            factor: multiplies the recipe's learning rates.
            pace: seconds per step of each stage, measured here.
            starts: seconds that the first steps of each stage take longer than later ones, which
                come on top.
            last: the last training; else a trial.
        """
        base = self.recipe(name)
        own = {key: stage for key, stage in base.stages().items() if stage.steps}
        costs = {key: stage.steps * pace[key] for key, stage in own.items()}
        seconds = self.last if last else self.trial
        share = {key: seconds * cost / sum(costs.values()) for key, cost in costs.items()}
        stages = {
            key: replace(
                stage,
                steps=math.ceil(HEADROOM * share[key] / pace[key]),
                seconds=share[key] + starts[key],
                learning_rate=factor * stage.learning_rate,
            )
            for key, stage in own.items()
        }
        step = min(pace.values())
        evaluations = max(1, math.ceil(seconds / (EVALUATIONS * step)))
        log = LogConfig(
            every=max(1, round(0.5 / step)),
            evaluate_every=evaluations if last else 0,
            evaluate_sequences=min(CURVE, self.validation),
            checkpoint_every=max(1, round(10 / step)),
        )
        return replace(base, log=log, **stages)


def check_methods(names: Sequence[str]) -> list[str]:
    """The names of contenders in their order, checked."""
    for name in names:
        if name not in CONTENDERS:
            raise MemtrainError(f"methods={name!r}: {did_you_mean(name, CONTENDERS)}")
        if list(names).count(name) > 1:
            raise MemtrainError(f"methods={name!r}: given twice; leave one out")
    if len(names) == 1:
        raise MemtrainError(
            f"methods={names[0]!r}: a race needs at least two; memtrain train trains one"
        )
    return [name for name in CONTENDERS if name in names or not names]


def fit_parameters(config: RunConfig, target: int, vocab_size: int) -> RunConfig:
    """Change the width of a GRU or LSTM until the network has about `target` parameters.

    Raises:
        MemtrainError: it is not within a tenth.
    """

    def error(one: RunConfig) -> float:
        return abs(count_parameters(build_rnn(one, vocab_size)) / target - 1)

    if error(config) > ALIKE / 2 and config.cell.kind in RECURRENT_CELLS:
        width = config.cell.memory_dim
        near = range(max(4, width // 2 // 4 * 4), 2 * width + 1, max(4, width // 16 // 4 * 4))
        tried = [replace(config, cell=replace(config.cell, memory_dim=one)) for one in near]
        config = min([config, *tried], key=error)
    if error(config) > ALIKE:
        raise MemtrainError(
            f"{config.name}: its parameters differ from the others' by {error(config):.0%}; leave "
            "it out (--methods), or take another --size"
        )
    return config


# ------------------------------------------------------------------------------------ race.json


@dataclass
class RaceFile:
    """race.json: the plan, and what was measured so far, written after every part."""

    folder: Path
    plan: RacePlan
    pace: dict[str, dict[str, float]] = field(default_factory=dict)
    """By contender and stage: seconds per step, without the start."""
    starts: dict[str, dict[str, float]] = field(default_factory=dict)
    """By contender and stage: seconds that the first steps take longer, on a GPU."""
    trials: dict[str, float | None] = field(default_factory=dict)
    """By NAME-FACTOR: the loss in nats on the validation sequences; None if it diverged."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By contender, and "ppmd" and "counts": what the table shows."""
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    """By contender: CPU seconds and seconds of its last training, evaluations included."""

    def write(self) -> None:
        plain = {"version": VERSION, **asdict(self)}
        del plain["folder"]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / FILE, (json.dumps(plain, indent=1) + "\n").encode())


def remove_race(folder: Path) -> None:
    """Remove the runs, figures and file of an earlier race, and nothing else."""
    if not (folder / FILE).exists():
        return
    for name in (*CONTENDERS, "trials"):
        DISK.remove(folder / name)
    for name in (*FIGURES, FILE):
        DISK.remove(folder / name)


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than a race."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FILE).exists():
        raise MemtrainError(
            f"{folder}: holds files that are not a race; choose an empty folder (--folder)"
        )


def open_race(folder: Path, plan: RacePlan) -> RaceFile:
    """The race in a folder, if it has the same plan, or a new one.

    Raises:
        MemtrainError: the folder holds another race, or something else.
    """
    check_folder(folder)
    path = folder / FILE
    if not path.exists():
        return RaceFile(folder, plan)
    plain = read_json(path, MAX_BYTES)
    if not isinstance(plain, dict) or plain.pop("version", None) != VERSION:
        raise MemtrainError(f"{path}: another memtrain wrote it; --overwrite starts a new race")
    race = structure({**plain, "folder": ""}, _Stored, str(path))
    for name, value in asdict(plan).items():
        if getattr(race.plan, name) != value:
            raise MemtrainError(
                f"{folder}: holds a race with {name}={getattr(race.plan, name)}, not {value}; "
                "continue it with its own options, or choose --folder or --overwrite"
            )
    return RaceFile(folder, plan, race.pace, race.starts, race.trials, race.results, race.shares)


@dataclass
class _Stored:
    """The fields of race.json; a path is not JSON."""

    folder: str
    plan: RacePlan
    pace: dict[str, dict[str, float]]
    starts: dict[str, dict[str, float]]
    trials: dict[str, Any]
    results: dict[str, Any]
    shares: dict[str, dict[str, float]]
