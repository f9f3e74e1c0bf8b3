"""Read one text column of JSONL, JSON, CSV and parquet files; each row is a document."""

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from typing import Any

from memtrain.data.prepare.limits import FREE, GROWTH, Budget, require_memory
from memtrain.errors import MemtrainError
from memtrain.files import parse_json

COLUMN = "text"
"""The default column."""
MAX_ROW = 2**24
"""Bytes per row of JSONL or CSV. Parsing takes up to thirty times as much memory."""
MAX_JSON = 2**25
"""Bytes of a JSON file, which is parsed in one piece."""
MAX_BATCH = 2**24
"""Bytes to which a batch of parquet rows may unpack."""
MAX_ROWS = 2**22
"""Rows that a parquet file of any size may have: a million equal rows take no space."""
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY"}
"""Parquet encodings in which rows do not share bytes."""


def read_rows(
    file: BufferedIOBase, where: str, layout: str, column: str, budget: Budget
) -> Iterator[bytes]:
    """Yield the texts of one column as UTF-8; lone surrogates, which JSON allows, become "?".

    Args:
        file: an open file, already unpacked.
        where: begins every error.
        layout: jsonl, json, csv, tsv or parquet.
        column: the column's name; rows in which it is null or empty are left out.
        budget: for the unpacked bytes of a parquet file.
    """
    if layout == "parquet":
        rows = _parquet(file, where, column, budget)
    elif layout == "jsonl":
        rows = _jsonl(file, where, column)
    elif layout == "json":
        rows = _json(file, where, column)
    else:
        rows = _csv(file, where, column, "\t" if layout == "tsv" else ",;")
    for text in rows:
        if text:
            yield text if isinstance(text, bytes) else text.encode("utf-8", "replace")


def _missing(where: str, column: str, found: Iterable[object]) -> MemtrainError:
    columns = ", ".join(map(str, found)) or "none"
    return MemtrainError(
        f"{where}: column={column}: does not exist; choose one with --option column NAME, of: "
        f"{columns}; columns of numbers are learned by memtrain train series --data FILE"
    )


# ----------------------------------------------------------------------------------------- JSON


def _jsonl(file: BufferedIOBase, where: str, column: str) -> Iterator[str | None]:
    for number, line in numbered_lines(file, where):
        if line.strip():
            row = parse_json(line, f"{where}: line {number}: not JSON")
            yield _value(row, f"{where}: line {number}", column)


def _json(file: BufferedIOBase, where: str, column: str) -> Iterator[str | None]:
    """One array of objects or strings; one object per line is read as JSONL."""
    jsonl = "write JSONL instead, one object per line"
    raw = file.read(MAX_JSON + 1)
    if len(raw) > MAX_JSON:
        raise MemtrainError(f"{where}: is JSON of more than {MAX_JSON:,} bytes; {jsonl}")
    text = _decoded(raw, where)
    try:
        rows = parse_json(text, where)
    except MemtrainError as error:
        lines = text.splitlines()
        if len(lines) < 2 or not lines[0].rstrip().endswith("}"):
            raise MemtrainError(f"{error}; it is damaged, or {jsonl}") from None
        rows = [parse_json(line, f"{where}: not JSON") for line in lines if line.strip()]
    if isinstance(rows, dict) and len(text.splitlines()) == 1:
        rows = [rows]  # JSONL of a single row
    if not isinstance(rows, list):
        raise MemtrainError(f"{where}: must be an array of objects or of strings; {jsonl}")
    for number, row in enumerate(rows, 1):
        yield row if isinstance(row, str) else _value(row, f"{where}: item {number}", column)


def _value(row: Any, where: str, column: str) -> str | None:
    if not isinstance(row, dict):
        raise MemtrainError(f"{where}: must be a JSON object, as in {{{column!r}: ...}}")
    if column not in row:
        raise _missing(where, column, row)
    if row[column] is not None and not isinstance(row[column], str):
        raise MemtrainError(f"{where}: column={column}: must be a string")
    return row[column]


# ------------------------------------------------------------------------------------------ CSV


def _csv(file: BufferedIOBase, where: str, column: str, marks: str) -> Iterator[str | None]:
    """Rows separated by the first of these marks that finds the column in the header."""
    lines = (line for _, line in numbered_lines(file, where))
    with _long_fields():
        try:
            header = [next(lines, "")]
            found = {mark: next(csv.reader(header, delimiter=mark), []) for mark in marks}
            for mark, names in found.items():
                if column in names:
                    yield from _fields(lines, where, names, column, mark)
                    return
        except csv.Error as error:
            raise MemtrainError(f"{where}: damaged, or not CSV ({error})") from None
    raise _missing(where, column, found[marks[0]])


def _fields(
    lines: Iterator[str], where: str, names: list[str], column: str, mark: str
) -> Iterator[str]:
    length = 0

    def measured() -> Iterator[str]:
        nonlocal length
        for line in lines:
            length += len(line)
            if length > MAX_ROW:  # an unclosed quote, or endless fields
                raise _too_long(where)
            yield line

    place = names.index(column)
    for number, row in enumerate(csv.reader(measured(), delimiter=mark), 1):
        length = 0
        if row and len(row) <= place:
            raise MemtrainError(
                f"{where}: row {number} has {len(row)} fields, the header names {len(names)}"
            )
        if row:
            yield row[place]


@contextmanager
def _long_fields() -> Iterator[None]:
    """Raise the csv module's limit of 128 kB per field, which is global."""
    before = csv.field_size_limit(MAX_ROW)
    try:
        yield
    finally:
        csv.field_size_limit(before)


# ---------------------------------------------------------------------------------------- lines


def numbered_lines(file: BufferedIOBase, where: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, without a byte order mark."""
    number = 0
    while line := file.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            raise _too_long(f"{where}: line {number}")
        yield number, _decoded(line, f"{where}: line {number}")


def _too_long(where: str) -> MemtrainError:
    return MemtrainError(f"{where}: a row of more than {MAX_ROW:,} bytes; split it into several")


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MemtrainError(f"{where}: not UTF-8 text ({error.reason})") from None


# -------------------------------------------------------------------------------------- parquet


def _parquet(
    file: BufferedIOBase, where: str, column: str, budget: Budget
) -> Iterator[bytes | None]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MemtrainError(f"{where}: parquet needs pyarrow: pip install memtrain[data]") from None
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            kinds = {field.name: field.type for field in table.schema_arrow}
            if column not in kinds:
                raise _missing(where, column, kinds)
            if kinds[column] not in (pyarrow.string(), pyarrow.large_string()):
                raise MemtrainError(
                    f"{where}: column={column}: holds {kinds[column]}, must be strings; "
                    f"choose one with --option column NAME, of: {', '.join(kinds)}"
                )
            size = batch_size(table.metadata, column, where, budget)
            batches = table.iter_batches(batch_size=size, columns=[column], use_threads=False)
            for batch in batches:
                for row in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    budget.spend(len(row or b""))
                    if row and not row.isascii():
                        row.decode()  # a damaged file need not be UTF-8
                    yield row
    except MemtrainError:
        raise
    except Exception as error:  # damage raises many kinds of errors
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise MemtrainError(f"{where}: not a parquet file, or damaged ({reason})") from None


def batch_size(metadata: Any, column: str, where: str, budget: Budget) -> int:
    """Rows to unpack at once: rows that share bytes may each be as long as the column."""
    most = max(MAX_ROWS, budget.limit * MAX_ROWS // FREE)
    if metadata.num_rows > most:
        raise MemtrainError(
            f"{where}: refused, claims {metadata.num_rows:,} rows, more than {most:,} for its "
            f"size; {budget.remedy}"
        )
    longest, total = 1, 0
    for group in range(metadata.num_row_groups):
        chunks = metadata.row_group(group)
        for place in range(chunks.num_columns):
            chunk = chunks.column(place)
            if chunk.path_in_schema == column:
                total += chunk.total_uncompressed_size
                if not set(chunk.encodings) <= _PLAIN:
                    longest = max(longest, chunk.total_uncompressed_size)
    if total > budget.limit:
        raise MemtrainError(
            f"{where}: refused, claims to unpack to {total:,} bytes, over {GROWTH} times its "
            f"size; {budget.remedy}"
        )
    require_memory(3 * total, where, "write its rows to several files")
    return max(1, min(1024, MAX_BATCH // longest))
