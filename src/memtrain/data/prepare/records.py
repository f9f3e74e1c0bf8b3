"""Read one text column of JSONL, JSON, CSV, parquet and Arrow files; a row is a document."""

import codecs
import csv
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from typing import Any

from memtrain.data.prepare.arrow_files import arrow_column, missing_column, parquet_column
from memtrain.data.prepare.limits import Budget
from memtrain.errors import MemtrainError
from memtrain.files import parse_json

COLUMN = "text"
"""The default column."""
MAX_ROW = 2**24
"""Bytes per row of JSONL or CSV. Parsing takes up to thirty times as much memory."""
MAX_JSON = 2**25
"""Bytes of a JSON file, which is parsed in one piece."""
_MARKS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}


def read_rows(
    file: BufferedIOBase, where: str, layout: str, column: str, budget: Budget
) -> Iterator[bytes]:
    """Yield the texts of one column as UTF-8; lone surrogates, which JSON allows, become "?".

    Args:
        file: an open file, already unpacked.
        where: begins every error.
        layout: jsonl, json, csv, tsv, parquet or arrow.
        column: the column's name; rows in which it is null or empty are left out.
        budget: for the unpacked bytes of a parquet or Arrow file.
    """
    if layout == "parquet":
        rows = parquet_column(file, where, column, budget)
    elif layout == "arrow":
        rows = arrow_column(file, where, column, budget)
    elif layout == "jsonl":
        rows = _jsonl(file, where, column)
    elif layout == "json":
        rows = _json(file, where, column)
    else:
        rows = _csv(file, where, column, "\t" if layout == "tsv" else ",;")
    for text in rows:
        if text:
            yield text if isinstance(text, bytes) else text.encode("utf-8", "replace")


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
    lines = text.strip().split("\n")  # splitlines would split within a text, at U+2028
    try:
        rows = parse_json(text, where)
    except MemtrainError as error:
        if len(lines) < 2 or not lines[0].rstrip().endswith("}"):
            raise MemtrainError(f"{error}; it is damaged, or {jsonl}") from None
        rows = [
            parse_json(line, f"{where}: line {number}: not JSON")
            for number, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    if isinstance(rows, dict) and len(lines) == 1:
        rows = [rows]  # JSONL of a single row
    if not isinstance(rows, list):
        raise MemtrainError(f"{where}: must be an array of objects or of strings; {jsonl}")
    for number, row in enumerate(rows, 1):
        yield row if isinstance(row, str) else _value(row, f"{where}: item {number}", column)


def _value(row: Any, where: str, column: str) -> str | None:
    if not isinstance(row, dict):
        raise MemtrainError(f"{where}: must be a JSON object, as in {{{column!r}: ...}}")
    if column not in row:
        raise missing_column(where, column, row)
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
    raise missing_column(where, column, found[marks[0]])


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

    place, number = names.index(column), 0
    try:
        # Strict: an open quote would join the rows after it to one text.
        for number, row in enumerate(csv.reader(measured(), delimiter=mark, strict=True), 1):
            length = 0
            if row and (len(row) <= place or any(row[len(names) :])):
                raise MemtrainError(
                    f"{where}: row {number} has {len(row)} fields, the header names {len(names)}; "
                    f"write a text that holds {_MARKS[mark]} in quotes"
                )
            if row:
                yield row[place]
    except csv.Error as error:
        raise MemtrainError(
            f"{where}: row {number + 1}: damaged, or not CSV ({error}); write a text that holds a "
            "quote in quotes, and that quote twice"
        ) from None


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
        code = "UTF-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        raise MemtrainError(
            f"{where}: not UTF-8 text ({error.reason}); convert it: iconv -f {code} -t UTF-8 FILE "
            "> NEW"
        ) from None
