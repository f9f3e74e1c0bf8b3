"""The cost of a step against length, memory tokens, width and batch, one at a time."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import linear_regression

import torch

from memtrain.accel.engine import pick_device
from memtrain.bench.cases import Case, bptt_case, dmt_case, models, smt_case
from memtrain.bench.measure import Timing, machine, time_case
from memtrain.config import EngineConfig
from memtrain.config.serialize import structure
from memtrain.errors import MemtrainError
from memtrain.files import parse_json, read_text
from memtrain.runs.processes import stop_signals
from memtrain.training.console import format_time

MIDDLE = {
    "paper": {"length": 64, "batch": 32, "memory tokens": 16, "width": 256},
    "tiny": {"length": 8, "batch": 4, "memory tokens": 4, "width": 32},
}
"""Values of the other axes while one grows. The length is the shortest: BPTT is unrolled and
captured before it can be timed, which takes a minute for 512 steps."""
VALUES = {
    "paper": {
        "length": (64, 128, 256, 512),
        "memory tokens": (8, 16, 32),
        "width": (128, 256, 512),
        "batch": (8, 32, 128),
    },
    "tiny": {
        "length": (8, 16, 32, 64),
        "memory tokens": (2, 4, 8),
        "width": (16, 32, 64),
        "batch": (1, 4, 16),
    },
}
KINDS = ("SMT", "DMT", "BPTT", "recomputed BPTT")
"""Kinds of steps; those with a short start-up first."""
LABEL_STRIDE = 16
NO_MEMORY, STOPPED, FAILED = "not enough memory", "stopped", "failed"
MAX_BYTES = 2**20
MEASURES = ("seconds", "peak_bytes")


# ----------------------------------------------------------------------------------- time steps


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a curve: a step of one kind at one value of an axis."""

    axis: str
    value: int
    length: int
    case: Case


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The timings, the points without one and why, and the signal that ended it, if any."""

    points: Sequence[tuple[Point, Timing]]
    left_out: Sequence[tuple[Point, str]]
    signal_number: int = 0

    @property
    def failed(self) -> bool:
        """Whether a step failed for a reason other than time and memory."""
        return any(why.startswith(FAILED) for _, why in self.left_out)


def points(size: str) -> list[Point]:
    """Steps of all kinds on each axis, in the order in which they are timed.

    The length is that of DMT's rollouts and of BPTT's sequences; SMT's windows do not depend on it.
    Two lengths come first and the long ones last, so that every curve has points if it is stopped.
    """
    lengths, middle = VALUES[size]["length"], MIDDLE[size]
    others = [
        (axis, v) for axis, values in VALUES[size].items() for v in values if axis != "length"
    ]
    order = [("length", v) for v in lengths[:2]] + others + [("length", v) for v in lengths[2:]]
    return [
        Point(axis=axis, value=value, length=setting["length"], case=case)
        for axis, value in order
        for setting in [middle | {axis: value}]
        for case in _steps(size, setting)
    ]


def _steps(size: str, setting: dict[str, int]) -> list[Case]:
    """A step of each kind."""
    base, width = models(size), setting["width"]
    length, batch = setting["length"], setting["batch"]
    memory = {"memory_tokens": setting["memory tokens"], "memory_dim": width}
    config = replace(
        base,
        cell=replace(base.cell, width=width, **memory),
        teacher=replace(base.teacher, width=width),
        smt=replace(base.smt, batch_size=batch),
    )
    smt, dmt, bptt, recomputed = KINDS
    return [
        smt_case(config, smt),
        dmt_case(config, dmt, batch, length, LABEL_STRIDE),
        bptt_case(config, bptt, batch, length),
        bptt_case(config, recomputed, batch, length, round(length**0.5)),
    ]


def time_points(
    points: Sequence[Point],
    engine: EngineConfig,
    seconds: float,
    say: Callable[[str], None],
    minutes: float = math.inf,
) -> Timed:
    """Time each case once, even if several curves share it.

    Args:
        points: in the order in which they are timed.
        engine: the path to time.
        seconds: how long each case is timed.
        say: receives progress messages.
        minutes: no case starts after this time.
    """
    todo: list[Point] = []
    for point in points:
        if all(point.case != other.case for other in todo):
            todo.append(point)
    found: list[Timing | str] = []
    spent: list[tuple[Point, float]] = []
    ends = time.monotonic() + 60 * minutes
    with stop_signals() as stop:
        stop.taken = True  # `Timed.signal_number` reports it
        for point in todo:
            if stop.signal_number or time.monotonic() >= ends:
                late = f"not begun within {minutes:g} minutes"
                found.append(STOPPED if stop.signal_number else late)
                continue
            number = len(found)
            title = f"{point.case.label}, {point.axis} {point.value}"
            say(f"{number + 1}/{len(todo)}  {title}{_left(todo[number:], spent)}")
            began = time.monotonic()
            try:
                found.append(time_case(point.case, engine, seconds))
            except KeyboardInterrupt:
                found.append(STOPPED)
            except Exception as error:  # the other cases are still timed
                # An interrupted graph capture raises an error of its own.
                found.append(STOPPED if stop.signal_number else _reason(error))
                say(f"  left out: {found[-1]}")
            spent.append((point, time.monotonic() - began))
    cases = [point.case for point in todo]
    outcomes = [(point, found[cases.index(point.case)]) for point in points]
    return Timed(
        points=[(point, one) for point, one in outcomes if isinstance(one, Timing)],
        left_out=[(point, one) for point, one in outcomes if isinstance(one, str)],
        signal_number=stop.signal_number,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return NO_MEMORY
    line = next(iter(str(error).splitlines()), "")
    return f"{FAILED} ({type(error).__name__}: {line})"


def _left(todo: Sequence[Point], spent: Sequence[tuple[Point, float]]) -> str:
    """The time left, once a step of each remaining kind has been timed.

    Not an `ETA`: each kind has its own rate, proportional to the length, because unrolling
    dominates.
    """
    rates = {
        label: sum(took for _, took in same) / sum(point.length for point, _ in same)
        for label in {point.case.label for point, _ in spent}
        for same in [[(p, took) for p, took in spent if p.case.label == label]]
    }
    if any(point.case.label not in rates for point in todo):
        return ""
    left = sum(rates[point.case.label] * point.length for point in todo)
    return f"  left {format_time(float(round(left)))}"


# ------------------------------------------------------------------------------- curves as JSON


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The timing of a step of one kind at one value of an axis."""

    step: str
    axis: str
    value: int
    seconds: float
    start_up: float
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A point without a timing, and why."""

    step: str
    axis: str
    value: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Curves:
    """All measurements, as written to JSON."""

    machine: str
    size: str
    window: int
    """Tokens of SMT's windows, which do not grow with the length."""
    held: dict[str, dict[str, int]]
    """For each axis, the values of the others."""
    points: list[CurvePoint]
    left_out: list[LeftOut]

    @property
    def measures(self) -> list[str]:
        """The measures that every point has: a CPU has no peak of memory."""
        return [m for m in MEASURES if all(getattr(p, m) is not None for p in self.points)]

    @property
    def steps(self) -> list[str]:
        return [step for step in KINDS if any(point.step == step for point in self.points)]

    @property
    def axes(self) -> list[str]:
        return list(dict.fromkeys(point.axis for point in self.points))

    def line(self, step: str, axis: str, measure: str) -> list[tuple[int, float]]:
        """One curve, sorted by value."""
        same = (p for p in self.points if (p.step, p.axis) == (step, axis))
        return sorted((point.value, float(getattr(point, measure))) for point in same)

    def powers(self) -> dict[str, dict[str, float]]:
        """The power of the length with which each kind of step grows, by measure."""
        found = {}
        for measure in self.measures:
            lines = {step: self.line(step, "length", measure) for step in self.steps}
            found[measure] = {step: power(line) for step, line in lines.items() if len(line) > 1}
        return found


def power(line: Sequence[tuple[int, float]]) -> float:
    """The exponent p of the best fit y = c x^p."""
    return linear_regression(
        *zip(*((math.log(x), math.log(y)) for x, y in line), strict=True)
    ).slope


def as_curves(timed: Timed, engine: EngineConfig, size: str) -> Curves:
    """The timings, with everything needed to draw them."""
    config = timed.points[0][0].case.config
    return Curves(
        machine=machine(pick_device(engine.device)),
        size=size,
        window=config.teacher.context_length + config.smt.future_length,
        held={
            axis: {name: at for name, at in MIDDLE[size].items() if name != axis}
            for axis in VALUES[size]
        },
        points=[
            CurvePoint(step=point.case.label, axis=point.axis, value=point.value, **asdict(timing))
            for point, timing in timed.points
        ],
        left_out=[
            LeftOut(step=point.case.label, axis=point.axis, value=point.value, why=why)
            for point, why in timed.left_out
        ],
    )


def to_json(curves: Curves) -> str:
    """One line of JSON, with the powers of the length."""
    return json.dumps(asdict(curves) | {"powers_of_length": curves.powers()})


def read_curves(path: Path) -> Curves:
    """Read the JSON of `to_json`."""
    try:
        plain = parse_json(read_text(path, MAX_BYTES), path.name)
        if isinstance(plain, dict):
            plain.pop("powers_of_length", None)
        curves = structure(plain, Curves)
    except MemtrainError:
        curves = None
    if curves is None or not curves.points or not all(map(_is_valid, curves.points)):
        raise MemtrainError(f"{path}: not written by memtrain bench growth")
    return curves


def _is_valid(point: CurvePoint) -> bool:
    numbers = (point.value, point.seconds, point.peak_bytes or 1)
    return point.step in KINDS and all(0 < number < math.inf for number in numbers)
