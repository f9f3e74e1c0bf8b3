"""Prepare tokens that exist already: a .npy, or the train.bin and val.bin of nanoGPT."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer, UInt16

from memtrain.data.prepare import download
from memtrain.data.prepare.encode import check_share, held_out_count, split_stream
from memtrain.data.prepare.file_kind import NANOGPT, mixed_note, require_kind
from memtrain.data.prepare.limits import require_memory
from memtrain.data.prepare.store_writer import check_place, write_store
from memtrain.data.prepare.tokenize import load_tokenizer
from memtrain.data.store import BLOCK, MAX_VOCAB, Split, Store, StoreMeta, blocks, open_array
from memtrain.data.tokenizer import TextTokenizer
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

HELD_OUT = 0.1


def prepare_tokens(
    path: Path,
    out: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: str | None = None,
    held_out: float | None = None,
    overwrite: bool = False,
) -> Store:
    """Prepare tokens: a .npy of one stream (1-D) or of documents of one length (2-D), or nanoGPT's
    folder of train.bin and val.bin.

    Args:
        path: the file or folder.
        vocab_size: the number of different tokens; the tokenizer's, or the highest token + 1 by
            default.
        tokenizer: the tokenizer.json that made the tokens, so that they are read as text.
        held_out: share of the documents in test, the last ones, or the end of a stream; 0.1 by
            default. nanoGPT's val.bin is held out as a whole.
    """
    check_place(out, overwrite)
    kind = require_kind(path, "tokens")
    if kind.format == "nanogpt" and held_out is not None:
        raise MemtrainError(
            f"held_out={held_out}: {path / NANOGPT[1]} is the held-out part; leave it out"
        )
    check_share(HELD_OUT if held_out is None else held_out)
    opened = None if tokenizer is None else load_tokenizer(tokenizer)
    arrays = _read_nanogpt(path) if kind.format == "nanogpt" else [_read_array(path)]
    vocab_size = _checked_vocab(path, arrays, vocab_size, opened)
    splits = _split(path, arrays, HELD_OUT if held_out is None else held_out, opened)
    meta = StoreMeta(
        name=path.resolve().stem,
        vocab_size=vocab_size,
        source=str(path),
        document_length=arrays[0].shape[1] if arrays[0].ndim == 2 else None,
        text=opened is not None,
        notes=(*mixed_note(path, kind, "tokens"), *_notes(path, kind.format, opened)),
    )
    saved = "" if opened is None else opened.text
    return write_store(out, meta, splits, tokenizer=saved, overwrite=overwrite)


# ----------------------------------------------------------------------------------------- read


def _read_array(path: Path) -> Integer[np.ndarray, "..."]:
    try:
        array = open_array(path)
    except (OSError, ValueError) as error:
        raise MemtrainError(f"{path}: {download.first_line(error)}") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise MemtrainError(
            f"{path}: {array.dtype} of shape {array.shape}: must be whole numbers, "
            f"1-D (a stream) or 2-D (documents x length); {_array_remedy(array)}"
        )
    if not array.flags.c_contiguous:  # is copied into C order in memory
        require_memory(array.nbytes, str(path), "save it in C order: np.ascontiguousarray(array)")
    if not array.size:
        raise MemtrainError(f"{path}: holds no tokens, at least 4 are needed, 2 per split")
    return array


def _array_remedy(array: np.ndarray) -> str:
    if array.ndim > 2:
        return "images are read as PNG files: memtrain train images --data FOLDER"
    return (
        "numbers over time are learned by memtrain train series --data FILE, or convert them to "
        "tokens: np.save('tokens.npy', array.astype(np.uint16))"
    )


def _read_nanogpt(folder: Path) -> list[UInt16[np.ndarray, " N"]]:
    arrays = []
    for path in (folder / name for name in NANOGPT):
        open_regular(path).close()
        size = path.stat().st_size
        if not size or size % 2:
            raise MemtrainError(
                f"{path}: has {size:,} bytes, which are no tokens of two bytes (uint16), as "
                "nanoGPT writes them; save others with np.save('tokens.npy', array)"
            )
        arrays.append(np.memmap(path, "<u2", "r"))
    return arrays


def _notes(path: Path, form: str, tokenizer: TextTokenizer | None) -> Iterator[str]:
    if form == "nanogpt":
        yield "train.bin is the training part, val.bin the held-out part, both read as uint16"
        if (path / "meta.pkl").exists():
            yield "meta.pkl is not read: a pickle can run any code"
    if tokenizer is None and form == "nanogpt":
        yield (
            "without a tokenizer, tokens are generated as numbers; --option tokenizer "
            "FILE/tokenizer.json decodes them"
        )


# ---------------------------------------------------------------------------------------- split


def _checked_vocab(
    path: Path, arrays: list[np.ndarray], wanted: int | None, tokenizer: TextTokenizer | None
) -> int:
    """The size of the vocabulary, if all tokens are in it."""
    low, high = min(int(one.min()) for one in arrays), max(int(one.max()) for one in arrays)
    if low < 0:
        raise MemtrainError(f"{path}: holds {low}; tokens are 0 or more")
    if wanted is not None and high >= wanted:
        raise MemtrainError(f"vocab_size={wanted}: {path} holds the token {high}")
    if high >= MAX_VOCAB:
        raise MemtrainError(f"{path}: holds the token {high:,}; tokens are below {MAX_VOCAB:,}")
    known = 0 if tokenizer is None else tokenizer.vocab_size
    if tokenizer is not None and high >= known:
        raise MemtrainError(
            f"{path}: holds the token {high:,}, and the tokenizer has {known:,}; name the "
            "tokenizer.json that made these tokens"
        )
    if wanted is not None and wanted < known:
        raise MemtrainError(f"vocab_size={wanted}: the tokenizer has {known:,}; leave it out")
    if high == 0 and not (wanted or known):
        raise MemtrainError(f"{path}: holds only zeros; there must be two different tokens")
    return wanted or known or high + 1


def _split(
    path: Path, arrays: list[np.ndarray], share: float, tokenizer: TextTokenizer | None
) -> dict[str, Split]:
    """Train and test; documents of a stream end where the tokenizer's end of a text is."""
    first = arrays[0]
    if first.ndim == 2:
        count = held_out_count(len(first), share, f"{path}: documents")
        rows = {"train": first[:-count], "test": first[-count:]}
        splits = {name: Split(part.reshape(-1)) for name, part in rows.items()}
    elif len(arrays) == 1:
        splits = split_stream(first, _starts(first, tokenizer), share)
    else:
        pairs = zip(("train", "test"), arrays, strict=True)
        splits = {name: Split(one, _starts(one, tokenizer)) for name, one in pairs}
    lengths = None if tokenizer is None else tokenizer.byte_lengths
    if lengths is None:
        return splits
    sizes = {
        name: sum(int(lengths[block].sum()) for block in blocks(split.tokens))
        for name, split in splits.items()
    }
    return {name: replace(split, text_bytes=sizes[name]) for name, split in splits.items()}


def _starts(tokens: np.ndarray, tokenizer: TextTokenizer | None) -> Int64[np.ndarray, " K"]:
    """The first token of each document."""
    end = None if tokenizer is None else tokenizer.end_of_text
    if end is None:
        return np.zeros(1, np.int64)
    places = [np.flatnonzero(one == end) + at * BLOCK + 1 for at, one in enumerate(blocks(tokens))]
    starts = np.unique(np.concatenate([np.zeros(1, np.int64), *places]))
    return starts[starts < len(tokens)]
