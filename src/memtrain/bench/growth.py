"""How the cost of a step grows: with length, memory tokens, width and batch, one at a time."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import linear_regression

import cattrs
import torch

from memtrain.accel.engine import pick_device
from memtrain.bench.cases import Case, bptt_case, dmt_case, models, smt_case
from memtrain.bench.measure import Timing, machine, time_case
from memtrain.config import EngineConfig
from memtrain.errors import MemtrainError
from memtrain.files import parse_json, read_text
from memtrain.training.processes import stop_signals

MIDDLE = {
    "paper": {"length": 64, "batch": 32, "memory tokens": 16, "width": 256},
    "tiny": {"length": 8, "batch": 4, "memory tokens": 4, "width": 32},
}
"""Where each stays while another grows. The length is the shortest: before BPTT can be timed it
is unrolled and captured, which takes a minute where there are 512 steps."""
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
"""Of steps; those that start quickly first."""
LABEL_STRIDE = 16
NO_MEMORY, STOPPED, FAILED = "not enough memory", "stopped", "failed"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a curve: a step of one kind while one thing grows."""

    axis: str
    value: int
    length: int
    case: Case


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What was timed, what was not and why, and the signal that ended it, if one did."""

    points: Sequence[tuple[Point, Timing]]
    left_out: Sequence[tuple[Point, str]]
    signal_number: int = 0

    @property
    def failed(self) -> bool:
        """Whether a step could not be timed for want of something else than time and memory."""
        return any(why.startswith(FAILED) for _, why in self.left_out)


def points(size: str) -> list[Point]:
    """Steps of all kinds on each axis, in the order in which they are timed.

    The length is that of a rollout and of BPTT's sequences. SMT sees a window of the sequence
    whatever its length: that it has no such knob is the point. Two lengths come first, the long
    ones last: whoever stops early has some of every curve.
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
    config = replace(
        base,
        cell=replace(
            base.cell, memory_tokens=setting["memory tokens"], width=width, memory_dim=width
        ),
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
    """Time each case once, however many curves meet in it.

    Args:
        points: in the order in which they are timed.
        engine: the path that is timed.
        seconds: how long a case is timed.
        say: told what is timed, and how long all will take.
        minutes: after that many no case is begun.
    """
    todo: list[Point] = []
    for point in points:
        if all(point.case != other.case for other in todo):
            todo.append(point)
    found: list[Timing | str] = []
    spent: list[tuple[Point, float]] = []
    ends = time.monotonic() + 60 * minutes
    with stop_signals() as stop:
        stop.taken = True  # it is told in what is returned
        for point in todo:
            if stop.signal_number or time.monotonic() >= ends:
                late = f"not begun within {minutes:g} minutes"
                found.append(STOPPED if stop.signal_number else late)
                continue
            begun = len(found)
            title = f"{point.case.label}, {point.axis} {point.value}"
            say(f"{begun + 1}/{len(todo)}  {title}{_left(todo[begun:], spent)}")
            began = time.monotonic()
            try:
                found.append(time_case(point.case, engine, seconds))
            except KeyboardInterrupt:
                found.append(STOPPED)
            except Exception as error:  # one kernel that fails does not lose the rest
                # A capture that was cut short fails in its own way.
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
    """The time left, once a step of each kind that is to come has been timed.

    A kind takes as long again for each unit of length: unrolling it is most of the work.
    """
    rates = {
        label: sum(took for _, took in same) / sum(point.length for point, _ in same)
        for label in {point.case.label for point, _ in spent}
        for same in [[(p, took) for p, took in spent if p.case.label == label]]
    }
    if any(point.case.label not in rates for point in todo):
        return ""
    left = round(sum(rates[point.case.label] * point.length for point in todo))
    return f"  left {left // 60}:{left % 60:02d}"


MAX_BYTES = 2**20
MEASURES = ("seconds", "peak_bytes")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step of one kind at one value of what grows."""

    step: str
    axis: str
    value: int
    seconds: float
    start_up: float
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A point without a figure, and why."""

    step: str
    axis: str
    value: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Everything measured, as it is written to JSON."""

    machine: str
    size: str
    window: int
    """Tokens of SMT's windows, which do not grow with the length."""
    held: dict[str, dict[str, int]]
    """For each axis, where the others stay."""
    points: list[Measured]
    left_out: list[LeftOut]

    @property
    def measures(self) -> list[str]:
        """What is known of every point: a CPU tells no peak of memory."""
        return [m for m in MEASURES if all(getattr(p, m) is not None for p in self.points)]

    @property
    def steps(self) -> list[str]:
        return [step for step in KINDS if any(point.step == step for point in self.points)]

    @property
    def axes(self) -> list[str]:
        return list(dict.fromkeys(point.axis for point in self.points))

    def line(self, step: str, axis: str, measure: str) -> list[tuple[int, float]]:
        """One curve, in order."""
        same = (p for p in self.points if (p.step, p.axis) == (step, axis))
        return sorted((point.value, float(getattr(point, measure))) for point in same)

    def powers(self) -> dict[str, dict[str, float]]:
        """The powers of the length with which steps grow: slopes between logarithms."""
        found = {}
        for measure in self.measures:
            lines = {step: self.line(step, "length", measure) for step in self.steps}
            found[measure] = {step: power(line) for step, line in lines.items() if len(line) > 1}
        return found


def power(line: Sequence[tuple[int, float]]) -> float:
    """The exponent p of the best fitting y = c x^p."""
    return linear_regression(
        *zip(*((math.log(x), math.log(y)) for x, y in line), strict=True)
    ).slope


def as_curves(timed: Timed, engine: EngineConfig, size: str) -> Curves:
    """What was timed, with all it takes to draw it again."""
    smt, teacher = timed.points[0][0].case.config.smt, timed.points[0][0].case.config.teacher
    return Curves(
        machine=machine(pick_device(engine.device)),
        size=size,
        window=teacher.context_length + smt.future_length,
        held={
            axis: {name: at for name, at in MIDDLE[size].items() if name != axis}
            for axis in VALUES[size]
        },
        points=[
            Measured(step=point.case.label, axis=point.axis, value=point.value, **asdict(timing))
            for point, timing in timed.points
        ],
        left_out=[
            LeftOut(step=point.case.label, axis=point.axis, value=point.value, why=why)
            for point, why in timed.left_out
        ],
    )


def to_json(curves: Curves) -> str:
    """One line, powers of the length included."""
    return json.dumps(asdict(curves) | {"powers_of_length": curves.powers()})


def read_curves(path: Path) -> Curves:
    """Read what `to_json` wrote."""
    try:
        plain = parse_json(read_text(path, MAX_BYTES), path.name)
    except MemtrainError:
        plain = None
    try:
        curves = cattrs.structure(plain, Curves)
        steps = {point.step for point in curves.points}
        positive = all(
            0 < number < math.inf
            for point in curves.points
            for number in (point.value, point.seconds, point.peak_bytes or 1)
        )
    except Exception:  # cattrs lets pass whatever a wrong type raises
        curves, steps, positive = None, set(), False
    if curves is None or not steps or not steps <= set(KINDS) or not positive:
        raise MemtrainError(f"{path}: not written by memtrain bench growth")
    return curves
