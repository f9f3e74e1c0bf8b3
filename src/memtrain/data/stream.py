"""Windows of one long token sequence: a prepared data set as a task."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Int64, Integer
from torch import Tensor

from memtrain.config import Stream
from memtrain.data.codec import TokenCodec, decode_text
from memtrain.data.store import (
    LoadedSplit,
    Store,
    StoreMeta,
    identity_of,
    load_splits,
    load_store,
    require_tokens,
)
from memtrain.data.task import Corpus, Task
from memtrain.errors import MemtrainError
from memtrain.shapes import Batch

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


class StreamTask(Task):
    """Windows of a token stream; every token but the first is the target of the one before.

    Training windows start anywhere; some of those that are read from nothing start where a
    document does, and no two of a batch start at the same place while there are others. Held-out
    sequences always start where a document does.

    All that is ever needed of the store is read once: what happens to its folder afterwards
    changes nothing.

    Args:
        store: the prepared data.
        config: how it is used.
        length: tokens in a sequence.
        from_nothing: rows of a batch that are read from the empty memory.
        splits: what the store holds, if that has been read already.
        like: a task of the same data, whose tokens are shared.
    """

    stream = True

    def __init__(
        self,
        store: Store,
        config: Stream,
        length: int,
        empty_start_rows: int = 0,
        *,
        splits: Mapping[str, LoadedSplit] | None = None,
        like: "StreamTask | None" = None,
    ) -> None:
        self.store = store
        self.config = config
        self.vocab_size = store.meta.vocab_size
        self.sequence_length = length
        self.identity = identity_of(store.splits)
        require_tokens(store, "train", length + 1)
        if like is None:
            splits = load_splits(store) if splits is None else splits
            spelling = _spelling(store.meta, splits["train"])
            self._tokens = {name: torch.from_numpy(one.tokens) for name, one in splits.items()}
            self._starts = {name: one.starts for name, one in splits.items()}
        else:
            spelling, self._tokens, self._starts = like.spelling, like._tokens, like._starts
        self.spelling: TokenCodec = spelling
        self.unit = _unit(spelling)
        self._starting = round(config.document_starts * empty_start_rows)
        self._offsets: Offsets | None = None

    @classmethod
    def from_config(cls, config: Stream) -> "StreamTask":
        if not config.path:
            raise MemtrainError("data.path: name a folder that `memtrain data` prepared")
        store, splits = load_store(Path(config.path))
        require_tokens(store, "test", config.evaluate_length + 1)
        return cls(store, config, config.evaluate_length, splits=splits)

    def windows(self, length: int, empty_start_rows: int = 0) -> "StreamTask":
        return StreamTask(self.store, self.config, length, empty_start_rows, like=self)

    def tokens(self, split: str) -> Integer[Tensor, " N"]:
        """All tokens of a split, where the task's data is."""
        return self._tokens[split]

    @property
    def device(self) -> torch.device:
        return self._tokens["train"].device

    def to(self, device: torch.device) -> "StreamTask":
        """Move the tokens to a device once, so that drawing windows needs no copy."""
        self._tokens = {split: tokens.to(device) for split, tokens in self._tokens.items()}
        self._offsets = None
        return self

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        if self._offsets is None:  # made for training only: evaluation may want longer windows
            self._offsets = self._make_offsets()
        starting = min(self._starting, count)
        offsets = self._offsets.draw(count, generator, starting)
        return self._gather(self._tokens["train"], offsets)

    def _make_offsets(self) -> Offsets:
        tokens, starts, meta = self._tokens["train"], self._starts["train"], self.store.meta
        begins = beginnings(
            starts, tokens, self._starting, text=meta.text, pictures=meta.picture is not None
        )
        size, cross = self.sequence_length + 1, self.config.cross_documents
        return Offsets(starts, len(tokens), size, cross, self.device, begins)

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        """Distinct documents from their starts; of one long document, pieces of it.

        In which order follows from the generator alone: more of them begin with the same ones.
        Only where there are too few pieces, windows overlap.
        """
        starts = self._held_out_starts()
        if len(starts) < count and self._one_text():
            last = len(self._tokens["test"]) - self.sequence_length - 1
            starts = torch.linspace(0, last, count).long().unique()
        order = torch.randperm(len(starts), generator=generator)
        return self._gather(self._tokens["test"], starts[order[:count]])

    @property
    def held_out_sequences(self) -> int:
        """How many held-out sequences there are that begin apart."""
        return len(self._held_out_starts())

    def _held_out_starts(self) -> Int[Tensor, " N"]:
        require_tokens(self.store, "test", self.sequence_length + 1)
        end = len(self._tokens["test"]) - self.sequence_length
        if self._one_text():
            return torch.arange(0, end, self.sequence_length + 1)
        starts = self._starts["test"]
        return torch.from_numpy(starts[starts < end])

    def _one_text(self) -> bool:
        """Whether what is held out is one long document."""
        whole = self._starts["test"] < len(self._tokens["test"]) - self.sequence_length
        return int(whole.sum()) < 2 and self.store.meta.document_length is None

    def _gather(self, tokens: Tensor, offsets: Int[Tensor, " B"]) -> Batch:
        offsets = offsets.to(tokens.device)
        span = torch.arange(self.sequence_length + 1, device=tokens.device)
        window = tokens[offsets[:, None] + span].long()
        return Batch(window[:, :-1], window[:, 1:])

    def corpus(self) -> Corpus:
        picture = self.store.meta.picture
        return Corpus(
            self._tokens["train"],
            self.vocab_size,
            self.unit,
            picture.width // picture.patch if picture else None,
            self.store.meta.document_length,
        )

    def held_out_pictures(
        self, count: int, generator: torch.Generator
    ) -> Int[Tensor, "B L"] | None:
        if self.store.meta.picture is None:
            return None
        pictures = self._tokens["test"].view(-1, self.store.meta.picture.length)
        order = torch.randperm(len(pictures), generator=generator)[:count]
        return pictures[order.to(pictures.device)].long()

    def describe(self, inputs: list[int], targets: list[int]) -> str:
        if self.store.meta.text:
            return decode_text(np.array(inputs))
        return super().describe(inputs, targets)


def _unit(spelling: TokenCodec) -> str:
    if spelling.text:  # where there is more than ASCII, characters take several bytes
        return "character" if max(spelling.alphabet) < 128 else "byte"
    whole = spelling.picture is None or spelling.picture.patch > 1
    return "token" if whole else "pixel"


def _spelling(meta: StoreMeta, train: LoadedSplit) -> TokenCodec:
    tokens, starts = train.tokens, train.starts
    start = int(np.bincount(tokens[starts[:10_000]]).argmax())  # how documents most often begin
    alphabet: tuple[int, ...] = ()
    if meta.text:
        alphabet = tuple(np.flatnonzero(_counts(tokens, meta.vocab_size)).tolist())
        if NEWLINE in alphabet and of_long_documents(starts, len(tokens)):
            start = NEWLINE  # any line is a beginning
    return TokenCodec(
        vocab_size=meta.vocab_size,
        start_token=start,
        text=meta.text,
        picture=meta.picture,
        alphabet=alphabet,
    )


def _counts(tokens: np.ndarray, vocab_size: int, block: int = 2**24) -> np.ndarray:
    """How often each token occurs; a memory map need not fit in memory."""
    parts = range(0, len(tokens), block)
    return sum(
        (np.bincount(tokens[first : first + block], minlength=vocab_size) for first in parts),
        start=np.zeros(vocab_size, np.int64),
    )
