"""What is learned: the synthetic tasks, the digits, a prepared data set, a task of the user's."""

from dataclasses import dataclass, field
from typing import Literal

from memtrain.config.validation import CUSTOM_PATH, at_least, at_most, check_bounds, check_fraction
from memtrain.errors import MemtrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrieval:
    """Remember the token that follows the marker 0 and say it when the last 0 asks (gradients)."""

    kind: Literal["retrieval"] = "retrieval"
    sequence_length: int = 32
    """Tokens in a sequence."""
    vocab_size: int = 9
    """Symbols, the marker 0 among them."""
    noise: float = 0.0
    """Probability that the label is replaced by a random symbol."""
    needle_within: float = 1.0
    """The marker stands in this first share of the sequence, anywhere in it (1: the whole
    sequence; the paper's authors: 0.5)."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 3, "sequence_length", hint="a marker, its token and the query")
        at_least(self, 3, "vocab_size", hint="the marker and two symbols to tell apart")
        check_fraction(self, "noise", "needle_within")


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Read a string, then say it backwards while reading zeros (memory capacity)."""

    kind: Literal["copy"] = "copy"
    sequence_length: int = 16
    """Tokens in a sequence: half of them are the string."""
    vocab_size: int = 8
    """Symbols, the delimiter 0 among them."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 2, "sequence_length", hint="one token and its answer")
        if self.sequence_length % 2:
            raise MemtrainError(
                f"sequence_length={self.sequence_length}: must be even, half of it is the string"
            )
        at_least(self, 3, "vocab_size", hint="the delimiter and two symbols to tell apart")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Push what is read; 0 pops, and the popped symbol is the target (state tracking)."""

    kind: Literal["stack"] = "stack"
    sequence_length: int = 16
    """Operations in a sequence."""
    vocab_size: int = 8
    """Symbols, the pop 0 among them."""
    depth: int = 4
    """The stack never grows beyond this depth."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 2, "sequence_length", hint="a push and a pop")
        at_least(self, 3, "vocab_size", hint="the pop and two symbols to tell apart")
        at_least(self, 1, "depth")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall:
    """Read key-value pairs, then a key, and say its value (associative recall).

    Keys and values are strings over alphabets of their own; 0 is the blank that is read while a
    value of several symbols is said. Keys of one sequence are distinct.
    """

    kind: Literal["recall"] = "recall"
    pairs: int = 4
    """Associations in a sequence."""
    key_length: int = 1
    """Symbols in a key."""
    value_length: int = 1
    """Symbols in a value."""
    key_symbols: int = 8
    """Size of the keys' alphabet."""
    value_symbols: int = 8
    """Size of the values' alphabet."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 1, "pairs", "key_length", "value_length")
        at_least(self, 2, "key_symbols", "value_symbols", hint="something to tell apart")
        keys = self.key_symbols**self.key_length
        at_most(self, "pairs", keys, f"that is how many keys {self.key_symbols} symbols can spell")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Infer y = (a x + b) mod V from examples and say y for the next x (in-context learning)."""

    kind: Literal["arithmetic"] = "arithmetic"
    vocab_size: int = 11
    """The modulus V; inputs and answers are 0..V-1."""
    examples: int = 8
    """Pairs (x, y) in a sequence."""
    difficulty: int = 11
    """a and b are drawn from 0..difficulty-1, once a sequence."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 2, "vocab_size")
        at_least(self, 1, "examples", "difficulty")
        at_most(self, "difficulty", self.vocab_size, "larger rules repeat smaller ones modulo V")


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, 8x8 pixels of 17 grey levels in raster order.

    A sequence is a start token followed by the first 63 pixels; its targets are the 64 pixels.
    """

    kind: Literal["digits"] = "digits"
    held_out: float = 0.15
    """Share of the images kept for evaluation."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not 0 < self.held_out < 1:
            raise MemtrainError(
                f"held_out={self.held_out}: must lie between 0 and 1, both excluded"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Custom:
    """A task of yours: a class with `vocab_size`, `sequence_length` and `sample`."""

    kind: Literal["custom"] = "custom"
    path: str = "my_task:MyTask"
    """Where the class is, as package.module:Class. The current folder is searched too."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Keyword arguments of the class."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not CUSTOM_PATH.fullmatch(self.path):
            raise MemtrainError(f"path={self.path!r}: must look like package.module:Class")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A prepared data set: one long sequence of tokens, of which windows are drawn."""

    kind: Literal["stream"] = "stream"
    path: str = ""
    """Folder that `memtrain data NAME` prepared."""
    evaluate_length: int = 1024
    """Tokens in a held-out sequence. Those of documents start where a document starts."""
    cross_documents: bool = True
    """Training windows may reach from one document into the next, as in the paper; off: only
    documents that hold a whole window are trained on."""
    document_starts: float = 0.5
    """Of the training windows that are read from nothing, the share that begins where a document
    does. Evaluation and generation begin there."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 2, "evaluate_length")
        check_fraction(self, "document_starts")


DataConfig = Retrieval | Copy | Stack | Recall | Arithmetic | Digits | Stream | Custom
