"""What of its config a run may change when it continues, and what it keeps.

| | when it may change |
| --- | --- |
| a stage that has not begun | every field |
| the stage that is trained, or was trained last | `STAGE_FIELDS`; `steps` above the steps done |
| an earlier stage | nothing |
| how often it logs, evaluates and saves | `LOG_FIELDS` |
| threads and compilation | `ENGINE_FIELDS` |
| all else: data, models, seed, optimizer, schedule, batch | nothing: it would be another run |
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from memtrain.config import RunConfig, StageConfig
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.runs.progress import Progress, StageProgress

STAGE_FIELDS = (
    *("steps", "seconds", "patience"),  # when it ends
    "learning_rate",  # after a divergence
    *("accumulate", "on_nonfinite", "skip_limit"),  # how a step is taken
)
LOG_FIELDS = ("every", "evaluate_every", "checkpoint_every", "keep")
ENGINE_FIELDS = ("threads", "compile")
KEEPS = "and a run keeps its config; leave that out, or train a new run in another folder"


def differences(one: Any, other: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(field, value, other value) wherever two configs of the same type differ."""
    found: list[tuple[str, Any, Any]] = []
    for own in fields(one):
        left, right = getattr(one, own.name), getattr(other, own.name)
        if is_dataclass(left) and type(left) is type(right):
            found += differences(left, right, f"{prefix}{own.name}.")
        elif left != right:
            found.append((f"{prefix}{own.name}", left, right))
    return found


def apply_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """A config with some fields changed, each named as in "smt.steps".

    Raises:
        MemtrainError: there is no such field, or its value is refused.
    """
    for name, value in changes.items():
        section, _, leaf = name.rpartition(".")
        owner = getattr(config, section, None) if section else config
        known = [one.name for one in fields(owner)] if is_dataclass(owner) else []
        if leaf not in known or is_dataclass(getattr(owner, leaf)):
            names = [f"{one}.steps" for one in config.stages()]
            known = [f"{section}.{one}" if section else one for one in known] or names
            guess = did_you_mean(name, known).partition(" (")[0]
            raise MemtrainError(f"{name}={value!r}: a run has no such field; {guess}")
        assert is_dataclass(owner)
        changed = replace(owner, **{leaf: value})  # type: ignore[type-var]
        config = replace(config, **{section: changed}) if section else changed  # type: ignore
    return config


def check_changes(old: RunConfig, new: RunConfig, progress: Progress, folder: Path) -> list[str]:
    """Refuse what a run cannot change after it has begun.

    Args:
        old: the run's config.
        new: the config to continue with.
        progress: of its newest checkpoint.
        folder: the run's.

    Returns:
        A message for each field that changes.

    Raises:
        MemtrainError: it names the field, and what may change.
    """
    messages = []
    begun = {stage.name: stage for stage in progress.stages}
    last = progress.stages[-1].name if progress.stages else ""
    for name, value, kept in differences(new, old):
        section, _, leaf = name.rpartition(".")
        known = {"log": LOG_FIELDS, "engine": ENGINE_FIELDS}.get(section, ())
        if section in old.stages():
            _check_stage(section, leaf, new, begun.get(section), last, folder)
        elif leaf not in known:
            raise MemtrainError(f"{name}={value}: the run has {name}={kept}, {KEEPS}")
        messages.append(f"{folder}: {name} is now {value}, was {kept}")
    if messages and (old.has_teacher, *_order(old, begun)) != (
        new.has_teacher,
        *_order(new, begun),
    ):
        raise MemtrainError(
            f"{folder}: its stages so far are {', '.join(begun) or 'none'}, and a stage that comes "
            "before them cannot be added; train a new run in another folder"
        )
    return messages


def _order(config: RunConfig, begun: Mapping[str, StageProgress]) -> list[str]:
    """The first stages of a config, as many as have begun."""
    return [name for name, stage in config.stages().items() if stage.steps][: len(begun)]


def _check_stage(
    name: str, leaf: str, new: RunConfig, done: StageProgress | None, last: str, folder: Path
) -> None:
    """Refuse a change of a stage that is over, or that would change how it was trained."""
    if done is None:
        return
    stage: StageConfig = new.stages()[name]
    shown = f"{name}.{leaf}={getattr(stage, leaf)}"
    if name != last:
        raise MemtrainError(
            f"{shown}: {folder} has trained {name} and then {last}; only {last} can be changed, "
            f"for example {last}.steps, or train a new run in another folder"
        )
    if leaf not in STAGE_FIELDS:
        raise MemtrainError(
            f"{shown}: {folder} has trained {done.steps} steps of {name} without it, {KEEPS}; "
            f"{', '.join(STAGE_FIELDS)} may change"
        )
    if leaf == "steps" and stage.steps <= done.steps:
        raise MemtrainError(
            f"{shown}: {folder} has trained {done.steps} steps of {name} already; must be more"
        )
    if done.is_over(stage):
        raise MemtrainError(f"{shown}: {name} is over, {_how_to_continue(done, stage)}")


def _how_to_continue(done: StageProgress, stage: StageConfig) -> str:
    """Why a stage is over, and which field makes it continue."""
    name = done.name
    if done.steps >= stage.steps:
        return f"its {done.steps} steps are done; lengthen it with {name}.steps"
    if stage.seconds and done.seconds >= stage.seconds:
        return (
            f"its {stage.seconds:g} seconds were used up; lengthen it with {name}.seconds, "
            "or 0 for no limit"
        )
    if stage.patience and done.since_lowest >= stage.patience:
        return (
            f"its held-out loss had not fallen in {done.since_lowest} evaluations; raise "
            f"{name}.patience, or set it to 0"
        )
    return f"a callback ended it after {done.steps} steps; lengthen it with {name}.steps"
