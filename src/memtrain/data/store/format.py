"""What a store holds, and the rules that writer and reader both check."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer, UInt8, UInt16
from numpy.lib.format import open_memmap

from memtrain.data.images import ImageFormat
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import open_regular

STORE_VERSION = 1
SPLITS = ("train", "test")
MAX_VOCAB = 2**16
MIN_TOKENS = 2
"""The shortest split: one token to read and one to predict."""
BLOCK = 2**24
"""Tokens are checked and written this many at a time: a memory map need not fit in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMeta:
    """What the tokens of a store are."""

    name: str
    vocab_size: int
    source: str
    """Where the data came from, for a person."""
    document_length: int | None = None
    """Tokens in every document; None if documents differ."""
    picture: ImageFormat | None = None
    """How a document spells a picture, if it does."""
    text: bool = False
    """Whether the tokens are the bytes of a text."""
    separator: int | None = None
    """The token between documents, if there is one."""
    notes: tuple[str, ...] = ()
    """What preparing changed or left out, with counts, for a person."""

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= MAX_VOCAB:
            raise MemtrainError(f"vocab_size={self.vocab_size}: must be 2..{MAX_VOCAB:,}")
        if self.document_length is not None and self.document_length < 1:
            raise MemtrainError(f"document_length={self.document_length}: must be at least 1")
        if self.separator is not None and not 0 <= self.separator < self.vocab_size:
            raise MemtrainError(f"separator={self.separator}: must be 0..{self.vocab_size - 1}")
        spelled = self.picture and (self.picture.length, self.picture.vocab_size)
        if spelled and spelled != (self.document_length, self.vocab_size):
            raise MemtrainError(
                f"document_length={self.document_length}, vocab_size={self.vocab_size}: "
                f"the picture has {spelled[0]} tokens of {spelled[1]}"
            )

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u1" if self.vocab_size <= 256 else "<u2")


@dataclass(frozen=True, slots=True)
class Split:
    """The tokens of one split, and where its documents start unless all have one length."""

    tokens: Integer[np.ndarray, " N"]
    starts: Int64[np.ndarray, " K"] | None = None


@dataclass(frozen=True, slots=True)
class LoadedSplit:
    """The tokens of one split and where its documents start, both in memory."""

    tokens: UInt8[np.ndarray, " N"] | UInt16[np.ndarray, " N"]
    starts: Int64[np.ndarray, " K"]


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """What is known of a split without reading it."""

    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Store:
    """A prepared data set."""

    folder: Path
    meta: StoreMeta
    splits: Mapping[str, SplitInfo]

    def tokens(self, split: str) -> UInt8[np.ndarray, " N"] | UInt16[np.ndarray, " N"]:
        """All tokens of a split, a read-only map of the file."""
        self._check(split)
        path = self.folder / f"{split}.bin"
        open_regular(path).close()
        return np.memmap(path, self.meta.dtype, "r")

    def starts(self, split: str) -> Int64[np.ndarray, " K"]:
        """Where each document starts."""
        self._check(split)
        if self.meta.document_length is not None:
            return np.arange(0, self.splits[split].tokens, self.meta.document_length)
        return open_array(self.folder / f"{split}.starts.npy")

    def _check(self, split: str) -> None:
        if split not in self.splits:
            raise MemtrainError(f"split={split!r}: {did_you_mean(split, self.splits)}")


def open_array(path: Path) -> np.ndarray:
    """A .npy file, mapped: it need not fit in memory, and is never unpickled.

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
    except Exception as error:  # numpy reads the header as Python source, which fails in many ways
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"not a .npy file of numbers, or cut short ({reason})") from None


def identity_of(splits: Mapping[str, SplitInfo]) -> str:
    """By which a store's tokens are told from others: a checksum of its checksums."""
    told = " ".join(f"{name} {splits[name].sha256}" for name in SPLITS)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def require_tokens(store: Store, split: str, needed: int) -> None:
    """Refuse a split that is too short, saying how many tokens are needed."""
    found = store.splits[split].tokens
    if found < needed:
        hold = "" if split == "train" else ", hold out more of it (--option held_out 0.2)"
        raise MemtrainError(
            f"{store.folder}: {split} holds {found:,} tokens, at least {needed:,} are needed; "
            f"prepare more data{hold}, or take shorter sequences (eval --length, "
            "--data.evaluate-length)"
        )


def are_starts(starts: np.ndarray, tokens: int) -> bool:
    """Whether the documents of a split with this many tokens may start there."""
    shaped = starts.dtype == np.int64 and starts.ndim == 1 and len(starts) > 0
    return bool(
        shaped and starts[0] == 0 and starts[-1] < tokens and (starts[1:] > starts[:-1]).all()
    )


def blocks(tokens: Integer[np.ndarray, " N"]) -> Iterator[Integer[np.ndarray, " block"]]:
    """The tokens, one block after another."""
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
