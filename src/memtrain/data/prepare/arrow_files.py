"""Read one text column of parquet and Arrow files, with pyarrow."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from typing import Any

from memtrain.data.prepare.limits import FREE, GROWTH, Budget, require_memory
from memtrain.errors import MemtrainError

MAX_BATCH = 2**24
"""Bytes to which a batch of parquet rows may unpack."""
MAX_ROWS = 2**22
"""Rows that a parquet file of any size may have: a million equal rows take no space."""
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY"}
"""Parquet encodings in which rows do not share bytes."""

ARROW_FILE = b"ARROW1"
"""The first bytes of an Arrow file; those of a stream, as `datasets` saves them, have no name."""
ARROW_STREAM = b"\xff\xff\xff\xff"


def parquet_column(
    file: BufferedIOBase, where: str, column: str, budget: Budget
) -> Iterator[bytes | None]:
    """The texts of one column of a parquet file."""
    pyarrow = _pyarrow(where, "parquet")
    with _readable(where, "a parquet file"), pyarrow.parquet.ParquetFile(file) as table:
        _check_column(table.schema_arrow, where, column)
        size = batch_size(table.metadata, column, where, budget)
        batches = table.iter_batches(batch_size=size, columns=[column], use_threads=False)
        for batch in batches:
            yield from texts_of(batch.column(0), budget)


def arrow_column(
    file: BufferedIOBase, where: str, column: str, budget: Budget
) -> Iterator[bytes | None]:
    """The texts of one column of an Arrow file or stream."""
    pyarrow = _pyarrow(where, "Arrow")
    with _readable(where, "an Arrow file"):
        whole = file.read(len(ARROW_FILE)) == ARROW_FILE
        file.seek(0)
        reader = (pyarrow.ipc.open_file if whole else pyarrow.ipc.open_stream)(file)
        _check_column(reader.schema, where, column)
        count = reader.num_record_batches if whole else None
        batches = iter(reader) if count is None else map(reader.get_batch, range(count))
        place = reader.schema.names.index(column)
        for batch in batches:
            yield from texts_of(batch.column(place), budget)


def texts_of(values: Any, budget: Budget) -> Iterator[bytes | None]:
    """The strings of a pyarrow array as UTF-8."""
    import pyarrow

    for row in values.cast(pyarrow.large_binary()).to_pylist():
        budget.spend(len(row or b""))
        if row and not row.isascii():
            row.decode()  # a damaged file need not be UTF-8
        yield row


def missing_column(where: str, column: str, found: Iterable[object]) -> MemtrainError:
    """The error for a column that a file does not have."""
    columns = ", ".join(map(str, found)) or "none"
    return MemtrainError(
        f"{where}: column={column}: does not exist; choose one with --option column NAME, of: "
        f"{columns}; columns of numbers are learned by memtrain train series --data FILE"
    )


def _check_column(schema: Any, where: str, column: str) -> None:
    import pyarrow

    kinds = {field.name: field.type for field in schema}
    if column not in kinds:
        raise missing_column(where, column, kinds)
    if kinds[column] not in (pyarrow.string(), pyarrow.large_string()):
        raise MemtrainError(
            f"{where}: column={column}: holds {kinds[column]}, must be strings; "
            f"choose one with --option column NAME, of: {', '.join(kinds)}"
        )


def _pyarrow(where: str, kind: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MemtrainError(
            f'{where}: {kind} needs pyarrow: pip install "memtrain[data]"'
        ) from None
    return pyarrow


@contextmanager
def _readable(where: str, kind: str) -> Iterator[None]:
    """Turn the many errors of a damaged file into one."""
    try:
        yield
    except MemtrainError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise MemtrainError(f"{where}: not {kind}, or damaged ({reason})") from None


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
