"""Read text files of any supported kind, and folders of them, as one text, within limits."""

import codecs
import gzip
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

from memtrain.data.prepare.file_kind import (
    HEAD,
    RECORD_SUFFIXES,
    Kind,
    detect,
    is_text_name,
    kind_of,
    require_kind,
)
from memtrain.data.prepare.hugging_face import SPLIT, hub_name, hub_texts, saved_files
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
    has_rows: bool = False
    """Whether documents were rows with columns."""


def read_text(
    path: Path, column: str | None = None, *, split: str | None = None, subset: str | None = None
) -> Texts:
    """Read a file, a folder of files, or a Hugging Face dataset as one text.

    A file may be plain text of any name, gzipped text, JSONL, CSV, TSV, a JSON array, parquet or
    Arrow. Every plain text file and every row of the others is a document. In a folder, including
    subfolders, the files with one of `TEXT_SUFFIXES` are read in sorted order; those of programs
    that turn out not to be text are passed over.

    Args:
        path: the file or folder, or hf:NAME.
        column: the column to read of files with rows; `text` by default.
        split: of a Hugging Face dataset; `train` by default.
        subset: of a Hugging Face dataset on the Hub that has several.
    """
    kind = require_kind(path, "text")
    if kind.format not in ("dataset", "hub") and (split or subset):
        name, value = ("split", split) if split else ("subset", subset)
        raise MemtrainError(
            f"{name}={value}: {path} is {kind.description}, and only Hugging Face datasets have "
            f"a {name}; leave it out (held_out chooses the part for evaluation)"
        )
    if subset and kind.format == "dataset":
        raise MemtrainError(f"subset={subset}: a dataset on disk has one; leave it out")
    if kind.format == "hub":
        return _read_hub(path, column or COLUMN, split, subset)
    if kind.format == "dataset":
        texts = read_texts(saved_files(path, split), column)
        chosen = (f"split {split or SPLIT}",) if (path / "dataset_dict.json").is_file() else ()
        return replace(texts, notes=(*chosen, *texts.notes))
    if not path.is_dir():
        return read_texts([path], column)
    listing = list_files(path)
    found = sorted(filter(is_text_name, listing.names), key=lambda name: name.split("/"))
    names = [name for name in found if _is_readable(path / name)]
    texts = read_texts([path / name for name in names], column)
    counts = Counter(map(suffix_of, names)).most_common()
    kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in counts)
    read = (f"read {kinds}",) if len(counts) > 1 else ()
    others = Counter(suffix_of(name) for name in set(listing.names) - set(names))
    notes = (*read, *ignored_note(others + listing.others), *texts.notes)
    return replace(texts, notes=notes)


def _is_readable(path: Path) -> bool:
    """Whether a file of a folder is what its name says; damaged records are an error instead."""
    records = suffix_of(path.name).removesuffix(".gz") in RECORD_SUFFIXES
    return records or path.suffix.lower() == ".gz" or kind_of(path).recipes == ("text",)


def _read_hub(path: Path, column: str, split: str | None, subset: str | None) -> Texts:
    """Read a dataset of the Hub; it is as large as it says, so only memory limits it."""
    text, limit = _Joined(str(path)), available_memory() // MEMORY
    budget = Budget(str(path), limit, "does not fit in memory", "take a part: split train[:10%]")
    for row in hub_texts(hub_name(path), column, split, subset, budget):
        text.begin()
        text.write(row or b"")
    notes = (f"split {split or SPLIT}; {_rows_note(column)}",)
    return Texts(text.raw, notes, has_rows=True)


def _rows_note(column: str) -> str:
    return f"each row is a document, its column {one_line(column)}"


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
    sizes = {path: path.stat().st_size for path in paths}
    packed = {path for path, kind in kinds.items() if kind.format in ("gzip", "parquet", "arrow")}
    plain = sum(size for path, size in sizes.items() if path not in packed)
    where = str(paths[0] if len(paths) == 1 else paths[0].parent)
    require_memory(MEMORY * plain, where, _SPLIT)
    unpack = "if it is yours, unpack it yourself and pass the text"
    budget = unpack_budget(where, sum(sizes[path] for path in packed), unpack)
    text = _Joined(where, any_bytes)
    foreign: list[str] = []
    rows = False
    for path, kind in kinds.items():
        try:
            with open_regular(path) as file:
                added = _add(text, file, path, kind, column or COLUMN, budget)
                if not added.utf8:
                    foreign.append(path.name)
                rows |= added.rows
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise MemtrainError(f"{path}: damaged or cut short ({error}); get it again") from None
        except OSError as error:
            raise MemtrainError(f"{path}: {error.strerror or error}") from None
    notes = [_rows_note(column or COLUMN)] * rows
    if foreign:
        notes.append(f"not UTF-8 (perhaps Latin-1), bytes kept unchanged: {name_some(foreign)}")
    return Texts(text.raw, tuple(notes), tuple(foreign), rows)


class _Added(NamedTuple):
    """What was found in a file."""

    utf8: bool
    rows: bool


def _add(
    text: "_Joined", file: BufferedIOBase, path: Path, kind: Kind, column: str, budget: Budget
) -> _Added:
    """Add a file's documents."""
    where = str(path)
    if kind.format == "gzip":
        unpacked = _Metered(file, budget)
        name = path.name[:-3] if path.suffix.lower() == ".gz" else path.name
        kind = detect(name, unpacked.peek(HEAD)[:HEAD])
        if kind.recipes != ("text",) or kind.format in ("gzip", "parquet", "arrow"):
            raise MemtrainError(
                f"{path}: is gzipped, and inside is {kind.description}; unpack it first"
            )
        file = unpacked
    if kind.format == "text":
        return _Added(_add_plain(text, file, where), rows=False)
    for row in read_rows(file, where, kind.format, column, budget):
        text.begin()
        text.write(row)
    return _Added(utf8=True, rows=True)


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
