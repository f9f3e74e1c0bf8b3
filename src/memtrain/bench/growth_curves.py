"""Growth as a record: what was measured, what was not, and with which power costs grow."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression

import cattrs

from memtrain.accel.engine import pick_device
from memtrain.bench.growth import KINDS, MIDDLE, VALUES, Timed
from memtrain.bench.report import machine
from memtrain.config import EngineConfig
from memtrain.errors import MemtrainError
from memtrain.files import parse_json, read_text

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
