"""Prepare the user's own files: text and images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from memtrain.data.codec import SEPARATOR_TOKEN, TEXT_VOCAB
from memtrain.data.images import Augmentation
from memtrain.data.prepare.encode import (
    check_share,
    encode_texts,
    held_out_names,
    join_splits,
    non_ascii_note,
    skipped_note,
    split_stream,
    write_images,
)
from memtrain.data.prepare.file_kind import mixed_note, require_kind
from memtrain.data.prepare.image_files import read_folder
from memtrain.data.prepare.limits import ignored_note, one_line
from memtrain.data.prepare.store_writer import check_place, write_store
from memtrain.data.prepare.text_files import Texts, read_text
from memtrain.data.prepare.tokenize import check_tokenizer, tokenize, tokenizer_of
from memtrain.data.store import Split, Store, StoreMeta
from memtrain.errors import MemtrainError


def prepare_text(
    path: Path | Sequence[Path],
    out: Path,
    *,
    mode: str = "bytes",
    tokenizer: str | None = None,
    vocab: int | None = None,
    separator: bool = False,
    divider: str | None = None,
    column: str | None = None,
    split: str | None = None,
    subset: str | None = None,
    held_out: float = 0.1,
    overwrite: bool = False,
) -> Store:
    """Prepare texts: files, folders of them, Hugging Face datasets; see `read_text`.

    Args:
        path: the file, folder or hf:NAME; several are joined, and each has its held-out part.
        mode: "bytes" keeps all bytes, "ascii" drops non-ASCII characters.
        tokenizer: "bpe" trains a byte-level BPE on the training part; the path of a tokenizer.json
            uses that one. By default every byte is a token.
        vocab: the most tokens of the BPE; 4,096 by default.
        separator: put a token between documents: 0, or the tokenizer's end of a text.
        divider: a line that ends a document of plain text, beside <|endoftext|>.
        column: the column to read of JSONL, CSV, parquet and datasets; `text` by default.
        split: the split to read of a Hugging Face dataset; `train` by default.
        subset: the subset of a dataset on the Hub that has several.
        held_out: share of the documents in test, the last ones, or the end of a single document.
    """
    check_place(out, overwrite)
    check_share(held_out)
    check_tokenizer(tokenizer, vocab)
    paths = [path] if isinstance(path, Path) else list(path)
    parts, notes, has_rows = [], [], False
    for one in paths:
        kind = require_kind(one, "text")
        texts = read_text(one, column, split=split, subset=subset)
        _require_utf8(texts, mode, tokenizer)
        encoded = encode_texts(
            texts, mode, separator and tokenizer is None, str(one), divider or ""
        )
        begins = f"{one_line(str(one))}: " if len(paths) > 1 else ""
        found = (*mixed_note(one, kind, "text"), *texts.notes, *non_ascii_note(encoded, ""))
        notes += [begins + note for note in found]
        has_rows |= texts.has_rows
        cut = tokenizer is not None
        part = split_stream(encoded.tokens, encoded.starts, held_out, whole_characters=cut)
        if len(paths) > 1 and not all(len(split.tokens) for split in part.values()):
            raise MemtrainError(
                f"{one}: has {len(encoded.tokens)} bytes, too few to hold a part out; leave it out"
            )
        parts.append(part)
    if column is not None and not has_rows:
        raise MemtrainError(
            f"column={column}: plain text has no columns; JSONL, CSV and parquet files do"
        )
    mark = SEPARATOR_TOKEN if separator and tokenizer is None else None
    splits, vocab_size, saved = join_splits(parts, mark), TEXT_VOCAB, ""
    if tokenizer is not None:
        chosen = tokenizer_of(tokenizer, vocab, splits["train"])
        splits = tokenize(splits, chosen, separator)
        vocab_size, saved = chosen.vocab_size, chosen.text
        mark = chosen.end_of_text if separator else None
        notes.append(token_note(splits, vocab_size, vocab))
    meta = StoreMeta(
        name=paths[0].resolve().stem,
        vocab_size=vocab_size,
        source=", ".join(map(str, paths)),
        text=True,
        separator=mark,
        notes=tuple(notes),
    )
    return write_store(out, meta, splits, tokenizer=saved, overwrite=overwrite)


def _require_utf8(texts: Texts, mode: str, tokenizer: str | None) -> None:
    """Refuse a text whose characters are unknown, if they matter."""
    if texts.not_utf8 and (mode == "ascii" or tokenizer is not None):
        option = f"tokenizer={tokenizer}" if tokenizer is not None else "mode=ascii"
        raise MemtrainError(
            f"{option}: {one_line(texts.not_utf8[0])} is not UTF-8, so its characters are "
            "unknown; convert it: iconv -f LATIN1 -t UTF-8 FILE > NEW"
        )


def token_note(splits: Mapping[str, Split], size: int, wanted: int | None) -> str:
    """A note on the tokens of a text: their number, and how many bytes they stand for."""
    tokens = sum(len(split.tokens) for split in splits.values())
    text_bytes = sum(split.text_bytes or 0 for split in splits.values())
    fewer = f" (not {wanted:,}: no more pairs repeat)" if wanted and size < wanted else ""
    mean = f", {text_bytes / max(1, tokens):.2f} bytes per token" if text_bytes else ""
    return f"tokenizer of {size:,} tokens{fewer}{mean}"


def prepare_images(
    path: Path,
    out: Path,
    *,
    size: int | tuple[int, int] | None = None,
    levels: int = 256,
    patch: int = 1,
    threshold: int | None = None,
    held_out: float = 0.1,
    mirror: bool = False,
    shift: int = 0,
    overwrite: bool = False,
) -> Store:
    """Prepare a folder or zip of PNG and JPEG files, in grey.

    Args:
        path: the folder or zip.
        size: (height, width), or one number for both, to resize to.
        levels: grey levels.
        patch: side of the squares that make one token.
        threshold: darker pixels are ink; needs two levels.
        held_out: share of the images in test, chosen by a hash of their names.
        mirror: add mirrored images to train.
        shift: add images shifted by this many pixels in eight directions to train.
    """
    check_place(out, overwrite)
    check_share(held_out)
    augmentation = Augmentation(mirror=mirror, shift=shift)  # checks the options first
    kind = require_kind(path, "images")
    images = read_folder(path, (size, size) if isinstance(size, int) else size)
    held = held_out_names(images.names, held_out)
    return write_images(
        out,
        images,
        [name in held for name in images.names],
        augmentation,
        name=path.resolve().stem,
        source=str(path),
        notes=(
            *mixed_note(path, kind, "images"),
            *skipped_note(images),
            *ignored_note(images.ignored),
        ),
        levels=levels,
        patch=patch,
        threshold=threshold,
        overwrite=overwrite,
    )
