"""Read text files of any supported kind, and folders of them, as one text, within limits."""

import codecs
import gzip
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

from memtrain.data.prepare.file_kind import HEAD, Kind, detect, is_text_name, require_kind
from memtrain.data.prepare.limits import (
    Budget,
    available_memory,
    ignored_note,
    list_files,
    name_some,
    one_line,
    require_memory,
    suffix_of,
    too_large,
    unpack_budget,
)
from memtrain.data.prepare.records import COLUMN, read_rows
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

BLOCK_BYTES = 2**20
MEMORY = 3
"""Memory for preparing a text, as a multiple of its bytes."""
SEPARATOR_LINE = b"<|endoftext|>\n"
_SPLIT = "split it into several files, and prepare a part of them"


@dataclass(frozen=True, slots=True)
class Texts:
    """The content of files, as one text."""

    raw: bytearray
    """Documents with a separator line between them."""
    notes: tuple[str, ...] = ()
    """What was read and what was not, as shown to the user."""
    not_utf8: tuple[str, ...] = ()
    """The files that are not UTF-8."""


def read_text(path: Path, column: str | None = None) -> Texts:
    """Read a file or a folder of files as one text.

    A file may be plain text of any name, gzipped text, JSONL, CSV, TSV, a JSON array, or parquet.
    Every plain text file and every row of the others is a document. In a folder, including
    subfolders, the files with one of `TEXT_SUFFIXES` are read in sorted order.

    Args:
        path: the file or folder.
        column: the column to read of files with rows; `text` by default.
    """
    if not path.is_dir():
        return read_texts([path], column)
    require_kind(path, "text")
    listing = list_files(path)
    names = sorted(filter(is_text_name, listing.names), key=lambda name: name.split("/"))
    texts = read_texts([path / name for name in names], column)
    counts = Counter(map(suffix_of, names)).most_common()
    kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in counts)
    read = (f"read {kinds}",) if len(counts) > 1 else ()
    others = Counter(suffix_of(name) for name in listing.names if not is_text_name(name))
    notes = (*read, *ignored_note(others + listing.others), *texts.notes)
    return Texts(texts.raw, notes, texts.not_utf8)


def read_texts(
    paths: Sequence[Path], column: str | None = None, *, any_bytes: bool = False
) -> Texts:
    """Read files as one text; see `read_text`.

    Args:
        paths: the files, in this order.
        column: the column to read of files with rows; `text` by default.
        any_bytes: accept byte 0 too, for a data set known to be text.
    """
    kinds = {path: require_kind(path, "text") for path in paths}
    if column is not None and all(kind.format == "text" for kind in kinds.values()):
        raise MemtrainError(
            f"column={column}: plain text has no columns; JSONL, CSV and parquet files do"
        )
    sizes = {path: path.stat().st_size for path in paths}
    packed = {path for path, kind in kinds.items() if kind.format in ("gzip", "parquet")}
    plain = sum(size for path, size in sizes.items() if path not in packed)
    where = str(paths[0] if len(paths) == 1 else paths[0].parent)
    require_memory(MEMORY * plain, where, _SPLIT)
    unpack = "if it is yours, unpack it yourself and pass the text"
    budget = unpack_budget(where, sum(sizes[path] for path in packed), unpack)
    text = _Joined(where, any_bytes)
    foreign: list[str] = []
    for path, kind in kinds.items():
        try:
            with open_regular(path) as file:
                if not _add(text, file, path, kind, column or COLUMN, budget):
                    foreign.append(path.name)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise MemtrainError(f"{path}: damaged or cut short ({error}); get it again") from None
        except OSError as error:
            raise MemtrainError(f"{path}: {error.strerror or error}") from None
    rows = any(kind.format not in ("text", "gzip") for kind in kinds.values())
    notes = [f"each row is a document, its column {one_line(column or COLUMN)}"] * rows
    if foreign:
        notes.append(f"not UTF-8 (perhaps Latin-1), bytes kept unchanged: {name_some(foreign)}")
    return Texts(text.raw, tuple(notes), tuple(foreign))


def _add(
    text: "_Joined", file: BufferedIOBase, path: Path, kind: Kind, column: str, budget: Budget
) -> bool:
    """Add a file's documents and return whether all are UTF-8."""
    where = str(path)
    if kind.format == "gzip":
        unpacked = _Metered(file, budget)
        name = path.name[:-3] if path.suffix.lower() == ".gz" else path.name
        kind = detect(name, unpacked.peek(HEAD)[:HEAD])
        if kind.recipes != ("text",) or kind.format in ("gzip", "parquet"):
            raise MemtrainError(
                f"{path}: is gzipped, and inside is {kind.description}; unpack it first"
            )
        file = unpacked
    if kind.format == "text":
        return _add_plain(text, file, where)
    for row in read_rows(file, where, kind.format, column, budget):
        text.begin()
        text.write(row)
    return True


def _add_plain(text: "_Joined", file: BufferedIOBase, where: str) -> bool:
    """Add a file as one document and return whether it is UTF-8."""
    decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()
    done = 0
    text.begin()
    while block := file.read(BLOCK_BYTES):
        if 0 in block and not text.any_bytes:
            raise MemtrainError(
                f"{where}: holds byte 0 at {done + block.index(0):,}, so it is not text; if it is, "
                "remove the byte: tr -d '\\000' < FILE > NEW"
            )
        if decoder and not (block.isascii() and not decoder.getstate()[0]):
            try:
                decoder.decode(block)
            except UnicodeDecodeError:
                decoder = None
        text.write(block)
        done += len(block)
    if decoder and decoder.getstate()[0]:  # ends within a character
        decoder = None
    return decoder is not None


class _Metered(gzip.GzipFile):
    """A gzipped file that adds its unpacked bytes to a budget."""

    def __init__(self, file: BufferedIOBase, budget: Budget) -> None:
        super().__init__(fileobj=file, mode="rb")
        self.budget = budget

    def read(self, size: int | None = -1) -> bytes:
        return self._spent(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._spent(super().readline(size))

    def _spent(self, block: bytes) -> bytes:
        self.budget.spend(len(block))
        return block


class _Joined:
    """Documents joined to one text; each but the last ends with a line end."""

    def __init__(self, where: str, any_bytes: bool = False) -> None:
        self.raw = bytearray()
        self.any_bytes = any_bytes
        self.where, self.limit = where, available_memory() // MEMORY
        self.fresh = False

    def begin(self) -> None:
        """Begin a document; empty ones are left out."""
        self.fresh = True

    def write(self, block: bytes) -> None:
        if len(self.raw) + len(block) > self.limit:
            raise too_large(self.where, MEMORY * len(self.raw), MEMORY * self.limit, _SPLIT)
        if block and self.fresh and self.raw:
            self.raw += SEPARATOR_LINE if self.raw.endswith(b"\n") else b"\n" + SEPARATOR_LINE
        self.fresh = self.fresh and not block
        self.raw += block
