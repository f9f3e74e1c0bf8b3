"""N-gram baselines: predict a token from the last few tokens, or a pixel from those around it.

They measure how much of the data is easy. A model of order k uses the nearest k neighbours:

    p_k(y | c) = (n(c, y) + a p_(k-1)(y | c')) / (n(c) + a)

where c' omits the farthest of them and p_(-1) is uniform. The counts n are of the training
stream; the strength a of each order is the best of a few on the held-out targets themselves,
which flatters these models.

Only contexts that occur in the held-out targets are counted, so memory use depends on their number
and not on the vocabulary. A context is one number, written in base V + 1, or a hash of it where
that does not fit in 64 bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.data.task import Corpus
from memtrain.shapes import IGNORE_INDEX

STRENGTHS = (0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
"""The candidates for a."""
EXACT = 2**62
"""Contexts below this number are exact, others are hashed."""
MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's, of MMIX: odd, with well mixed bits
BLOCK = 2**18
"""Training tokens counted at a time."""
TABLE = 2**23
"""The largest table of contexts; beyond it they are found by binary search."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The loss of an n-gram model, or of a naive forecast, on the held-out targets."""

    name: str
    nats: float
    """In what `Evaluation.loss_name` names."""
    bits: float | None
    fitted_tokens: int
    """Training tokens that were counted, or numbers whose errors gave a forecast's deviation."""
    mse: float | None = None
    """Of numbers, in the model's units; as is `crps`."""
    crps: float | None = None
    bits_per_byte: float | None = None
    """Of a text, on the same targets as the networks'."""
    training_tokens: int | None = None
    """Training tokens that there are, of which `fitted_tokens` were counted, evenly spread."""


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """An offset from the target: rows down and columns right; in a stream columns only."""

    down: int
    right: int


AROUND = (_Neighbour(0, -1), _Neighbour(-1, 0), _Neighbour(-1, 1), _Neighbour(-1, -1))
BEFORE = (_Neighbour(0, -1), _Neighbour(0, -2), _Neighbour(0, -3))


def count_baselines(
    corpus: Corpus,
    sequences: Int[Tensor, "B L"],
    targets: Int[Tensor, "B L"],
    limit: int | None = None,
) -> list[Baseline]:
    """Score n-gram models on a model's targets.

    Args:
        corpus: the training data to count.
        sequences: held-out data from the beginnings of documents, every token.
        targets: the same where there is a target, IGNORE_INDEX elsewhere.
        limit: count at most about this many training tokens, evenly spread.
    """
    neighbours = AROUND if corpus.width else BEFORE
    valid = targets != IGNORE_INDEX
    truth = targets[valid]
    keys = [key[valid] for key in _keys(corpus, sequences, 0, neighbours)]
    orders = [_Order(key, truth, corpus.vocab_size) for key in keys]
    fitted = 0
    for tokens, place, skip in _blocks(corpus, neighbours, limit):
        after = tokens[0, skip:]
        fitted += len(after)
        for order, key in zip(orders, _keys(corpus, tokens, place, neighbours), strict=True):
            order.count(key[0, skip:], after)
    probability = torch.full_like(truth, 1 / corpus.vocab_size, dtype=torch.float64)
    losses = []
    for order in orders:
        probability, nats = order.predict(probability)
        losses.append(nats)
    farthest = "left and three above" if corpus.width else "previous three"
    first = f"previous {corpus.unit}"
    named = {"order 0": losses[0], first: losses[1], farthest: losses[-1]}
    return [
        Baseline(
            f"counts, {name}",
            nats,
            nats / math.log(2),
            fitted,
            training_tokens=len(corpus.tokens),
        )
        for name, nats in named.items()
    ]


class _Order:
    """The counts of one order, for the contexts and pairs of the held-out targets."""

    def __init__(self, keys: Int[Tensor, " N"], truth: Int[Tensor, " N"], vocab: int) -> None:
        self.vocab = vocab
        contexts, self.context = keys.unique(return_inverse=True)
        pairs, self.pair = (self.context * vocab + truth).unique(return_inverse=True)
        self.contexts = _Index(contexts)
        self.pairs = _Index(pairs)

    def count(self, keys: Int[Tensor, " N"], tokens: Int[Tensor, " N"]) -> None:
        """Count a block of training tokens."""
        context = self.contexts.count(keys)
        pair = (context * self.vocab + tokens).where(context >= 0, -1)
        self.pairs.count(pair)

    def predict(self, lower: Float[Tensor, " N"]) -> tuple[Float[Tensor, " N"], float]:
        """Probabilities of the held-out targets, given those of the order below, and their loss."""
        seen, right = self.contexts.counts[self.context], self.pairs.counts[self.pair]
        tried = [(right + strength * lower) / (seen + strength) for strength in STRENGTHS]
        losses = [float(-probability.log().mean()) for probability in tried]
        best = min(range(len(tried)), key=losses.__getitem__)
        return tried[best], losses[best]


class _Index:
    """Counts of some sorted numbers."""

    def __init__(self, known: Int[Tensor, " K"]) -> None:
        self.known = known
        self._counts = known.new_zeros(len(known) + 1)  # the last one counts all other numbers
        self.table: Tensor | None = None
        last = int(known[-1])
        if int(known[0]) >= 0 and last < TABLE:
            self.table = known.new_full((last + 2,), len(known))
            self.table[known] = torch.arange(len(known), device=known.device)

    def count(self, numbers: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        """Count numbers; returns the index of each among the known ones, else -1."""
        if self.table is not None:
            # -1 and numbers that are too large hit the table's last entry.
            place = self.table[numbers.clamp(max=len(self.table) - 1)]
        else:
            place = torch.searchsorted(self.known, numbers).clamp(max=len(self.known) - 1)
            place = place.where(self.known[place] == numbers, len(self.known))
        self._counts += torch.bincount(place, minlength=len(self._counts))
        return place.where(place < len(self.known), -1)

    @property
    def counts(self) -> Int[Tensor, " K"]:
        return self._counts[:-1]


def _keys(
    corpus: Corpus, tokens: Int[Tensor, "B L"], place: int, neighbours: tuple[_Neighbour, ...]
) -> Iterator[Int[Tensor, "B L"]]:
    """Keys of the contexts of every token: of none, one, two ... neighbours.

    Positions before the tokens, or outside of the image, count as a token of their own.
    """
    base = corpus.vocab_size + 1
    if base ** len(neighbours) >= EXACT:
        base = MULTIPLIER
    key = torch.zeros_like(tokens)
    yield key
    length, width = tokens.shape[1], corpus.width
    places = torch.arange(place, place + length, device=tokens.device)
    for neighbour in neighbours:
        back = -neighbour.down * (width or 0) - neighbour.right
        found = torch.nn.functional.pad(tokens, (back, 0), value=-1)[:, :length]
        if width:
            column = places % width + neighbour.right
            inside = (column >= 0) & (column < width)
            if neighbour.down:
                inside &= places % (corpus.document_length or 1) >= width
            found = found.where(inside, -1)
        key = key * base + found + 1
        yield key


def _blocks(
    corpus: Corpus, neighbours: tuple[_Neighbour, ...], limit: int | None
) -> Iterator[tuple[Int[Tensor, "1 L"], int, int]]:
    """Blocks of training tokens, the start of each, and how many of its tokens are only context."""
    total = len(corpus.tokens)
    lead = max(-n.down * (corpus.width or 0) - n.right for n in neighbours)
    firsts = list(range(0, total, BLOCK))
    if limit is not None and limit < total:
        count = max(1, limit // BLOCK)
        firsts = [firsts[round(i * (len(firsts) - 1) / max(1, count - 1))] for i in range(count)]
    for first in dict.fromkeys(firsts):
        begin = max(0, first - lead)
        yield corpus.block(begin, first + BLOCK)[None], begin, first - begin
