"""Read series of numbers from CSV, parquet and .npy files."""

import csv
import re
from array import array
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np

from memtrain.data.prepare.arrow_files import batch_size
from memtrain.data.prepare.limits import require_memory, unpack_budget
from memtrain.data.prepare.records import numbered_lines
from memtrain.data.prepare.series_table import (
    MISSING,
    Columns,
    Table,
    TableBuilder,
    as_number,
)
from memtrain.data.store import open_array
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

MARKS = (",", ";", "\t")
"""What may separate the fields of a CSV."""
LARGEST = 1e30
"""Numbers beyond it are errors, and would overflow 32 bits."""
CHUNK = 2**13
"""Rows that are converted at once."""
REMEDY = "take fewer rows or columns"
_INDEX = re.compile(r"__index_level_\d+__")
"""The name of a column that pandas adds."""
SUFFIXES = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".parquet": "parquet", ".npy": "npy"}


def read_table(path: Path, columns: Columns) -> Table:
    """Read some columns of a file, one series after another.

    Raises:
        MemtrainError: it cannot be read as numbers, or its times do not rise; the message names
            the line and the column.
    """
    layout = SUFFIXES.get(path.suffix.lower())
    if layout is None:
        raise MemtrainError(
            f"{path}: a series is read from a CSV, parquet or .npy file; write it as one of them, "
            "with that suffix"
        )
    try:
        if layout == "npy":
            table = _read_npy(path, columns)
        else:
            with open_regular(path) as file:
                size = path.stat().st_size
                read = _read_csv if layout == "csv" else _read_parquet
                table = read(file, str(path), columns, size)
    except FileNotFoundError:
        raise MemtrainError(f"{path}: no such file") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    if not len(table.numbers):
        raise MemtrainError(f"{path}: has no rows; a series needs some")
    _check_finite(table, path)
    return table.grouped(str(path))


def _check_finite(table: Table, path: Path) -> None:
    """Refuse infinite and absurd numbers, in which NaN is allowed, and times that are missing."""
    wrong = np.abs(table.numbers) > LARGEST
    if wrong.any():
        row, column = map(int, np.argwhere(wrong)[0])
        name, value = table.columns.numbers[column], table.numbers[row, column]
        raise MemtrainError(
            f"{path}: {table.place(row)}: column {name!r} has {value:g}; numbers must lie within "
            f"{LARGEST:g}, leave the field empty where one is missing"
        )
    if table.times is not None and not np.isfinite(table.times).all():
        row = int(np.argmin(np.isfinite(table.times)))
        raise MemtrainError(
            f"{path}: {table.place(row)}: column {table.columns.time!r} has no time; every row "
            "needs one, or leave data.time out"
        )


# ------------------------------------------------------------------------------------------ CSV


def _read_csv(file: BufferedIOBase, where: str, columns: Columns, size: int) -> Table:
    # A number takes two bytes of text at least, and eight in memory, twice when they are joined.
    require_memory(8 * size, where, REMEDY)
    rows = numbered_lines(file, where)
    _, header = next(rows, (1, ""))
    names, mark = _header(header, where)
    columns = columns.of(names, where)
    at = {name: names.index(name) for name in names}
    lines, numbers = array("q"), [0]
    builder = TableBuilder(where, columns, lambda row: f"line {numbers[row]:,}")
    for numbers, chunk in _chunks(rows, mark, len(names), where):
        for index, name in enumerate(columns.numbers):
            builder.add_numbers(index, [row[at[name]] for row in chunk])
        if columns.time:
            builder.add_times([row[at[columns.time]] for row in chunk])
        if columns.series:
            builder.add_series([row[at[columns.series]].strip() for row in chunk])
        lines.extend(numbers)
    return builder.table(lines)


def _header(line: str, where: str) -> tuple[list[str], str]:
    """The names of the columns, and the mark between them: the one that gives the most."""
    found: dict[str, list[str]] = {}
    damage: MemtrainError | None = None
    for mark in MARKS:
        try:
            found[mark] = _fields(line, mark, f"{where}: line 1")
        except MemtrainError as error:  # a quoted name may hold the right mark
            damage = damage or error
    mark = max(found, key=lambda one: len(found[one]), default="")
    if damage and len(found.get(mark, "")) < 2:
        raise damage
    names = [name.strip() for name in found[mark]]
    if all(as_number(name) is not None or name.lower() in MISSING for name in names):
        raise MemtrainError(
            f"{where}: line 1: must name the columns, it has {line.strip()[:40]!r}; add a header, "
            "as in time,y"
        )
    if "" in names:
        raise MemtrainError(
            f"{where}: line 1: column {names.index('') + 1} has no name; name it, or write the "
            "file without row numbers (pandas: to_csv(..., index=False))"
        )
    if len({*names}) < len(names):
        raise MemtrainError(
            f"{where}: line 1: two columns are called {max(names, key=names.count)!r}; rename one"
        )
    return names, mark


def _fields(line: str, mark: str, where: str) -> list[str]:
    line = line.rstrip("\r\n")
    if '"' not in line:
        return line.split(mark)
    try:
        return next(csv.reader([line], delimiter=mark, strict=True))
    except csv.Error as error:
        raise MemtrainError(f"{where}: damaged, or not CSV ({error}); a row is one line") from None


def _chunks(
    rows: Iterator[tuple[int, str]], mark: str, width: int, where: str
) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Yield line numbers and fields; empty lines are left out, but for one column they count."""
    numbers: list[int] = []
    chunk: list[list[str]] = []
    empty: list[int] = []
    for number, line in rows:
        if not line.strip():
            empty += [number] if width == 1 else []
            continue
        numbers += empty  # lines of a single column that have a number after them
        chunk += [[""] for _ in empty]
        empty = []
        found = _fields(line, mark, f"{where}: line {number:,}")
        if len(found) != width:
            raise MemtrainError(
                f"{where}: line {number:,}: has {len(found)} fields, the header names {width}; "
                "every row needs as many"
            )
        numbers.append(number)
        chunk.append(found)
        if len(chunk) >= CHUNK:
            yield numbers, chunk
            numbers, chunk = [], []
    if chunk:
        yield numbers, chunk


# -------------------------------------------------------------------------------------- parquet


def _read_parquet(file: BufferedIOBase, where: str, columns: Columns, size: int) -> Table:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MemtrainError(
            f"{where}: parquet needs pyarrow: pip install memtrain[series]"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            return _parquet_table(parquet, where, columns, size)
    except MemtrainError:
        raise
    except Exception as error:  # damage raises many kinds of errors
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise MemtrainError(f"{where}: not a parquet file, or damaged ({reason})") from None


def _parquet_table(parquet: Any, where: str, columns: Columns, size: int) -> Table:
    import pyarrow.types as types

    kinds = {one.name: one.type for one in parquet.schema_arrow}
    named = columns.targets
    columns = columns.of(list(kinds), where)
    right = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
    for name in columns.numbers:
        if not any(is_kind(kinds[name]) for is_kind in right):
            when = types.is_date(kinds[name]) or types.is_timestamp(kinds[name])
            remedy = f"--data.time {name}" if when else "name those of numbers: --data.targets a,b"
            raise MemtrainError(
                f"{where}: column {name!r} has {kinds[name]}, which are not numbers; {remedy}"
            )
        if name in columns.targets and not named and _INDEX.fullmatch(name):
            raise MemtrainError(
                f"{where}: column {name!r} is the row numbers of pandas; write the file without "
                "them (to_parquet(..., index=False)), or name the columns to predict: "
                "--data.targets a,b"
            )
    dates = (types.is_date, types.is_timestamp, types.is_string, types.is_large_string)
    if columns.time and not any(is_kind(kinds[columns.time]) for is_kind in (*right, *dates)):
        raise MemtrainError(
            f"{where}: column {columns.time!r} has {kinds[columns.time]}; a time must be a number, "
            "or a date such as 2024-01-31T12:00"
        )
    texts = [
        name
        for name in (columns.time, columns.series)
        if name and (types.is_string(kinds[name]) or types.is_large_string(kinds[name]))
    ]
    budget = unpack_budget(where, size, REMEDY)
    rows = parquet.metadata.num_rows
    chunk = min([CHUNK, *(batch_size(parquet.metadata, name, where, budget) for name in texts)])
    require_memory(24 * rows * (2 + len(columns.numbers)), where, REMEDY)
    done = 0
    builder = TableBuilder(where, columns, lambda row: f"row {done + row + 1:,}")
    wanted = [name for name in (*columns.numbers, columns.time, columns.series) if name]
    for batch in parquet.iter_batches(batch_size=chunk, columns=wanted, use_threads=False):
        for index, name in enumerate(columns.numbers):
            builder.numbers[index].frombytes(_floats(batch.column(name)).tobytes())
        for name, add in ((columns.time, builder.add_times), (columns.series, builder.add_series)):
            if name in texts:
                found = [one or "" for one in batch.column(name).to_pylist()]
                budget.spend(sum(map(len, found)))
                add(found)
            elif name and add == builder.add_times:
                builder.times.frombytes(_floats(batch.column(name)).tobytes())
            elif name:
                builder.add_series(
                    ["" if one is None else str(one) for one in batch.column(name).to_pylist()]
                )
        done += len(batch)
    return builder.table()


def _floats(column: Any) -> np.ndarray:
    """A column as 64-bit floats; dates in seconds, NaN for null."""
    import pyarrow
    import pyarrow.types as types

    per_second = 1.0
    if types.is_date(column.type) or types.is_timestamp(column.type):
        whole = column.cast(pyarrow.timestamp("us"), safe=False)  # nanoseconds are cut
        column, per_second = whole.cast(pyarrow.int64()), 1e6
    found = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(found, np.float64) / per_second


# ----------------------------------------------------------------------------------------- .npy


def _read_npy(path: Path, columns: Columns) -> Table:
    """An array (T,), (T, F), or (N, T, F) of N series; columns are called by their numbers."""
    try:
        array_ = open_array(path)
    except ValueError as error:
        raise MemtrainError(f"{path}: {error}") from None
    if array_.dtype.kind not in "fiub" or array_.ndim not in (1, 2, 3):
        raise MemtrainError(
            f"{path}: {array_.dtype} of shape {array_.shape}: must be numbers of shape (T,), "
            "(T, F) or (N, T, F)"
        )
    several = array_.ndim == 3
    if several and columns.series:
        raise MemtrainError(
            f"data.series={columns.series!r}: {path} has one series per row of its first axis; "
            "leave it out"
        )
    width = 1 if array_.ndim == 1 else array_.shape[-1]
    columns = columns.of([str(index) for index in range(width)], str(path))
    count = array_.size // max(1, width)
    require_memory(24 * count * (2 + len(columns.numbers)), str(path), REMEDY)
    flat = array_.reshape(count, width)
    found = Table(columns, flat[:, [int(name) for name in columns.numbers]].astype(np.float64))
    if columns.time:
        found.times = flat[:, int(columns.time)].astype(np.float64)
    if several:
        found.series = np.repeat(np.arange(len(array_)), array_.shape[1])
        found.names = tuple(str(index) for index in range(len(array_)))
    elif columns.series:
        names, found.series = np.unique(flat[:, int(columns.series)], return_inverse=True)
        found.names = tuple(f"{name:g}" for name in names)
    return found
