"""A prepared data set as windows of one long sequence, gathered where the model is."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from memtrain.config import Stream
from memtrain.data.offsets import Offsets
from memtrain.data.spelling import Spelling
from memtrain.data.store import Store, identity_of, open_store, require_tokens
from memtrain.data.task import Corpus, Task
from memtrain.data.text import decode_text
from memtrain.errors import MemtrainError
from memtrain.shapes import Batch

NEWLINE = ord("\n")


class StreamTask(Task):
    """Windows of a token stream; every token but the first is the target of the one before.

    Training windows start anywhere; some of those that are read from nothing start where a
    document does. Held-out sequences always start there.
    """

    stream = True

    def __init__(
        self,
        store: Store,
        config: Stream,
        length: int,
        from_nothing: int = 0,
        tokens: dict[str, Tensor] | None = None,
        spelling: Spelling | None = None,
    ) -> None:
        self.store = store
        self.config = config
        self.vocab_size = store.meta.vocab_size
        self.sequence_length = length
        self.identity = identity_of(store.splits)
        self.spelling = spelling or _spelling(store)
        self.unit = _unit(self.spelling)
        require_tokens(store, "train", length + 1)
        self._tokens = tokens or {
            split: torch.from_numpy(np.array(store.tokens(split))) for split in ("train", "test")
        }
        self._starting = round(config.document_starts * from_nothing)
        self._offsets: Offsets | None = None

    @classmethod
    def from_config(cls, config: Stream) -> "StreamTask":
        if not config.path:
            raise MemtrainError("data.path: name a folder that `memtrain data` prepared")
        store = open_store(Path(config.path))
        require_tokens(store, "test", config.evaluate_length + 1)
        return cls(store, config, config.evaluate_length)

    def windows(self, length: int, from_nothing: int = 0) -> "StreamTask":
        return StreamTask(
            self.store, self.config, length, from_nothing, self._tokens, self.spelling
        )

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
            self._offsets = Offsets(
                self.store.starts("train"),
                len(self._tokens["train"]),
                self.sequence_length + 1,
                self.config.cross_documents,
                self.device,
            )
        offsets = self._offsets.anywhere(count, generator)
        starting = min(self._starting, count)
        if starting:
            offsets[:starting] = self._offsets.at_starts(starting, generator)
        return self._gather(self._tokens["train"], offsets)

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
        starts = torch.from_numpy(np.array(self.store.starts("test")))
        return starts[starts < end]

    def _one_text(self) -> bool:
        """Whether what is held out is one long document."""
        starts = np.array(self.store.starts("test"))
        whole = starts < len(self._tokens["test"]) - self.sequence_length
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


def _unit(spelling: Spelling) -> str:
    if spelling.text:  # where there is more than ASCII, characters take several bytes
        return "character" if max(spelling.alphabet) < 128 else "byte"
    whole = spelling.picture is None or spelling.picture.patch > 1
    return "token" if whole else "pixel"


def _spelling(store: Store) -> Spelling:
    meta = store.meta
    tokens = store.tokens("train")
    starts = np.array(store.starts("train")[:10_000])
    start = int(np.bincount(tokens[starts]).argmax())  # how documents most often begin
    alphabet: tuple[int, ...] = ()
    if meta.text:
        alphabet = tuple(np.flatnonzero(_counts(tokens, meta.vocab_size)).tolist())
        if len(starts) == 1 and NEWLINE in alphabet:  # of one text, any line is a beginning
            start = NEWLINE
    return Spelling(
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
