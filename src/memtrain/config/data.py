"""The data: synthetic tasks, 8x8 digits, a prepared data set, or a user's task."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from memtrain.config.validation import (
    CUSTOM_PATH,
    Bounds,
    Checked,
    Fraction,
    Options,
)
from memtrain.errors import MemtrainError

Vocabulary = Annotated[int, Bounds(3, 2**20, hint="0 and two symbols to tell apart")]
Count = Annotated[int, Bounds(1, 2**20)]
Alphabet = Annotated[int, Bounds(2, 2**16, hint="something to tell apart")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrieval(Checked):
    """Output at the last 0 the token after a 0 in the first half (long-range gradients)."""

    kind: Literal["retrieval"] = "retrieval"
    sequence_length: Annotated[int, Bounds(3, 2**24, hint="a marker, its token and the query")] = 32
    """Tokens per sequence."""
    vocab_size: Vocabulary = 9
    """Symbols, including the marker 0."""
    noise: Fraction = 0.0
    """Probability that the label is replaced by a random symbol."""
    needle_within: Fraction = 0.5
    """The marker is placed in this first part of the sequence: the first half, as the paper's
    authors have it. 1: anywhere, which is easier, since some tokens are then needed soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy(Checked):
    """Read a string, then output it backwards while reading zeros (memory capacity)."""

    kind: Literal["copy"] = "copy"
    sequence_length: Annotated[
        int, Bounds(2, 2**24, hint="one token and its answer", even="half of it is the string")
    ] = 16
    """Tokens per sequence: half of them are the string."""
    vocab_size: Vocabulary = 8
    """Symbols, including the delimiter 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack(Checked):
    """Push every symbol read; 0 pops, and the popped symbol is the target (state tracking)."""

    kind: Literal["stack"] = "stack"
    sequence_length: Annotated[int, Bounds(2, 2**24, hint="a push and a pop")] = 16
    """Operations per sequence."""
    vocab_size: Vocabulary = 8
    """Symbols, including the pop 0."""
    depth: Count = 4
    """Largest depth of the stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall(Checked):
    """Read key-value pairs, then a key, and output its value (associative recall).

    Keys and values are strings over separate alphabets, and the keys of a sequence are distinct;
    the blank 0 is read while the rest of a longer value is output.
    """

    kind: Literal["recall"] = "recall"
    pairs: Count = 4
    """Key-value pairs per sequence."""
    key_length: Annotated[int, Bounds(1, 4096)] = 1
    """Symbols per key."""
    value_length: Count = 1
    """Symbols per value."""
    key_symbols: Alphabet = 8
    """Size of the keys' alphabet."""
    value_symbols: Alphabet = 8
    """Size of the values' alphabet."""

    def check(self) -> None:
        keys = self.key_symbols**self.key_length
        if self.pairs > keys:
            raise MemtrainError(
                f"pairs={self.pairs}: must be at most {keys}, the number of distinct keys over "
                f"{self.key_symbols} symbols"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic(Checked):
    """Infer y = (a x + b) mod V from examples and output y for the next x (in-context learning)."""

    kind: Literal["arithmetic"] = "arithmetic"
    vocab_size: Annotated[int, Bounds(2, 2**20)] = 11
    """The modulus V; inputs and answers are 0..V-1."""
    examples: Count = 8
    """Pairs (x, y) per sequence."""
    difficulty: Annotated[int, Bounds(1)] = 11
    """a and b are drawn from 0..difficulty-1, once per sequence."""

    def check(self) -> None:
        if self.difficulty > self.vocab_size:
            raise MemtrainError(
                f"difficulty={self.difficulty}: must be at most {self.vocab_size}, larger rules "
                "repeat smaller ones modulo V"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity(Checked):
    """Output whether the number of ones read so far is odd (state tracking, two states)."""

    kind: Literal["parity"] = "parity"
    sequence_length: Annotated[int, Bounds(1, 2**24)] = 16
    """Bits per sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class S5(Checked):
    """Output the order of five items after every swap or rotation (state tracking, 120 states).

    The word problem of the symmetric group S5 over two generators: 0 swaps the first two items, 1
    moves the first item to the end. The target is the number of the resulting order, 0..119.
    """

    kind: Literal["s5"] = "s5"
    sequence_length: Annotated[int, Bounds(1, 2**24)] = 12
    """Operations per sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits(Checked):
    """scikit-learn's 1,797 handwritten digits, 8x8 pixels of 17 grey levels in raster order.

    A sequence is a start token followed by the first 63 pixels; its targets are the 64 pixels.
    """

    kind: Literal["digits"] = "digits"
    held_out: float = 0.15
    """Fraction of the images held out for evaluation."""

    def check(self) -> None:
        if not 0 < self.held_out < 1:
            raise MemtrainError(
                f"held_out={self.held_out}: must lie between 0 and 1, both excluded"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Custom(Checked):
    """Your own task: a class with `vocab_size`, `sequence_length` and `sample`."""

    kind: Literal["custom"] = "custom"
    path: str = "my_task:MyTask"
    """The class, as package.module:Class. The current folder is searched too."""
    options: Options = field(default_factory=dict)
    """Keyword arguments of the class."""

    def check(self) -> None:
        if not CUSTOM_PATH.fullmatch(self.path):
            raise MemtrainError(f"path={self.path!r}: must look like package.module:Class")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream(Checked):
    """A prepared data set: one long sequence of tokens from which windows are drawn."""

    kind: Literal["stream"] = "stream"
    path: str = ""
    """Folder that `memtrain data NAME` prepared."""
    evaluate_length: Annotated[int, Bounds(2, 2**24)] = 1024
    """Tokens per held-out sequence. In data made of documents, each starts with a document."""
    cross_documents: bool = True
    """Training windows may cross from one document into the next, as in the paper; off: only
    documents that hold a whole window are trained on."""
    document_starts: Fraction = 0.5
    """Of the training windows that start from the empty memory, the fraction that starts where a
    document does, as evaluation and generation do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelFile(Checked):
    """Sequences with a memory for every step, from a teacher or an oracle; no teacher is needed."""

    kind: Literal["labels"] = "labels"
    path: str = ""
    """File that `memtrain label RUN` or `memtrain.Labels.save` wrote."""


DataConfig = (
    Retrieval
    | Copy
    | Stack
    | Recall
    | Arithmetic
    | Parity
    | S5
    | Digits
    | Stream
    | LabelFile
    | Custom
)
