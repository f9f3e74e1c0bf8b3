"""Text as tokens and back: one token a byte.

A text may hold several documents. They are split at lines that hold nothing but
`<|endoftext|>`, as in TinyStories; such a line is never part of a document.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from memtrain.errors import MemtrainError, nearest

TEXT_VOCAB = 256
SEPARATOR_TOKEN = 0
TEXT_MODES = ("bytes", "ascii")

_SEPARATOR_LINE = b"<|endoftext|>\n"
_SEPARATOR = re.compile(rb"^<\|endoftext\|>[ \t]*(?:\r?\n|\r?\Z)", re.MULTILINE)
_SUFFIXES = (".txt", ".txt.gz", ".parquet")
_NON_ASCII = bytes(range(128, 256))
_NO_LEAD_BYTE = bytes(range(192))  # in UTF-8 a character beyond ASCII has one byte from 192 on

# -------------------------------------------------------------------------------------- reading


def read_text(path: Path) -> bytes:
    """Read a text: a file, gzipped or not, a parquet file, or a folder of such files.

    Every row of a parquet file's `text` column and every file of a folder (.txt, .txt.gz and
    .parquet, subfolders too, sorted) is a document of its own.
    """
    if not path.is_dir():
        return read_texts([path])
    files = sorted(file for file in path.rglob("*") if file.name.lower().endswith(_SUFFIXES))
    if not files:
        raise MemtrainError(f"{path}: no {', '.join(_SUFFIXES)} file in this folder")
    return read_texts(files)


def read_texts(paths: Sequence[Path]) -> bytes:
    """Read files as one text, each a document of its own or several."""
    return join_documents(text for path in paths for text in _texts(path))


def join_documents(documents: Iterable[bytes]) -> bytes:
    """One text of several documents. All but the last are made to end their last line."""
    parts: list[bytes] = []
    for document in documents:
        if parts:
            parts.append(_SEPARATOR_LINE if parts[-1].endswith(b"\n") else b"\n" + _SEPARATOR_LINE)
        parts.append(document)
    return b"".join(parts)


def _texts(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        raise MemtrainError(f"{path}: no such text file or folder")
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix == ".gz":
            yield _unzipped(path)
        else:
            yield path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MemtrainError(f"{path}: damaged or cut short ({error}); get it again") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None


def _unzipped(path: Path) -> bytes:
    """A gzipped text. What grows a hundredfold is no text, and is given up before it is large."""
    limit = max(2**26, 100 * path.stat().st_size)
    with gzip.open(path) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise MemtrainError(f"{path}: refused, unpacks to more than {limit:,} bytes")
    return text


def _parquet_rows(path: Path) -> Iterator[bytes]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MemtrainError(f"{path}: parquet needs pyarrow: pip install memtrain[data]") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            kinds = {field.name: field.type for field in file.schema_arrow}
            if kinds.get("text") not in (pyarrow.string(), pyarrow.large_string()):
                raise MemtrainError(
                    f"{path}: needs a column text of strings, has {', '.join(kinds) or 'none'}"
                )
            for batch in file.iter_batches(columns=["text"]):
                for row in batch.column(0):
                    if row.is_valid:
                        yield row.as_py().encode()
    except pyarrow.ArrowException as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise MemtrainError(f"{path}: no parquet file, or damaged ({reason})") from None


# ------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text as tokens."""

    tokens: UInt8[np.ndarray, " N"]
    starts: Int64[np.ndarray, " K"]
    """Where each document starts."""
    dropped_characters: int
    dropped_bytes: int
    kept_bytes: int
    """Beyond ASCII, in mode "bytes"."""


def encode_text(raw: bytes, mode: str = "bytes", *, separator: bool = False) -> EncodedText:
    """Turn a text into tokens.

    Args:
        raw: UTF-8, or anything else in mode "bytes".
        mode: "bytes" keeps every byte of every document, "ascii" drops characters beyond ASCII,
            as the paper does.
        separator: put token 0 between documents; without it they follow one another directly,
            as in the paper.
    """
    if mode not in TEXT_MODES:
        raise MemtrainError(f"mode={mode!r}: {nearest(mode, TEXT_MODES)}")
    ascii_only = raw.translate(None, _NON_ASCII)
    text = ascii_only if mode == "ascii" else raw
    dropped_bytes, kept_bytes = len(raw) - len(text), len(text) - len(ascii_only)
    dropped_characters = len(raw.translate(None, _NO_LEAD_BYTE)) if dropped_bytes else 0
    if separator and SEPARATOR_TOKEN in text:
        raise MemtrainError("separator: the text holds byte 0 itself; leave the separator off")

    ends, begins = [], [0]
    for line in _SEPARATOR.finditer(text):
        ends.append(line.start())
        begins.append(line.end())
    ends.append(len(text))
    spans = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]

    view = memoryview(text)  # slices of a view are not copied
    glue = bytes([SEPARATOR_TOKEN]) if separator else b""
    tokens = np.frombuffer(glue.join(view[begin:end] for begin, end in spans), np.uint8)
    lengths = np.array([end - begin + len(glue) for begin, end in spans], np.int64)
    starts = np.cumsum(lengths) - lengths
    return EncodedText(tokens, starts, dropped_characters, dropped_bytes, kept_bytes)


def decode_text(tokens: Integer[np.ndarray, " N"]) -> str:
    """The text that tokens spell; what is no UTF-8 becomes U+FFFD."""
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < TEXT_VOCAB):
        raise MemtrainError(
            f"tokens {tokens.min()}..{tokens.max()} are no text: must be 0..{TEXT_VOCAB - 1}"
        )
    return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
