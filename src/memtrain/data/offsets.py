"""Where windows of a token stream begin, drawn on the device that holds the stream."""

import numpy as np
import torch
from jaxtyping import Int, Int64, Integer
from torch import Tensor

from memtrain.errors import MemtrainError

NEWLINE = ord("\n")
LONG = 2**14
"""Documents of more tokens than this on average are books rather than stories or pictures."""
HANDFUL = 2**10
"""Fewer long documents than this have too few beginnings to be drawn over and over."""


class Offsets:
    """Begins of windows of `size` tokens. No two of a batch are the same while there are others.

    Windows that may not cross documents lie inside those that are long enough for one. All places
    where a window may begin are numbered through; drawing is in these numbers, makes no decision
    on the host, and can therefore be captured in a CUDA graph.

    Args:
        starts: where each document starts, 0 first.
        tokens: length of the stream.
        size: tokens in a window.
        cross_documents: whether a window may reach from one document into the next.
        device: where offsets are drawn.
        beginnings: offsets for the windows that begin documents; the starts, unless given. Those
            without room for a window are left out.
    """

    def __init__(
        self,
        starts: Int64[np.ndarray, " K"],
        tokens: int,
        size: int,
        cross_documents: bool,
        device: torch.device,
        beginnings: Int64[np.ndarray, " N"] | None = None,
    ) -> None:
        starts = np.asarray(starts)
        if cross_documents:
            begins, room = np.zeros(1, np.int64), np.array([tokens - size + 1])
        else:
            lengths = np.diff(starts, append=tokens)
            begins, room = starts[lengths >= size], lengths[lengths >= size] - size + 1
            if not len(begins):
                raise MemtrainError(
                    f"cross_documents=False: no document holds a window of {size:,} tokens, the "
                    f"longest has {int(lengths.max()):,}; shorten the windows (context_length, "
                    "future_length, rollout_length, sequence_length) or let them cross"
                )
        ends = room.cumsum()
        before = ends - room
        wanted = starts if beginnings is None else np.asarray(beginnings)
        document = np.searchsorted(begins, wanted, side="right") - 1
        into = wanted - begins[document]
        fits = (document >= 0) & (into < room[document])
        self.places = int(ends[-1])
        """In how many places a window may begin."""
        self._beginnings = torch.from_numpy((before[document] + into)[fits]).to(device)
        self._begins = torch.from_numpy(begins).to(device)
        self._ends = torch.from_numpy(ends).to(device)
        self._before = torch.from_numpy(before).to(device)

    def draw(
        self, count: int, generator: torch.Generator, starting: int = 0
    ) -> Int[Tensor, " count"]:
        """Distinct offsets; only a batch of more windows than there are holds one twice.

        Args:
            count: how many.
            generator: the only source of chance.
            starting: how many of them, the first ones, begin documents: as many as there are
                beginnings, at most. All others begin anywhere, every place as likely.
        """
        rounds = []
        while count > self.places:  # every place once, then again
            rounds.append(self._round(self.places, generator, starting))
            count, starting = count - self.places, 0
        rounds.append(self._round(count, generator, starting))
        place = torch.cat(rounds)
        document = torch.searchsorted(self._ends, place, right=True)
        return self._begins[document] + place - self._before[document]

    def _round(self, count: int, generator: torch.Generator, starting: int) -> Int[Tensor, " B"]:
        """Distinct places, at most as many as there are."""
        place = self._draw(self.places, count, generator)
        starting = min(starting, count, len(self._beginnings))
        if not starting:
            return spread_out(place, self.places)
        chosen = self._draw(len(self._beginnings), starting, generator)
        taken = self._beginnings[spread_out(chosen, len(self._beginnings))]
        if starting == count:
            return taken
        return torch.cat([taken, spread_out_beside(place[starting:], taken, self.places)])

    def _draw(self, below: int, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
        drawn = torch.randint(below, (count,), generator=generator, device=generator.device)
        return drawn.to(self._ends.device)


def spread_out(drawn: Int[Tensor, " B"], size: int) -> Int[Tensor, " B"]:
    """Distinct numbers below `size`, of which there are enough, from uniform draws.

    What was drawn before moves up to the next free number, and past the last one to the first.
    Draws that are distinct stay as they are. The numbers lie on a ring, so each stays as likely as
    any other.
    """
    ordered, row = drawn.sort(stable=True)
    # Two turns of the ring: the second one knows what the first pushed past the end.
    turn = torch.arange(2 * len(drawn), device=drawn.device)
    twice = torch.cat([ordered, ordered + size])
    moved = (twice - turn).cummax(dim=0).values + turn  # each above the one before
    return torch.empty_like(drawn).scatter_(0, row, moved[len(drawn) :] % size)


def spread_out_beside(
    drawn: Int[Tensor, " B"], taken: Int[Tensor, " S"], size: int
) -> Int[Tensor, " B"]:
    """Distinct numbers below `size` that are not among the distinct `taken`."""
    taken = taken.sort().values
    free = size - len(taken)
    # Numbered without the taken ones, spread out, and numbered with them again.
    place = spread_out((drawn - torch.searchsorted(taken, drawn)) % free, free)
    skipped = taken - torch.arange(len(taken), device=taken.device)
    return place + torch.searchsorted(skipped, place, right=True)


def of_long_documents(starts: Int64[np.ndarray, " K"], tokens: int) -> bool:
    """Whether a stream is one document, or a handful of long ones.

    Their beginnings are not drawn over and over: each would come thousands of times as often as any
    other place, and a model would know them by heart.
    """
    return len(starts) == 1 or (len(starts) < HANDFUL and tokens > LONG * len(starts))


def beginnings(
    starts: Int64[np.ndarray, " K"],
    tokens: Integer[Tensor, " N"],
    rows: int,
    *,
    text: bool,
    pictures: bool,
) -> Int64[np.ndarray, " M"]:
    """Where windows that begin documents may begin.

    The starts of documents, if these are enough for the rows of a batch. Where they are fewer, or
    those of a few long documents, any line of a text is a beginning, together with the line end
    before it: from there a text is generated. A long stream without lines has no beginnings, so its
    windows begin anywhere. Pictures always begin where they do.
    """
    long = not pictures and of_long_documents(starts, len(tokens))
    if len(starts) >= rows and not long:
        return starts
    if text:
        lines = (tokens == NEWLINE).nonzero()[:, 0].cpu().numpy()
        starts = np.union1d(starts, lines)
    if long and (len(starts) < rows or of_long_documents(starts, len(tokens))):
        return starts[:0]
    return starts
