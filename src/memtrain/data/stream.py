"""A prepared data set as windows of one long sequence, gathered where the model is."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from memtrain.config import Stream
from memtrain.data.codec import TokenCodec
from memtrain.data.offsets import NEWLINE, Offsets, beginnings, of_long_documents
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
from memtrain.data.text import decode_text
from memtrain.errors import MemtrainError
from memtrain.shapes import Batch


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
