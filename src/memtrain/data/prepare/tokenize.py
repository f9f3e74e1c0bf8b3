"""Turn the bytes of a text into the tokens of a tokenizer, trained on its training part."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from memtrain.data.prepare.limits import one_line, require_memory
from memtrain.data.store import Split, blocks
from memtrain.data.tokenizer import (
    ENDS,
    MAX_TOKENIZER_BYTES,
    SMALLEST_VOCAB,
    TextTokenizer,
    open_tokenizer,
    train_bpe,
)
from memtrain.errors import MemtrainError
from memtrain.files import read_text

BPE = "bpe"
BPE_VOCAB = 4096
"""Tokens of a trained BPE by default."""
PIECE = 2**20
"""Bytes of a document that are encoded at once, about."""
BATCH = 2**22
"""Bytes of documents that are encoded together, about."""
MAX_BPE_VOCAB = 2**20


def check_tokenizer(tokenizer: str | None, vocab: int | None) -> None:
    """Refuse options of the tokenizer that contradict each other, before anything is read."""
    if vocab is not None and tokenizer != BPE:
        has = "is of bytes" if tokenizer is None else "has its own"
        raise MemtrainError(
            f"vocab={vocab}: is for a BPE that is trained, and this text {has}; "
            f"--option tokenizer {BPE} vocab {vocab}, or leave it out"
        )
    if vocab is not None and not SMALLEST_VOCAB <= vocab <= MAX_BPE_VOCAB:
        raise MemtrainError(
            f"vocab={vocab}: must be {SMALLEST_VOCAB}..{MAX_BPE_VOCAB:,}, the 256 bytes, the end "
            f"of a text and merged pairs; {BPE_VOCAB} is usual for a small model"
        )
    if tokenizer not in (None, BPE):
        tokenizer_file(tokenizer)


def tokenizer_file(name: str) -> Path:
    """The path of a tokenizer.json that an option names."""
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise MemtrainError(
            f"tokenizer={name}: no such file; name a tokenizer.json, or {BPE}, which trains one "
            "on this text"
        )
    return path


def load_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer of a tokenizer.json, or of a folder with one."""
    path = tokenizer_file(name)
    try:
        return open_tokenizer(read_text(path, MAX_TOKENIZER_BYTES))
    except OSError as error:
        raise MemtrainError(f"tokenizer={path}: {error.strerror or error}") from None
    except MemtrainError as error:
        if str(error).startswith("tokenizer:"):  # the package is missing
            raise
        raise MemtrainError(f"tokenizer={path}: {error}") from None


def tokenizer_of(name: str, vocab: int | None, train: Split) -> TextTokenizer:
    """The tokenizer that an option names; a BPE is trained on the training part alone."""
    if name != BPE:
        return load_tokenizer(name)
    return train_bpe((piece for _, piece in _pieces(train)), vocab or BPE_VOCAB)


def tokenize(
    splits: Mapping[str, Split], tokenizer: TextTokenizer, separator: bool
) -> dict[str, Split]:
    """Encode splits of bytes as tokens; documents stay documents.

    Args:
        splits: of bytes, without separators.
        tokenizer: of the tokens.
        separator: put the tokenizer's end of a text between documents.
    """
    if separator and tokenizer.end_of_text is None:
        raise MemtrainError(
            f"separator: the tokenizer has no token for the end of a text ({', '.join(ENDS)}); "
            "leave the separator off"
        )
    end = tokenizer.end_of_text if separator else None
    return {name: _tokenize_split(split, tokenizer, end) for name, split in splits.items()}


def loss_notes(
    texts: Mapping[str, Split], splits: Mapping[str, Split], tokenizer: TextTokenizer
) -> Iterator[str]:
    """Notes on what the tokens of a text do not keep, if there is anything.

    Args:
        texts: the splits as bytes.
        splits: the same as tokens.
        tokenizer: of the tokens.
    """
    unknown, total = tokenizer.unknown, sum(len(split.tokens) for split in splits.values())
    parts = (block for split in splits.values() for block in blocks(split.tokens))
    count = 0 if unknown is None else sum(int((block == unknown).sum()) for block in parts)
    if count:
        yield (
            f"{count:,} of {total:,} tokens stand for words or characters that the tokenizer does "
            "not know; bits per byte are too low by them"
        )
    seen: set[str] = set()
    for split in texts.values():
        seen = seen.union(*(piece for _, piece in _pieces(split)))
    characters = sorted(one for one in seen if not one.isspace())
    encoded = zip(characters, tokenizer.encode(characters), strict=True)
    lost = [
        one
        for one, tokens in encoded
        if unknown not in tokens and one not in tokenizer.decode(tokens.tolist())
    ]
    if lost:
        what = "1 character" if len(lost) == 1 else f"{len(lost):,} different characters"
        shown = one_line("".join(lost[:10])) + "..." * (len(lost) > 10)
        yield f"the tokenizer drops or changes {what} of the text: {shown}"


def _tokenize_split(split: Split, tokenizer: TextTokenizer, end: int | None) -> Split:
    require_memory(8 * len(split.tokens), "tokenizer", "split the text into several files")
    parts: list[np.ndarray] = []
    starts: list[int] = []
    length, last = 0, -1
    for batch in _batches(split):
        encoded = tokenizer.encode([piece for _, piece in batch])
        for (document, _), tokens in zip(batch, encoded, strict=True):
            if document != last and len(tokens):  # a tokenizer may drop a document of spaces
                if starts and end is not None:
                    parts.append(np.array([end], np.uint32))
                    length += 1
                starts.append(length)
                last = document
            parts.append(tokens)
            length += len(tokens)
    joined = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    return Split(joined, np.array(starts, np.int64), text_bytes=len(split.tokens))


def _batches(split: Split) -> Iterator[list[tuple[int, str]]]:
    """The pieces of a split, several at once, each with the number of its document."""
    batch: list[tuple[int, str]] = []
    size = 0
    for document, piece in _pieces(split):
        batch.append((document, piece))
        size += len(piece)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(split: Split) -> Iterator[tuple[int, str]]:
    """The documents of a split of bytes, in pieces."""
    assert split.starts is not None
    ends = [*split.starts[1:].tolist(), len(split.tokens)]
    for document, (begin, end) in enumerate(zip(split.starts.tolist(), ends, strict=True)):
        for piece in cut_text(split.tokens[begin:end].tobytes().decode()):
            yield document, piece


def cut_text(text: str, size: int = PIECE) -> list[str]:
    """Cut a text into pieces of about `size` characters that tokenizers encode as they would the
    whole.

    The cuts are after a line end between two characters that are no spaces: there the usual
    tokenizers have a boundary. A text without such a place is cut anywhere.
    """
    pieces, begin = [], 0
    while len(text) - begin > size:
        end = begin + size
        place = text.rfind("\n", begin + 1, end)
        while place > begin and (text[place - 1].isspace() or text[place + 1].isspace()):
            place = text.rfind("\n", begin + 1, place)
        end = place + 1 if place > begin else end
        pieces.append(text[begin:end])
        begin = end
    return [*pieces, text[begin:]]
