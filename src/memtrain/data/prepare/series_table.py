"""The columns of a file of numbers over time: their roles, and how text becomes numbers."""

import math
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
from jaxtyping import Float64, Int64

from memtrain.errors import MemtrainError, did_you_mean

MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})
"""Fields without a number, in any case."""
MAX_COLUMNS = 2**12
_MONTH = re.compile(r"\d{4}-\d\d")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a file by role; without targets, all that have no other role."""

    targets: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    time: str = ""
    series: str = ""

    def of(self, names: Sequence[str], where: str) -> "Columns":
        """The same with all targets, for a file with these columns.

        Raises:
            MemtrainError: a column does not exist, or none is left to predict.
        """
        roles = {"targets": self.targets, "known": self.known}
        roles |= {"time": (self.time,), "series": (self.series,)}
        for role, name in ((role, name) for role, some in roles.items() for name in some):
            if name and name not in names:
                raise MemtrainError(
                    f"data.{role}={name!r}: {where} has no such column; {did_you_mean(name, names)}"
                )
        others = {*self.known, self.time, self.series}
        targets = self.targets or tuple(name for name in names if name not in others)
        if not targets:
            raise MemtrainError(f"{where}: has no column to predict; all have another role")
        if len(targets) + len(self.known) > MAX_COLUMNS:
            raise MemtrainError(
                f"{where}: has {len(targets):,} columns to predict, at most {MAX_COLUMNS:,} are "
                "read; name some: --data.targets a,b"
            )
        return Columns(targets, self.known, self.time, self.series)

    @property
    def numbers(self) -> tuple[str, ...]:
        return self.targets + self.known


@dataclass(slots=True)
class Table:
    """The rows of a file, in its order."""

    columns: Columns
    numbers: Float64[np.ndarray, "R N"]
    """Targets, then what is known beforehand; NaN where a number is missing."""
    times: Float64[np.ndarray, " R"] | None = None
    """Numbers as they are, dates in seconds."""
    series: Int64[np.ndarray, " R"] | None = None
    """The number of each row's series."""
    names: tuple[str, ...] = ()
    """Of the series."""
    lines: Int64[np.ndarray, " R"] | None = None
    """The line of each row, if the file is a text."""
    starts: Int64[np.ndarray, " S"] = field(default_factory=lambda: np.zeros(1, np.int64))
    """The first row of each series, once they are `grouped`."""

    def place(self, row: int) -> str:
        """A row in words, for errors."""
        return f"row {row + 1:,}" if self.lines is None else f"line {self.lines[row]:,}"

    def name(self, series: int) -> str:
        """A series in words, for errors; "" if there is only one."""
        return f"series {self.names[series]!r}" if len(self.names) > 1 else ""

    def grouped(self, where: str) -> "Table":
        """The rows of one series after another, each in the file's order.

        Raises:
            MemtrainError: the times of a series do not rise.
        """
        rows, starts = np.arange(len(self.numbers)), np.zeros(1, np.int64)
        if self.series is not None:
            rows = np.argsort(self.series, kind="stable")
            starts = np.searchsorted(self.series[rows], np.arange(len(self.names)))
        if self.times is not None:
            falls = np.diff(self.times[rows]) <= 0
            falls[starts[1:] - 1] = False
            if falls.any():
                self._refuse_times(int(np.argmax(falls)), rows, where)
        times, lines, series = (
            one if one is None else one[rows] for one in (self.times, self.lines, self.series)
        )
        return replace(
            self, numbers=self.numbers[rows], times=times, lines=lines, series=series, starts=starts
        )

    def _refuse_times(self, fall: int, rows: Int64[np.ndarray, " R"], where: str) -> None:
        assert self.times is not None
        before, row = int(rows[fall]), int(rows[fall + 1])
        what = "the same time as" if self.times[row] == self.times[before] else "a time before"
        apart = "" if self.columns.series else ", or name the column that tells series apart: "
        raise MemtrainError(
            f"{where}: {self.place(row)}: column {self.columns.time!r} has {what} "
            f"{self.place(before)}; sort the rows by time, keep one of each{apart}"
            + "--data.series NAME"
            * bool(apart)
        )


@dataclass(slots=True)
class TableBuilder:
    """Collects columns of text or numbers in chunks of rows."""

    where: str
    columns: Columns
    place: Callable[[int], str]
    """A row of the current chunk in words."""
    numbers: list[array] = field(default_factory=list)
    times: array = field(default_factory=lambda: array("d"))
    series: array = field(default_factory=lambda: array("q"))
    names: dict[str, int] = field(default_factory=dict)
    dated: bool | None = None
    """Whether times are dates; unknown before the first."""

    def __post_init__(self) -> None:
        self.numbers = [array("d") for _ in self.columns.numbers]

    def add_numbers(self, index: int, texts: Sequence[str]) -> None:
        """Add a chunk of the column with this index."""
        try:
            self.numbers[index].extend(array("d", map(float, texts)))
        except ValueError:
            name = self.columns.numbers[index]
            numbers = [self._number(text, row, name) for row, text in enumerate(texts)]
            self.numbers[index].extend(numbers)

    def _number(self, text: str, row: int, name: str) -> float:
        try:
            return float(text)
        except ValueError:
            if text.strip().lower() in MISSING:
                return math.nan
        is_number = any(as_number(text.replace(",", mark)) is not None for mark in (".", ""))
        if is_number:
            remedy = "write decimals with a point, and nothing between thousands"
        elif as_seconds(text) is not None:
            remedy = f"it looks like a date: --data.time {name}"
        elif row or self.numbers[self.columns.numbers.index(name)]:  # numbers came before it
            remedy = (
                "leave the field empty where a number is missing, or name the columns of numbers: "
                "--data.targets a,b"
            )
        elif self.columns.series:
            remedy = "name the columns of numbers: --data.targets a,b"
        else:
            remedy = (
                "name the columns of numbers, --data.targets a,b, or if it tells series apart, "
                f"--data.series {name}"
            )
        raise MemtrainError(
            f"{self.where}: {self.place(row)}: column {name!r} has {text[:40]!r}, which is not a "
            f"number; {remedy}"
        )

    def add_times(self, texts: Sequence[str]) -> None:
        for row, text in enumerate(texts):
            if self.dated is None:
                self.dated = as_number(text) is None
            missing = text.strip().lower() in MISSING
            found = math.nan if missing else (as_seconds if self.dated else as_number)(text)
            if found is None:
                rule = "an ISO date such as 2024-01-31 or 2024-01-31T12:00" if self.dated else ""
                raise MemtrainError(
                    f"{self.where}: {self.place(row)}: column {self.columns.time!r} has "
                    f"{text[:40]!r}; a time must be {rule or 'a number, as the first is'}"
                )
            self.times.append(found)

    def add_series(self, texts: Sequence[str | None]) -> None:
        for row, text in enumerate(texts):
            if not text:
                raise MemtrainError(
                    f"{self.where}: {self.place(row)}: column {self.columns.series!r} is empty; "
                    "every row needs the name of its series"
                )
            self.series.append(self.names.setdefault(text, len(self.names)))

    def table(self, lines: array | None = None) -> Table:
        times, series = np.array(self.times), np.array(self.series, np.int64)
        return Table(
            columns=self.columns,
            numbers=np.stack([np.array(one) for one in self.numbers], axis=1),
            times=times if self.columns.time else None,
            series=series if self.columns.series else None,
            names=tuple(self.names),
            lines=None if lines is None else np.array(lines, np.int64),
        )


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def as_seconds(text: str) -> float | None:
    """A date in seconds; without a time zone, as if in UTC."""
    text = text.strip()
    try:
        date = datetime.fromisoformat(f"{text}-01" if _MONTH.fullmatch(text) else text)
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
