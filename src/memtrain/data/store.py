"""Prepared data: token streams on disk, written once.

A store is a folder with

- `train.bin` and `test.bin`: tokens as little-endian uint8, uint16 or uint32, the smallest that
  holds the vocabulary, and nothing else;
- `train.starts.npy` and `test.starts.npy`: the start of each document, as int64; absent if all
  documents have the same length;
- `train.labels.npy` and `test.labels.npy`: the class of each document, as uint16; only where the
  source has classes. No training reads them: a model of classes has them as first tokens;
- `tokenizer.json`: only of a text whose tokens are those of a tokenizer;
- `meta.json`: the `StoreMeta`, and a `SplitInfo` per split.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, UInt8, UInt16, UInt32
from numpy.lib.format import open_memmap

from memtrain.data.images import ImageFormat
from memtrain.data.token_file import TokenFile
from memtrain.data.tokenizer import MAX_TOKENIZER_BYTES
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import open_regular, read_bytes

STORE_VERSION = 1
SPLITS = ("train", "test")
MAX_VOCAB = 2**24
"""Of the largest vocabularies in use, one entry per item of a shop, not per word. An embedding of
this many tokens and width 64 has a billion parameters."""
MIN_TOKENS = 2
"""The shortest split: one token to read and one to predict."""
BLOCK = 2**24
"""Tokens are checked and written this many at a time: a memory map need not fit in memory."""
TOKENIZER_FILE = "tokenizer.json"
ADDED_FIELDS = ("classes", "picture.palette", "tokenizer")
"""Fields that older stores do not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMeta:
    """The meaning of a store's tokens."""

    name: str
    vocab_size: int
    source: str
    """Origin of the data, as shown to the user."""
    document_length: int | None = None
    """Tokens in every document; None if documents differ."""
    picture: ImageFormat | None = None
    """The format of images, if documents are images."""
    text: bool = False
    """Whether the tokens are a text: its bytes, or the tokens of a tokenizer."""
    tokenizer: str | None = None
    """The SHA-256 of tokenizer.json, if there is one."""
    separator: int | None = None
    """The token between documents, if there is one."""
    notes: tuple[str, ...] = ()
    """Changes and omissions of the preparation, as shown to the user."""
    classes: tuple[str, ...] = ()
    """The names of the classes, if each image begins with the token of its class; these tokens
    follow those of the images."""

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= MAX_VOCAB:
            raise MemtrainError(f"vocab_size={self.vocab_size}: must be 2..{MAX_VOCAB:,}")
        if self.document_length is not None and self.document_length < 1:
            raise MemtrainError(f"document_length={self.document_length}: must be at least 1")
        if self.separator is not None and not 0 <= self.separator < self.vocab_size:
            raise MemtrainError(f"separator={self.separator}: must be 0..{self.vocab_size - 1}")
        if self.classes and self.picture is None:
            raise MemtrainError("classes: only images have them")
        if self.picture is None:
            return
        length = self.picture.length + bool(self.classes)
        tokens = self.picture.vocab_size + len(self.classes)
        if (length, tokens) != (self.document_length, self.vocab_size):
            raise MemtrainError(
                f"document_length={self.document_length}, vocab_size={self.vocab_size}: "
                f"an image has {length} tokens of {tokens}"
            )

    @property
    def dtype(self) -> np.dtype:
        bits = (self.vocab_size - 1).bit_length()
        return np.dtype("<u1" if bits <= 8 else "<u2" if bits <= 16 else "<u4")

    def to_json(self) -> dict[str, Any]:
        """As plain data; what older stores do not have is left out where it is empty."""
        plain = asdict(self)
        for name in ADDED_FIELDS:
            section, _, key = name.rpartition(".")
            part = plain[section] if section else plain
            if part and not part[key]:
                del part[key]
        return plain


@dataclass(frozen=True, slots=True)
class Split:
    """The tokens of one split, and the starts of its documents unless all have one length."""

    tokens: Integer[np.ndarray, " N"]
    starts: Int64[np.ndarray, " K"] | None = None
    labels: Integer[np.ndarray, " K"] | None = None
    """The class of each document."""
    text_bytes: int | None = None
    """Bytes of the text, without separators; None if it is no text, or unknown."""


Tokens = UInt8[np.ndarray, " N"] | UInt16[np.ndarray, " N"] | UInt32[np.ndarray, " N"]


@dataclass(frozen=True, slots=True)
class LoadedSplit:
    """The tokens of one split, in memory or on disk, and the starts of its documents."""

    tokens: Tokens | TokenFile
    starts: Int64[np.ndarray, " K"]


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """The size and checksum of a split."""

    tokens: int
    documents: int
    sha256: str
    text_bytes: int | None = None
    """Bytes of the text; None if it is no text, and in stores of older versions."""
    alphabet: tuple[int, ...] = ()
    """The bytes that occur, if they are the tokens; empty in stores of earlier versions."""


@dataclass(frozen=True, slots=True)
class Store:
    """A prepared data set."""

    folder: Path
    meta: StoreMeta
    splits: Mapping[str, SplitInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return sum(info.tokens for info in self.splits.values()) * self.meta.dtype.itemsize

    def token_file(self, split: str) -> TokenFile:
        """All tokens of a split, to be read where they are needed."""
        self._check(split)
        path, info = self.folder / f"{split}.bin", self.splits[split]
        return TokenFile(path, self.meta.dtype, info.tokens, self.meta.vocab_size)

    def tokens(self, split: str) -> Tokens:
        """All tokens of a split, as a read-only memory map."""
        self._check(split)
        path = self.folder / f"{split}.bin"
        open_regular(path).close()
        return np.memmap(path, self.meta.dtype, "r")

    def starts(self, split: str) -> Int64[np.ndarray, " K"]:
        """The start of each document."""
        self._check(split)
        if self.meta.document_length is not None:
            return np.arange(0, self.splits[split].tokens, self.meta.document_length)
        return open_array(self.folder / f"{split}.starts.npy")

    def labels(self, split: str) -> UInt16[np.ndarray, " K"]:
        """The class of each document.

        Raises:
            MemtrainError: the store has none, or they are damaged.
        """
        self._check(split)
        name = f"{split}.labels.npy"
        try:
            labels = open_array(self.folder / name)
        except FileNotFoundError:
            raise MemtrainError(
                f"{self.folder}: has no labels ({name}); prepare it again with --overwrite, from "
                "a source that has classes"
            ) from None
        except (OSError, ValueError):
            labels = np.zeros(0)
        if labels.dtype != np.uint16 or labels.shape != (self.splits[split].documents,):
            raise MemtrainError(
                f"{self.folder}: {name} is not what was written; remove the store and prepare it "
                "again"
            )
        return np.array(labels)

    def tokenizer(self) -> str:
        """The tokenizer.json of the text; "" if its tokens are bytes."""
        if self.meta.tokenizer is None:
            return ""
        raw = read_bytes(self.folder / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
        if hashlib.sha256(raw).hexdigest() != self.meta.tokenizer:
            raise MemtrainError(f"{TOKENIZER_FILE} is not what was written (checksum)")
        return raw.decode()

    def _check(self, split: str) -> None:
        if split not in self.splits:
            raise MemtrainError(f"split={split!r}: {did_you_mean(split, self.splits)}")


def open_array(path: Path) -> np.ndarray:
    """Memory-map a .npy file; it is never unpickled.

    Raises:
        ValueError: it is not one, cut short, or not a regular file.
        OSError: it cannot be read.
    """
    try:
        open_regular(path).close()  # a named pipe would block
    except MemtrainError:
        raise ValueError("is not a regular file") from None
    try:
        return open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header as Python source
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"not a .npy file of numbers, or cut short ({reason})") from None


def are_starts(starts: np.ndarray, tokens: int) -> bool:
    """Whether these can be the document starts of a split with this many tokens."""
    shaped = starts.dtype == np.int64 and starts.ndim == 1 and len(starts) > 0
    return bool(
        shaped and starts[0] == 0 and starts[-1] < tokens and (starts[1:] > starts[:-1]).all()
    )


def alphabet_of(tokens: Iterable[Integer[np.ndarray, " block"]]) -> tuple[int, ...]:
    """The different tokens in some blocks, in order."""
    seen = np.zeros(0, np.bool_)
    for block in tokens:
        if len(seen) <= (highest := int(block.max(initial=0))):
            seen = np.append(seen, np.zeros(highest + 1 - len(seen), np.bool_))
        seen[block] = True
    return tuple(np.flatnonzero(seen).tolist())


def blocks(tokens: Integer[np.ndarray, " N"] | TokenFile) -> Iterator[Tokens]:
    """Iterate over the tokens in blocks."""
    for first in range(0, len(tokens), BLOCK):
        yield tokens[first : first + BLOCK]


def check_tokens(block: Integer[np.ndarray, " N"], meta: StoreMeta, name: str) -> None:
    """Refuse tokens outside the vocabulary."""
    low, high = int(block.min()), int(block.max())
    if low < 0 or high >= meta.vocab_size:
        raise MemtrainError(
            f"{meta.name}: {name} holds the token {low if low < 0 else high}, outside the "
            f"vocabulary 0..{meta.vocab_size - 1}"
        )


def require_tokens(store: Store, split: str, needed: int) -> None:
    """Refuse a split that is too short."""
    found = store.splits[split].tokens
    if found < needed:
        hold = "" if split == "train" else ", hold out more of it (--option held_out 0.2)"
        problem = (
            f"{store.folder}: {split} holds {found:,} tokens, at least {needed:,} are needed; "
        )
        problem += f"prepare more data{hold}, or take shorter sequences"
        raise MemtrainError(
            f"{problem} (data.evaluate_length)",
            f"{problem} (eval --length, --data.evaluate-length)",
        )


def identity_of(splits: Mapping[str, SplitInfo]) -> str:
    """Identify a store's tokens by a checksum of their checksums."""
    sums = " ".join(f"{name} {splits[name].sha256}" for name in SPLITS)
    return hashlib.sha256(sums.encode()).hexdigest()[:32]
