"""The data: synthetic tasks, 8x8 digits, a prepared data set, a series, or a user's task."""

import csv
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
class ModularArithmetic(Checked):
    """Output the value of an expression modulo m after every operation (state tracking, m states).

    A token is an operation and its number, +0..+(m-1), then those of the next operation; the
    expression begins at 0 and is evaluated from left to right. With `operations` + it is a running
    sum, and with modulus 2 parity. A product with 0 forgets all that was before.
    """

    kind: Literal["modular-arithmetic"] = "modular-arithmetic"
    sequence_length: Annotated[int, Bounds(1, 2**24)] = 16
    """Operations per sequence."""
    modulus: Annotated[int, Bounds(2, 2**16, hint="something to tell apart")] = 5
    """The modulus m; values and numbers are 0..m-1."""
    operations: str = "+-*"
    """Those that occur, equally often, of + - and *."""

    def check(self) -> None:
        known = set(self.operations) <= set("+-*")
        if not self.operations or not known or len(set(self.operations)) < len(self.operations):
            raise MemtrainError(
                f"operations={self.operations!r}: must be some of +, - and *, each at most once, "
                "such as +-*"
            )


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
    resident: Literal["auto", "device", "disk"] = "auto"
    """Where the tokens are during training, with the same batches: on the model's device, or on
    disk, from where each batch is read while the step before is computed. auto: on a GPU up to 1/4
    of its free memory; on a CPU up to 1 GiB, and 1/16 of the free memory; else on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelFile(Checked):
    """Sequences with a memory for every step, from a teacher or an oracle; no teacher is needed."""

    kind: Literal["labels"] = "labels"
    path: str = ""
    """File that `memtrain label RUN` or `memtrain.Labels.save` wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series(Checked):
    """Numbers over time from a CSV, parquet or .npy file: forecasts, control, sensor data.

    Columns of a .npy are called 0, 1, ...; those of shape (N, T, F) are N series.
    """

    kind: Literal["series"] = "series"
    path: str = ""
    """The file; a CSV has a header."""
    targets: str = ""
    """Columns to predict, separated by commas (default: all that have no other role)."""
    known: str = ""
    """Columns that are known beforehand, separated by commas: prices, holidays, actions."""
    time: str = ""
    """Column with the time of each row, a number or an ISO date; rows must be in its order."""
    series: str = ""
    """Column that tells series apart, where a file holds several, one row per series and time."""
    season: Annotated[int, Bounds(0, 2**20)] = 0
    """Steps per season, such as 24 of hourly data, for the seasonal-naive forecast (0: none)."""
    window: Annotated[int, Bounds(2, 2**20, hint="something to read and to predict")] = 64
    """Steps read per training sequence; it takes one row more, the last target."""
    held_out: float = 0.2
    """Fraction of the rows, at the end of each series, held out for evaluation."""
    likelihood: Literal["gaussian", "student-t", "quantile"] = "gaussian"
    """The predicted distribution of each number: normal, Student's t (heavy tails), or quantiles
    (any shape; the loss is then the pinball loss)."""
    time_gap: bool = False
    """Tell the model the time to the next row, as its logarithm relative to the median: for
    irregular time steps."""

    def check(self) -> None:
        if not 0 < self.held_out < 1:
            raise MemtrainError(
                f"held_out={self.held_out}: must lie between 0 and 1, both excluded"
            )
        if self.time_gap and not self.time:
            raise MemtrainError("time_gap=True: needs the times; name their column with time")
        named = {"targets": columns_of(self.targets), "known": columns_of(self.known)}
        named |= {role: (name,) for role in ("time", "series") if (name := getattr(self, role))}
        roles: dict[str, str] = {}
        for role, name in ((role, name) for role, names in named.items() for name in names):
            value = getattr(self, role)
            if not name:
                raise MemtrainError(f"{role}={value!r}: has an empty name; write a,b,c")
            if name in roles:
                where = "named twice" if roles[name] == role else f"of {roles[name]} too"
                raise MemtrainError(f"{role}={value!r}: {name} is {where}; leave one out")
            roles[name] = role


def columns_of(names: str) -> tuple[str, ...]:
    """The columns that a field names; a name with a comma stands in quotes."""
    found = next(csv.reader([names], skipinitialspace=True), [])
    return tuple(name.strip() for name in found)


DataConfig = (
    Retrieval
    | Copy
    | Stack
    | Recall
    | Arithmetic
    | Parity
    | ModularArithmetic
    | S5
    | Digits
    | Stream
    | LabelFile
    | Series
    | Custom
)
