"""Token streams: a prepared data set as windows of one long sequence.

Training windows start anywhere; a share of those that are read from the empty memory start where a
document does. Window starts are sampled on the model's device; the tokens are there too, or on disk
(residence.py), with the same batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Integer
from torch import Tensor

from memtrain.config import Stream
from memtrain.data.codec import SEPARATOR_TOKEN, TEXT_VOCAB, TokenCodec
from memtrain.data.residence import Resident, auto_limit, gigabytes, stays_on_disk
from memtrain.data.store import (
    BLOCK,
    TOKENIZER_FILE,
    LoadedSplit,
    Store,
    StoreMeta,
    alphabet_of,
    blocks,
    identity_of,
    require_tokens,
)
from memtrain.data.store_reader import load_splits, load_store
from memtrain.data.task import Corpus, Task
from memtrain.data.token_file import TokenFile
from memtrain.data.tokenizer import open_tokenizer
from memtrain.data.window_starts import WindowSampler, document_begins, has_few_long_documents
from memtrain.errors import MemtrainError
from memtrain.shapes import IGNORE_INDEX, Batch

NEWLINE = ord("\n")
FEW_HELD_OUT = 64
"""Fewer held-out documents than this are scored in pieces, if they are long."""
CPU = torch.device("cpu")


class StreamTask(Task):
    """Windows of a token stream; every token but the first is the target of the one before.

    No two windows of a batch start at the same place while there are others. Held-out sequences
    always start where a document does. Tokens of classes are read, but are no targets. A change
    of the store afterwards has no effect: its tokens are read once, into memory, or its files stay
    open.

    Args:
        store: the prepared data.
        config: how it is used.
        length: tokens in a sequence.
        empty_start_rows: rows of a batch that are read from the empty memory.
        splits: the store's content, if it has been read already.
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
            if splits is None:
                splits = load_splits(store, on_disk=_opens_on_disk(config.resident, store))
            codec = _codec(store, splits["train"])
            self._tokens = {
                name: one.tokens if isinstance(one.tokens, TokenFile) else self._tensor(one.tokens)
                for name, one in splits.items()
            }
            self._starts = {name: one.starts for name, one in splits.items()}
            self._device = CPU
        else:
            codec, self._tokens, self._starts = like.spelling, like._tokens, like._starts
            self._device = like._device
        self.spelling: TokenCodec = codec
        self.unit = codec.unit
        self._document_rows = round(config.document_starts * empty_start_rows)
        self._sampler: WindowSampler | None = None
        self._token_bytes: Tensor | None = None if like is None else like._token_bytes

    @classmethod
    def from_config(cls, config: Stream) -> "StreamTask":
        if not config.path:
            raise MemtrainError("data.path: name a folder that `memtrain data` prepared")
        store, splits = load_store(Path(config.path), partial(_opens_on_disk, config.resident))
        require_tokens(store, "test", config.evaluate_length + 1)
        return cls(store, config, config.evaluate_length, splits=splits)

    def windows(self, length: int, empty_start_rows: int = 0) -> "StreamTask":
        return StreamTask(self.store, self.config, length, empty_start_rows, like=self)

    def on(self, store: Store, name: str) -> "StreamTask":
        """Sequences of other data with the same tokens.

        Args:
            store: the other data.
            name: of it, for the error.

        Raises:
            MemtrainError: its tokens mean something else.
        """
        mine, other = self.store.meta, store.meta
        kinds = [(one.vocab_size, one.picture, one.classes) for one in (mine, other)]
        if kinds[0] != kinds[1]:
            raise MemtrainError(f"data={name}: {_difference(mine, other)}")
        if other.tokenizer != mine.tokenizer:
            raise MemtrainError(
                f"data={name}: was prepared with another tokenizer; name its source, which is then "
                f"prepared with the run's ({self.store.folder / TOKENIZER_FILE})"
            )
        return StreamTask(store, self.config, self.sequence_length)

    def tokens(self, split: str) -> Integer[Tensor, " N"]:
        """All tokens of a split, on the task's device; read into memory if they are on disk."""
        tokens = self._tokens[split]
        return self._loaded(split, CPU) if isinstance(tokens, TokenFile) else tokens

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def in_background(self) -> bool:
        tokens = self._tokens["train"]
        return isinstance(tokens, TokenFile) or tokens.device.type != self._device.type

    @property
    def placement(self) -> str:
        size, setting = gigabytes(self.store.nbytes), f"data.resident={self.config.resident}"
        if not self.in_background:
            place = "memory" if self._device.type == "cpu" else self._device
            return f"data: {size} of tokens, in {place} ({setting})"
        place = "disk" if isinstance(self._tokens["train"], TokenFile) else "memory"
        if self.config.resident == "auto":
            setting += f": more than {gigabytes(auto_limit(self._device))}, the limit here"
        return f"data: {size} of tokens, read from {place} in the background ({setting})"

    def to(self, device: torch.device) -> "StreamTask":
        """Move the tokens to a device once, so that sampling needs no copy, if there is room."""
        if not stays_on_disk(self.store.nbytes, self.config.resident, device):
            self._tokens = {split: self._loaded(split, device) for split in self._tokens}
        self._device = device
        self._sampler = None
        return self

    def _loaded(self, split: str, device: torch.device) -> Integer[Tensor, " N"]:
        """The tokens of a split on a device; those of a file are copied block by block."""
        tokens = self._tokens[split]
        if isinstance(tokens, Tensor):
            return tokens.to(device)
        kind, filled = self._tensor(np.zeros(0, tokens.dtype)).dtype, 0
        whole = torch.empty(len(tokens), dtype=kind, device=device)
        for block in tokens.checked_blocks(self.store.splits[split].sha256):
            whole[filled : filled + len(block)] = self._tensor(block)
            filled += len(block)
        return whole

    def _tensor(self, tokens: Integer[np.ndarray, " N"]) -> Integer[Tensor, " N"]:
        """Tokens of the store as a tensor that every device can index.

        torch cannot index uint32, and on a GPU not uint16. Their bytes are read as signed numbers,
        but for tokens of 16 bits that do not fit.
        """
        if tokens.dtype == np.uint16 and self.vocab_size > 2**15:
            tokens = tokens.astype(np.int32)
        signed = {np.dtype(np.uint16): np.int16, np.dtype(np.uint32): np.int32}.get(tokens.dtype)
        return torch.from_numpy(tokens if signed is None else tokens.view(signed))

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        if self._sampler is None:  # only for training: evaluation may need longer windows
            self._sampler = self._make_sampler()
        offsets = self._sampler.draw(count, generator, min(self._document_rows, count))
        return self._gather(self._tokens["train"], offsets)

    def _make_sampler(self) -> "WindowSampler":
        tokens, starts = self._tokens["train"], self._starts["train"]
        images, newline = self.store.meta.picture is not None, _newline(self.spelling)
        begins = document_begins(
            starts, tokens, self._document_rows, newline=newline, images=images
        )
        size, cross = self.sequence_length + 1, self.config.cross_documents
        # Next to the tokens: many small operations on a busy GPU would hold up the reading thread.
        device = CPU if self.in_background else self.device
        return WindowSampler(starts, len(tokens), size, cross, device, begins)

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        """Distinct documents from their starts; of one long document or a few, pieces of them.

        The order depends on the generator alone: a larger count begins with the same sequences.
        Windows overlap only if there are too few pieces of a single document.
        """
        starts = self._held_out_starts()
        if len(starts) < count and self._has_one_document():
            last = len(self._tokens["test"]) - self.sequence_length - 1
            count = min(count, last + 1)
            exact = torch.float32 if last < 2**24 else torch.float64
            starts = torch.linspace(0, last, count, dtype=exact).long().unique()
        order = torch.randperm(len(starts), generator=generator)
        return self._gather(self._tokens["test"], starts[order[:count]])

    @property
    def held_out_sequences(self) -> int:
        """The number of held-out sequences with distinct starts."""
        return len(self._held_out_starts())

    def _held_out_starts(self) -> Int[Tensor, " N"]:
        require_tokens(self.store, "test", self.sequence_length + 1)
        end = len(self._tokens["test"]) - self.sequence_length
        if self._has_one_document():
            return torch.arange(0, end, self.sequence_length + 1)
        starts, size = self._starts["test"], self.sequence_length + 1
        total = len(self._tokens["test"])
        if self.store.meta.text and len(starts) < FEW_HELD_OUT and total > 4 * size * len(starts):
            ends = np.append(starts[1:], total) - self.sequence_length
            pairs = zip(starts, ends, strict=True)
            starts = np.concatenate([np.arange(begin, last, size) for begin, last in pairs])
        return torch.from_numpy(starts[starts < end])

    def _has_one_document(self) -> bool:
        """Whether the held-out data is one long document."""
        complete = self._starts["test"] < len(self._tokens["test"]) - self.sequence_length
        return int(complete.sum()) < 2 and self.store.meta.document_length is None

    def _gather(self, tokens: Tensor | TokenFile, offsets: Int[Tensor, " B"]) -> Batch:
        window = _windows(tokens, offsets, self.sequence_length + 1)
        inputs, targets = window[:, :-1], window[:, 1:]
        if self.spelling.classes:  # which are chosen, and not predicted
            targets = targets.where(targets < self.spelling.writable, IGNORE_INDEX)
        return Batch(inputs, targets)

    def corpus(self) -> Corpus:
        image, length = self.store.meta.picture, self.store.meta.document_length
        if image is None:
            return Corpus(self._tokens["train"], self.vocab_size, self.unit, None, length)
        tokens, width = self._tokens["train"], image.width // image.patch
        if self.spelling.classes:
            tokens = self.tokens("train").view(-1, image.length + 1)[:, 1:].reshape(-1)
        return Corpus(tokens, image.vocab_size, self.unit, width, image.length)

    def held_out_images(self, count: int, generator: torch.Generator) -> Int[Tensor, "B L"] | None:
        if self.store.meta.picture is None:
            return None
        test, length = self._tokens["test"], self.store.meta.document_length or 1
        order = torch.randperm(len(test) // length, generator=generator)[:count]
        return _windows(test, order * length, length).to(self.device)

    def target_bytes(self, targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"] | None:
        """The bytes of text that each target stands for: exact for bytes and byte-level tokens.

        Of other tokenizers every token counts as the mean over the held-out text.
        """
        if self._token_bytes is None:
            self._token_bytes = token_bytes(self.store, self.spelling, self._tokens["test"])
        if self._token_bytes is None:
            return None
        return self._token_bytes.to(targets.device)[targets]

    def describe(self, inputs: list[int], targets: list[int]) -> str:
        if self.store.meta.text:
            return self.spelling.decode_text(np.array(inputs))
        return super().describe(inputs, targets)


def _difference(mine: StoreMeta, other: StoreMeta) -> str:
    """What the tokens of other data have not in common with a run's, and the remedy."""
    learned, found = mine.picture, other.picture
    again = "prepare it with the same --option (memtrain data)"
    if learned and found and (learned.height, learned.width) != (found.height, found.width):
        sizes = [f"{one.height}x{one.width}" for one in (found, learned)]
        return f"has images of {sizes[0]} pixels, the run learned {sizes[1]}; {again}"
    if mine.vocab_size != other.vocab_size:
        return f"has {other.vocab_size} tokens, the run learned {mine.vocab_size}; {again}"
    if mine.classes != other.classes:
        return "has other classes than the run learned; give them the same names"
    if learned and found and learned.palette and found.palette:
        return (
            "has other colours than the run learned: a palette is that of its own training images; "
            "put these images into the run's data, or train in grey"
        )
    return f"has tokens of another kind than the run learned; {again}"


def _opens_on_disk(resident: Resident, store: Store) -> bool:
    """Whether a store is opened on disk; one for the device is loaded when that is known."""
    return stays_on_disk(store.nbytes, "auto" if resident == "device" else resident, CPU)


def _windows(
    tokens: Integer[Tensor, " N"] | TokenFile, offsets: Int[Tensor, " B"], size: int
) -> Int[Tensor, "B size"]:
    """The windows that start at these offsets, where the tokens are; those on disk in memory."""
    if isinstance(tokens, TokenFile):
        return torch.from_numpy(tokens.windows(offsets.cpu().numpy(), size))
    offsets = offsets.to(tokens.device)
    return tokens[offsets[:, None] + torch.arange(size, device=tokens.device)].long()


def _codec(store: Store, train: LoadedSplit) -> TokenCodec:
    meta, tokens, starts = store.meta, train.tokens, train.starts
    if meta.picture is not None and meta.classes:
        first, classes = meta.picture.vocab_size, len(meta.classes)
        counts = np.bincount(_tokens_at(tokens, starts) - first, minlength=classes)
        return TokenCodec(
            vocab_size=meta.vocab_size,
            start_token=first + int(counts.argmax()),
            start_written=False,
            picture=meta.picture,
            classes=meta.classes,
            class_counts=tuple(counts.tolist()),
        )
    start = int(np.bincount(_tokens_at(tokens, starts[:10_000])).argmax())  # the most common
    codec = TokenCodec(
        vocab_size=meta.vocab_size,
        start_token=start,
        text=meta.text,
        tokenizer=store.tokenizer(),
        picture=meta.picture,
    )
    if not meta.text:
        return codec
    found = store.splits["train"].alphabet or alphabet_of(blocks(tokens))
    if _newline(codec) in found and has_few_long_documents(starts, len(tokens)):
        start = _newline(codec)  # any line may begin a text
    return replace(codec, start_token=start, alphabet=_alphabet(codec, found))


def _tokens_at(
    tokens: Integer[np.ndarray, " N"] | TokenFile, offsets: Int64[np.ndarray, " K"]
) -> Int64[np.ndarray, " K"]:
    on_disk = isinstance(tokens, TokenFile)
    found = tokens.windows(offsets, 1)[:, 0] if on_disk else tokens[offsets]
    return found.astype(np.int64)


def _newline(codec: TokenCodec) -> int | None:
    """The token of a line end of a text."""
    if codec.tokenizer:
        return open_tokenizer(codec.tokenizer).newline
    return NEWLINE if codec.text else None


def _alphabet(codec: TokenCodec, tokens: Sequence[int]) -> tuple[int, ...]:
    """The bytes of these tokens; none if the tokenizer's tokens are not strings of bytes."""
    if not codec.tokenizer:
        return tuple(tokens)
    tokenizer = open_tokenizer(codec.tokenizer)
    if not tokenizer.byte_level:
        return ()
    strings = tokenizer.byte_strings
    return tuple(sorted({byte for token in tokens for byte in strings[token]}))


def token_bytes(
    store: Store, codec: TokenCodec, test: Integer[Tensor, " N"] | TokenFile
) -> Float[Tensor, " V"] | None:
    """The bytes of text that each token stands for; None if the tokens are no text."""
    if not codec.text:
        return None
    if not codec.tokenizer:
        lengths = torch.ones(TEXT_VOCAB, dtype=torch.float64)
        if store.meta.separator is not None:
            lengths[SEPARATOR_TOKEN] = 0
        return lengths
    expected, size = store.splits["test"].text_bytes, codec.vocab_size
    known = open_tokenizer(codec.tokenizer).byte_lengths
    if known is not None:
        lengths = torch.zeros(size, dtype=torch.float64)
        lengths[: len(known)] = torch.from_numpy(known)[:size].double()
        parts = (test[first : first + BLOCK] for first in range(0, len(test), BLOCK))
        total = sum(float(lengths[torch.as_tensor(part).long().cpu()].sum()) for part in parts)
        if total == expected:
            return lengths
    # A tokenizer that changes the text: lower case, other characters, a space in front.
    if expected is None:
        return None
    return torch.full((size,), expected / len(test), dtype=torch.float64)
