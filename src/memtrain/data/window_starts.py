"""Where the windows of a batch start: anywhere, or where documents do, no two at one place."""

import numpy as np
import torch
from jaxtyping import Int, Int64, Integer
from torch import Tensor

from memtrain.data.token_file import TokenFile
from memtrain.errors import MemtrainError

LONG_DOCUMENT = 2**14
"""Documents of more tokens than this on average are books rather than stories or images."""
FEW_DOCUMENTS = 2**10
"""With fewer long documents than this, their starts would be sampled too often."""
SEARCHED, STRETCH = 2**28, 2**20
"""Lines are found in this many tokens at most: in evenly spread stretches of a longer text."""


class WindowSampler:
    """Samples distinct starts of windows; only a batch of more windows than exist has repeats.

    Windows that must not cross documents lie inside documents that are long enough. All possible
    starts are numbered consecutively and sampled by number, without a decision on the host, so
    sampling can be captured in a CUDA graph.

    Args:
        starts: the start of each document, 0 first.
        tokens: length of the stream.
        size: tokens in a window.
        cross_documents: whether a window may reach from one document into the next.
        device: of the offsets; random numbers are drawn on the generator's.
        begins: offsets for windows that begin documents, in order; the starts by default. Those
            without room for a window are left out.
    """

    def __init__(
        self,
        starts: Int64[np.ndarray, " K"],
        tokens: int,
        size: int,
        cross_documents: bool,
        device: torch.device,
        begins: Int64[np.ndarray, " N"] | None = None,
    ) -> None:
        starts = np.asarray(starts)
        if cross_documents:
            first, room = np.zeros(1, np.int64), np.array([tokens - size + 1])
        else:
            lengths = np.diff(starts, append=tokens)
            first, room = starts[lengths >= size], lengths[lengths >= size] - size + 1
            if not len(first):
                raise MemtrainError(
                    f"cross_documents=False: no document holds a window of {size:,} tokens, the "
                    f"longest has {int(lengths.max()):,}; shorten the windows (context_length, "
                    "future_length, rollout_length, sequence_length) or let them cross"
                )
        ends = room.cumsum()
        before = ends - room
        begins = starts if begins is None else np.asarray(begins)
        if cross_documents:  # a view: there may be hundreds of millions of documents
            begins = begins[: np.searchsorted(begins, room[0])]
        else:
            document = np.searchsorted(first, begins, side="right") - 1
            into = begins - first[document]
            fits = (document >= 0) & (into < room[document])
            begins = (before[document] + into)[fits]
        self.places = int(ends[-1])
        """The number of possible starts."""
        self._begins = torch.from_numpy(begins).to(device)
        self._first = torch.from_numpy(first).to(device)
        self._ends = torch.from_numpy(ends).to(device)
        self._before = torch.from_numpy(before).to(device)

    def draw(
        self, count: int, generator: torch.Generator, document_rows: int = 0
    ) -> Int[Tensor, " count"]:
        """Sample the offsets of a batch.

        Args:
            count: the number of windows.
            generator: the only source of randomness.
            document_rows: the number of windows, the first ones, that begin documents; at most as
                many as there are. All others are uniform over all places.
        """
        rounds = []
        while count > self.places:  # every place once, then again
            rounds.append(self._draw_distinct(self.places, generator, document_rows))
            count, document_rows = count - self.places, 0
        rounds.append(self._draw_distinct(count, generator, document_rows))
        place = torch.cat(rounds)
        document = torch.searchsorted(self._ends, place, right=True)
        return self._first[document] + place - self._before[document]

    def _draw_distinct(
        self, count: int, generator: torch.Generator, document_rows: int
    ) -> Int[Tensor, " B"]:
        place = self._uniform(self.places, count, generator)
        document_rows = min(document_rows, count, len(self._begins))
        if not document_rows:
            return make_distinct(place, self.places)
        chosen = self._uniform(len(self._begins), document_rows, generator)
        taken = self._begins[make_distinct(chosen, len(self._begins))]
        if document_rows == count:
            return taken
        return torch.cat([taken, make_distinct_from(place[document_rows:], taken, self.places)])

    def _uniform(self, below: int, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
        drawn = torch.randint(below, (count,), generator=generator, device=generator.device)
        return drawn.to(self._ends.device)


def make_distinct(drawn: Int[Tensor, " B"], size: int) -> Int[Tensor, " B"]:
    """Turn uniform samples below `size` into distinct ones; there must be enough numbers.

    A repeated number moves up to the next free one, and from the last to the first. Distinct
    samples stay. The numbers form a ring, so each remains equally likely.
    """
    ordered, row = drawn.sort(stable=True)
    # Go around the ring twice: the second lap knows the numbers pushed past the end in the first.
    index = torch.arange(2 * len(drawn), device=drawn.device)
    twice = torch.cat([ordered, ordered + size])
    moved = (twice - index).cummax(dim=0).values + index  # strictly increasing
    return torch.empty_like(drawn).scatter_(0, row, moved[len(drawn) :] % size)


def make_distinct_from(
    drawn: Int[Tensor, " B"], taken: Int[Tensor, " S"], size: int
) -> Int[Tensor, " B"]:
    """Make samples below `size` distinct from each other and from the distinct `taken`."""
    taken = taken.sort().values
    free = size - len(taken)
    # Number the free places consecutively, make distinct, and convert back.
    place = make_distinct((drawn - torch.searchsorted(taken, drawn)) % free, free)
    skipped = taken - torch.arange(len(taken), device=taken.device)
    return place + torch.searchsorted(skipped, place, right=True)


def has_few_long_documents(starts: Int64[np.ndarray, " K"], tokens: int) -> bool:
    """Whether a stream is a single document, or a few long ones.

    Their starts are not sampled specially: each would come up thousands of times as often as any
    other place, and the model would memorize them.
    """
    return len(starts) == 1 or (
        len(starts) < FEW_DOCUMENTS and tokens > LONG_DOCUMENT * len(starts)
    )


def document_begins(
    starts: Int64[np.ndarray, " K"],
    tokens: Integer[Tensor, " N"] | TokenFile,
    rows: int,
    *,
    newline: int | None,
    images: bool,
) -> Int64[np.ndarray, " M"]:
    """The offsets of windows that begin documents.

    These are the starts of documents if there are enough of them for the rows of a batch. If not,
    or if the documents are few and long, any line of a text counts, with the line end before it:
    that is where generation starts. A long stream without lines has none, so its windows begin
    anywhere. Images always begin at their starts. In texts of more than SEARCHED tokens some lines
    are left out.
    """
    long = not images and has_few_long_documents(starts, len(tokens))
    if len(starts) >= rows and not long:
        return starts
    if newline is not None:
        starts = np.union1d(starts, _line_ends(tokens, newline))
    if long and (len(starts) < rows or has_few_long_documents(starts, len(tokens))):
        return starts[:0]
    return starts


def _line_ends(tokens: Integer[Tensor, " N"] | TokenFile, newline: int) -> Int64[np.ndarray, " M"]:
    firsts = range(0, len(tokens), STRETCH)
    if len(tokens) > SEARCHED:
        last = len(tokens) - STRETCH
        firsts = np.linspace(0, last, SEARCHED // STRETCH).astype(np.int64).tolist()
    found = []
    for first in firsts:
        part = torch.as_tensor(tokens[first : first + STRETCH])
        found.append(first + (part == newline).nonzero()[:, 0].cpu().numpy())
    return np.concatenate(found)
