"""The progress of a run: its counters, saved in checkpoints, and metrics.jsonl."""

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from memtrain.config import RunConfig, StageConfig
from memtrain.errors import CheckpointError, MemtrainError
from memtrain.files import JsonLines, sync

MAX_METRICS_BYTES = 2**28
MAX_LINE_BYTES = 2**22


@dataclass
class StageProgress:
    """The counters of one stage."""

    name: str
    sequential_ops_a_step: int
    """Operations on the critical path of one step, at the current length of a curriculum."""
    steps: int = 0
    tokens: int = 0
    sequential_ops: int = 0
    seconds: float = 0.0
    """Training time, without evaluations and checkpoints."""
    start_up_seconds: float | None = None
    """Seconds of the first steps, which compile; known where a time limit needs it."""
    skipped: int = 0
    """Steps whose update was skipped because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    """How many of them came last, without a good step after them."""
    lowest: float | None = None
    """The lowest held-out loss of what the stage trains."""
    since_lowest: int = 0
    """Evaluations since then."""
    lengths_over: int = 0
    """Lengths of the stage's curriculum that are over."""
    ended_of: int = 0
    """The steps that the stage should have had when a callback ended it; 0 if none did."""
    other: dict[str, float] = field(default_factory=dict)
    """Numbers that another version of memtrain saved; kept as they are."""

    def to_json(self) -> dict[str, Any]:
        unset = set() if self.skipped else {"skipped", "skipped_in_a_row"}
        unset |= {"start_up_seconds"} if self.start_up_seconds is None else set()
        unset |= {"lowest", "since_lowest"} if self.lowest is None else set()
        unset |= set() if self.lengths_over else {"lengths_over"}
        unset |= set() if self.ended_of else {"ended_of"}
        return _to_json(self, unset)

    def note_loss(self, loss: float) -> bool:
        """Count an evaluation; returns whether it is one without a new lowest loss."""
        if math.isfinite(loss) and (self.lowest is None or loss < self.lowest):
            self.lowest, self.since_lowest = loss, 0
            return False
        self.since_lowest += 1
        return True

    def is_over(self, stage: StageConfig) -> bool:
        """Whether the stage's last step is done: by its number, the clock, patience or a callback.

        A stage that is over continues when its config allows more: a run is lengthened so.
        """
        return (
            self.steps >= stage.steps
            or bool(stage.seconds and self.seconds >= stage.seconds)
            or bool(stage.patience and self.since_lowest >= stage.patience)
            or self.ended_of == stage.steps
        )


@dataclass
class Best:
    """The step with the lowest held-out loss of the RNN."""

    global_step: int
    nats: float
    stage: str = ""
    step: int = 0


@dataclass
class Progress:
    """The counters of a run and its identity, saved under these names in state.json."""

    stage: int = 0
    """The index of the current stage; the number of stages when all are done."""
    step: int = 0
    """Steps done in the current stage."""
    global_step: int = 0
    """Steps done in all stages; the number of the checkpoint."""
    stages: list[StageProgress] = field(default_factory=list)
    """The stages that have begun, in order."""
    metrics_bytes: int = 0
    """The length of metrics.jsonl."""
    metrics_lost: int = 0
    """Bytes of metrics.jsonl that were deleted while the run trained."""
    data: str = ""
    """The identity of the training data; empty if it has none or in old checkpoints."""
    spelling: dict[str, Any] | Literal["unknown"] | None = "unknown"
    """The token codec, so that the RNN can generate without its data. None if the task has no
    codec; unknown in old checkpoints."""
    values: dict[str, Any] | None = None
    """What sequences of numbers consist of (`Values`), so that the RNN loads without its data;
    None for tokens."""
    series: dict[str, Any] | None = None
    """Names, scale and season of the numbers (`SeriesFormat`), if they are a series'."""
    made_of: Any = None
    """The record of the task and cell (see fingerprint.py), unchecked; None in old checkpoints."""
    run: str = ""
    """The run's identity; empty in old checkpoints."""
    best: Best | None = None
    other: dict[str, Any] = field(default_factory=dict)
    """Values that another version of memtrain saved; kept as they are."""

    def to_json(self) -> dict[str, Any]:
        unset = {name for name in ("metrics_lost", "best") if not getattr(self, name)}
        unset |= {"spelling"} if self.spelling == "unknown" else set()
        unset |= {name for name in ("values", "series", "made_of") if getattr(self, name) is None}
        plain = _to_json(self, unset)
        if self.best is not None:
            plain["best"] = vars(self.best).copy()
        return plain | {"stages": self.stages_json()}

    def stages_json(self) -> list[dict[str, Any]]:
        """The stages as JSON, for reports."""
        return [stage.to_json() for stage in self.stages]

    def totals(self) -> dict[str, int | float]:
        """Steps, tokens, sequential operations and training seconds of all stages so far."""
        return {
            f"total_{key}": sum(getattr(stage, key) for stage in self.stages)
            for key in ("steps", "tokens", "sequential_ops", "seconds")
        }

    def is_best(self, nats: float) -> bool:
        """Record the held-out loss after the last step if it is the lowest of all stages."""
        if not math.isfinite(nats) or (self.best is not None and not nats < self.best.nats):
            return False
        name = self.stages[self.stage].name
        self.best = Best(self.global_step, nats, name, self.step)
        return True

    def check_fits(self, config: RunConfig, folder: Path) -> None:
        """Raise CheckpointError if stages and steps are not those of the config."""
        steps = {name: stage.steps for name, stage in config.stages().items() if stage.steps}
        names, done = list(steps), [stage.name for stage in self.stages]
        if (
            self.stage > len(names)
            or done != names[: len(done)]
            or len(done) != self.stage + (self.step > 0)
            or (self.step and self.step > steps[names[self.stage]])
            or any(
                stage.lengths_over > len(config.stages()[stage.name].curriculum)
                for stage in self.stages
            )
        ):
            raise CheckpointError(f"{folder}: the checkpoint's progress does not fit the config")


def _to_json(record: StageProgress | Progress, unset: set[str]) -> dict[str, Any]:
    names = [one.name for one in fields(record) if one.name not in unset | {"other"}]
    return {**record.other, **{name: getattr(record, name) for name in names}}


# ----------------------------------------------------------------------------------------- read


def read_progress(plain: Any) -> Progress:
    """Read the progress in a state.json. Keys that are missing get defaults.

    Raises:
        CheckpointError: a value has the wrong type; the message names the field.
    """
    _require(isinstance(plain, dict), "progress", "must be an object")
    for name in ("stage", "step", "global_step", "metrics_bytes", "metrics_lost"):
        _require_count(plain.get(name, 0), f"progress.{name}")
    for name in ("data", "run"):
        _require(isinstance(plain.get(name, ""), str), f"progress.{name}", "must be a string")
    for name in ("spelling", "values", "series"):
        right = isinstance(plain.get(name), dict | None)
        _require(right, f"progress.{name}", "must be an object or null")
    stages, best = plain.get("stages", []), plain.get("best")
    _require(isinstance(stages, list), "progress.stages", "must be a list")
    if best is not None:
        right = isinstance(best, dict) and _is_number(best.get("nats"))
        _require(right, "progress.best", "must hold global_step and nats")
        _require_count(best.get("global_step"), "progress.best.global_step")
        best = Best(**{key: value for key, value in best.items() if key in vars(Best(0, 0.0))})
    known, other = _split(plain, Progress)
    known |= {"stages": [_read_stage(one) for one in stages], "best": best}
    return Progress(**known, other=other)


def _read_stage(plain: Any) -> StageProgress:
    where = "progress.stages"
    _require(isinstance(plain, dict), where, "must be a list of objects")
    for key in ("name", "tokens", "seconds", "sequential_ops_a_step"):
        _require(key in plain, f"{where}: {key}", "is missing")
    for key, value in plain.items():
        right = isinstance(value, str) if key == "name" else _is_number(value)
        _require(right, f"{where}: {key}={value!r}", "has the wrong type")
    for key in ("skipped", "skipped_in_a_row", "since_lowest", "lengths_over", "ended_of"):
        _require_count(plain.get(key, 0), f"{where}: {key}")
    known, other = _split(plain, StageProgress)
    return StageProgress(**known, other=other)


def _split(plain: dict[str, Any], kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values for a dataclass's fields, and the others."""
    names = {one.name for one in fields(kind)} - {"other"}
    known = {key: value for key, value in plain.items() if key in names}
    return known, {key: value for key, value in plain.items() if key not in names}


def _require(right: bool, name: str, rule: str) -> None:
    if not right:
        raise CheckpointError(f"state.json: {name}: {rule}")


def _require_count(value: Any, name: str) -> None:
    right = type(value) is int and 0 <= value < 2**48
    _require(right, f"{name}={value!r}", "must be a non-negative integer")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -------------------------------------------------------------------------------------- metrics


class MetricsFile(JsonLines):
    """A run's metrics.jsonl: appended to, and cut back to a checkpoint's length on resume."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MAX_METRICS_BYTES, MAX_LINE_BYTES)

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        try:
            super().append(record, durable=durable)
        except OSError as error:
            raise MemtrainError(f"{self.path}: {error.strerror}; fix that, then resume") from None

    def sync(self) -> None:
        """Force all lines to disk."""
        if self.path.exists():
            sync(self.path)

    def cut(self, length: int) -> str:
        """Remove the lines written after a checkpoint; they will be written again.

        Returns:
            A warning if lines from before the checkpoint are missing; else "".
        """
        gone = not os.path.lexists(self.path) or self.length() == 0
        end = self.truncate(length)
        if end == length:
            return ""
        if gone:
            return f"{self.path}: is gone, {length:,} bytes of lines with it"
        return f"{self.path}: {length - end:,} bytes of lines before the checkpoint are lost"

    def read(self) -> list[dict[str, Any]]:
        """Read all complete lines.

        Raises:
            MemtrainError: a line is not JSON, or has no stage or step; the file is too large.
        """
        records = super().read()
        for number, record in enumerate(records, 1):
            if not isinstance(record, dict) or not _has_place(record):
                raise MemtrainError(f"{self.path}: line {number} has no stage or no step")
        return records


def _has_place(record: dict[str, Any]) -> bool:
    """Whether a record names its stage and steps."""
    counters = (record.get("step"), record.get("total_steps"))
    return isinstance(record.get("stage"), str) and all(type(one) is int for one in counters)
