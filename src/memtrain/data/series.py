"""Series of numbers as a task: windows to learn from, and pasts to forecast from.

The end of every series is held out. Rows are numbered through all series, one after another.
"""

import hashlib
import json
import math
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from memtrain.config import Series, columns_of
from memtrain.data.prepare.series_files import read_table
from memtrain.data.prepare.series_table import Columns, Table
from memtrain.data.series_format import ForecastCases
from memtrain.data.series_scale import GAP, check_held_out, fit_format, log_gaps, model_inputs
from memtrain.data.task import Task
from memtrain.data.window_starts import WindowSampler
from memtrain.errors import MemtrainError
from memtrain.shapes import Batch, Values

FEWEST = 2
"""Rows of a series that are held out at least."""


class SeriesTask(Task):
    """Windows of series: `data.window` inputs, each with the numbers of the next row as target.

    Training windows lie in the training part of one series, with all their targets. Held-out
    windows have targets in the held-out part only; what they read may begin before it.

    Args:
        config: the file and how it is used.
        table: its content.
    """

    unit = "value"

    def __init__(self, config: Series, table: Table) -> None:
        self.config = config
        self.sequence_length = config.window
        self._ends = np.append(table.starts[1:], len(table.numbers))
        self._starts = table.starts
        self._splits = self._ends - np.round(config.held_out * (self._ends - self._starts)).astype(
            np.int64
        )
        """The first held-out row of each series."""
        self._check_lengths(table)
        training = np.zeros(len(table.numbers), bool)
        for start, split in zip(self._starts, self._splits, strict=True):
            training[start:split] = True
        numbers = table.numbers
        known = table.columns.known
        if config.time_gap:
            assert table.times is not None
            numbers = np.column_stack([numbers, log_gaps(table.times, self._starts)])
            known = (*known, GAP)
        self.format = fit_format(config, table.columns.targets, known, numbers[training])
        targets = len(self.format.targets)
        check_held_out(config, self.format.targets, numbers[~training, :targets])
        self.values: Values = Values(numbers.shape[1], targets, config.likelihood)
        self._inputs = torch.from_numpy(model_inputs(numbers, self.format, self._ends))
        if bool(self._inputs.isinf().any()):
            raise MemtrainError(
                f"{config.path}: has numbers too far from those of its training part for 32 bits; "
                "leave that column out of data.targets or data.known, or correct them"
            )
        self._training = torch.from_numpy(np.flatnonzero(training))
        """The rows that are not held out."""
        self.identity = _identity(config, table)
        self._sampler: WindowSampler | None = None

    @classmethod
    def from_config(cls, config: Series) -> "SeriesTask":
        """Read the file that a config names.

        Raises:
            MemtrainError: there is none, or it is not as the config says; in one line.
        """
        if not config.path:
            raise MemtrainError(
                "data.path: name a CSV, parquet or .npy file of numbers over time, as in memtrain "
                "train series --data FILE --data.targets y --data.known price --data.season 24"
            )
        columns = Columns(
            columns_of(config.targets), columns_of(config.known), config.time, config.series
        )
        return cls(config, read_table(Path(config.path), columns))

    def _check_lengths(self, table: Table) -> None:
        """Refuse series that are too short, and say what they are long enough for."""
        config, rows = self.config, self._ends - self._starts
        held, shortest = int((self._ends - self._splits).min()), int(rows.argmin())
        named = f"{config.path}{table.name(shortest) and ', ' + table.name(shortest)}"
        if held < FEWEST:
            least = FEWEST / int(rows.min())
            remedy = f"hold out {math.ceil(100 * least) / 100:g} or more"
            raise MemtrainError(
                f"data.held_out={config.held_out:g}: holds out {held} of the {rows.min():,} rows "
                f"of {named}, {FEWEST} are needed; "
                + (remedy if least < 0.5 else "the series is too short, take more rows")
            )
        trained = int((self._splits - self._starts).min())
        if trained <= config.window:
            raise MemtrainError(
                f"data.window={config.window}: the training part of {named} has {trained:,} rows, "
                + (
                    f"enough for windows of {trained - 1:,} steps; set data.window to at most that"
                    if trained > FEWEST
                    else "too few for any window; take more rows, or hold out less"
                )
            )

    # ---------------------------------------------------------------------------------- windows

    @property
    def device(self) -> torch.device:
        return self._inputs.device

    def to(self, device: torch.device) -> "SeriesTask":
        """Move the numbers to a device once, so that sampling needs no copy."""
        self._inputs, self._training = self._inputs.to(device), self._training.to(device)
        self._sampler = None
        return self

    def of_length(self, length: int) -> "SeriesTask":
        """Shorter windows of the same numbers."""
        replace(self.config, window=length)  # checks it
        shorter = copy(self)
        shorter.sequence_length, shorter._sampler = length, None
        return shorter

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Windows anywhere in the training parts; a batch repeats none while there are others."""
        if self._sampler is None:
            self._sampler = self._make_sampler()
        return self._gather(self._training[self._sampler.draw(count, generator)])

    def _make_sampler(self) -> WindowSampler:
        lengths = self._splits - self._starts
        starts = lengths.cumsum() - lengths  # counted in training rows
        size = self.sequence_length + 1
        return WindowSampler(starts, int(lengths.sum()), size, False, self.device)

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        """Windows spread over the held-out parts, at most as many as there are.

        They overlap only if there are too few others. Where a held-out part is shorter than a
        window, the window begins before it, and its targets there are missing.
        """
        length = self.sequence_length
        first = np.minimum(self._splits - 1, self._ends - 1 - length)
        last = self._ends - 1 - length
        starts = np.concatenate(
            [np.arange(a, b + 1, length) for a, b in zip(first, last, strict=True)]
        )
        if len(starts) < count:
            starts = _spread(first, last, count)
        chosen = torch.from_numpy(starts)[torch.randperm(len(starts), generator=generator)[:count]]
        batch = self._gather(chosen)
        series = np.searchsorted(self._starts, chosen.numpy(), side="right") - 1
        split = torch.from_numpy(self._splits[series])
        row = chosen[:, None] + torch.arange(1, length + 1)
        held = (row >= split[:, None]).to(self.device)
        return Batch(batch.inputs, batch.targets.where(held[..., None], torch.nan))

    def _gather(self, starts: Int[Tensor, " B"]) -> Batch:
        starts = starts.to(self.device)
        span = torch.arange(self.sequence_length + 1, device=self.device)
        rows = self._inputs[starts[:, None] + span]
        return Batch(rows[:, :-1], rows[:, 1:, : self.values.targets])

    # -------------------------------------------------------------------------------- forecasts

    @property
    def longest_history(self) -> int:
        """Steps that can be read before every forecast of every series."""
        return int((self._splits - self._starts).min())

    @property
    def longest_horizon(self) -> int:
        """Steps that can be forecast in every series: the held-out ones."""
        return int((self._ends - self._splits).min())

    def forecast_cases(self, count: int, horizon: int, history: int) -> ForecastCases:
        """Pasts and futures, spread evenly over the held-out parts; the futures are held out.

        The last row of `known` may be missing, at the end of a series; no forecast needs it.

        Args:
            count: how many, at most as many as there are.
            horizon: steps to forecast, at most `longest_horizon`.
            history: steps to read before; `longest_history` if that is less.

        Raises:
            MemtrainError: an argument is out of its range.
        """
        for name, value in (("count", count), ("horizon", horizon), ("history", history)):
            if type(value) is not int or value < 1:
                raise MemtrainError(f"{name}={value!r}: must be a whole number above 0")
        if horizon > self.longest_horizon:
            raise MemtrainError(
                f"horizon={horizon}: must be at most {self.longest_horizon}, the held-out steps of "
                "the shortest series; a larger data.held_out holds out more, in a new run"
            )
        history, targets = min(history, self.longest_history), self.values.targets
        origins = _spread(self._splits - 1, self._ends - 1 - horizon, count)
        last = torch.from_numpy(origins).to(self.device)[:, None]
        past = last + torch.arange(1 - history, 1, device=self.device)
        future = last + torch.arange(1, horizon + 1, device=self.device)
        rows = self._inputs[future]
        return ForecastCases(self._inputs[past], rows[..., targets:], rows[..., :targets])


def _spread(
    first: Int64[np.ndarray, " S"], last: Int64[np.ndarray, " S"], count: int
) -> Int64[np.ndarray, " N"]:
    """At most `count` rows, evenly among those from `first` to `last` of each series."""
    ends = (last - first + 1).cumsum()
    chosen = np.unique(np.linspace(0, ends[-1] - 1, count).round().astype(np.int64))
    series = np.searchsorted(ends, chosen, side="right")
    return last[series] + 1 - ends[series] + chosen


def _identity(config: Series, table: Table) -> str:
    """A checksum of the numbers that were read, and of the options that change their use."""
    options = (config.targets, config.known, config.time, config.series)
    digest = hashlib.sha256(
        json.dumps([*options, config.held_out, config.window, config.time_gap]).encode()
    )
    digest.update(json.dumps([table.columns.targets, table.names]).encode())
    for one in (table.numbers, table.times, table.starts):
        digest.update(b"none" if one is None else np.ascontiguousarray(one).data)
    return digest.hexdigest()[:32]
