"""Prepare the user's own files: text and images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from memtrain.data.codec import SEPARATOR_TOKEN, TEXT_VOCAB
from memtrain.data.images import Augmentation
from memtrain.data.prepare.encode import (
    check_share,
    encode_texts,
    equal_note,
    groups_of,
    held_out_names,
    join_splits,
    non_ascii_note,
    repeated_note,
    split_stream,
)
from memtrain.data.prepare.file_kind import mixed_note, require_kind
from memtrain.data.prepare.image_arrays import dark_note, read_array
from memtrain.data.prepare.image_classes import label_file, read_classes
from memtrain.data.prepare.image_files import read_folder
from memtrain.data.prepare.image_store import reading_notes, write_images
from memtrain.data.prepare.limits import ignored_note, one_line
from memtrain.data.prepare.store_writer import check_place, write_store
from memtrain.data.prepare.text_files import Texts, read_text
from memtrain.data.prepare.tokenize import check_tokenizer, loss_notes, tokenize, tokenizer_of
from memtrain.data.store import Split, Store, StoreMeta
from memtrain.errors import MemtrainError

GREYS, COLOURS = 256, 64
"""Levels of images by default."""


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
    _check_apart(paths)
    parts, notes, has_rows, dividers = [], [], False, 0
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
        dividers += encoded.dividers
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
    if divider and not dividers:
        notes.append(f"no line is the divider {one_line(divider)}, so it ends no document")
    mark = SEPARATOR_TOKEN if separator and tokenizer is None else None
    splits, vocab_size, saved = join_splits(parts, mark), TEXT_VOCAB, ""
    notes += repeated_note(splits)
    if tokenizer is not None:
        chosen = tokenizer_of(tokenizer, vocab, splits["train"])
        texts, splits = splits, tokenize(splits, chosen, separator)
        vocab_size, saved = chosen.vocab_size, chosen.text
        mark = chosen.end_of_text if separator else None
        notes += (*loss_notes(texts, splits, chosen), token_note(splits, vocab_size, vocab))
    meta = StoreMeta(
        name=paths[0].resolve().stem,
        vocab_size=vocab_size,
        source=", ".join(map(str, paths)),
        text=True,
        separator=mark,
        notes=tuple(notes),
    )
    return write_store(out, meta, splits, tokenizer=saved, overwrite=overwrite)


def _check_apart(paths: Sequence[Path]) -> None:
    """Refuse a text that is named twice: it would be in both training and held-out part."""
    places = [one.resolve() for one in paths]
    for number, place in enumerate(places):
        for other, before in zip(paths, places[:number], strict=False):
            if place.is_relative_to(before) or before.is_relative_to(place):
                how = "named twice" if place == before else f"read with {other} too"
                raise MemtrainError(f"data={paths[number]}: is {how}; name each text once")


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
    colour: bool = False,
    levels: int | None = None,
    patch: int = 1,
    threshold: int | None = None,
    labels: bool | str = False,
    held_out: float = 0.1,
    mirror: bool = False,
    shift: int = 0,
    overwrite: bool = False,
) -> Store:
    """Prepare a folder or zip of image files, or a .npy of images, in grey or in colour.

    Args:
        path: the folder, zip or .npy.
        size: (height, width), or one number for both, to resize to.
        colour: keep the colours, each pixel as the nearest of a palette; else images are grey.
        levels: grey levels (256), or colours of the palette (64).
        patch: side of the squares that make one token; only in grey.
        threshold: darker pixels are ink; needs two grey levels.
        labels: begin each image with its class: true for the names of folders, or the labels
            beside a .npy; or a file of labels (see `read_classes`).
        held_out: share of the images in test, chosen by a hash of their names; equal images are
            all in train or all in test.
        mirror: add mirrored images to train.
        shift: add images shifted by this many pixels in eight directions to train.
    """
    check_place(out, overwrite)
    check_share(held_out)
    augmentation = Augmentation(mirror=mirror, shift=shift)  # checks the options first
    levels = (COLOURS if colour else GREYS) if levels is None else levels
    _check_colour(colour, levels, patch, threshold)
    kind = require_kind(path, "images")
    if labels:
        label_file(path, labels)  # before all images are read
    read = read_array if kind.format == "npy" else read_folder
    images = read(path, (size, size) if isinstance(size, int) else size, colour=colour)
    groups = groups_of(images.names, images.digests)
    held = held_out_names(groups, held_out)
    return write_images(
        out,
        images,
        [group in held for group in groups],
        augmentation,
        classes=read_classes(path, images, labels),
        class_tokens=bool(labels),
        name=path.resolve().stem,
        source=str(path),
        notes=(
            *mixed_note(path, kind, "images"),
            *reading_notes(images),
            *ignored_note(images.ignored),
            *equal_note(images.digests),
            *dark_note(images),
        ),
        colour=colour,
        levels=levels,
        patch=patch,
        threshold=threshold,
        overwrite=overwrite,
    )


def _check_colour(colour: bool, levels: int, patch: int, threshold: int | None) -> None:
    """Refuse options that colours do not have."""
    if not colour:
        return
    if patch != 1:
        raise MemtrainError(
            f"patch={patch} with colour: a colour token is one pixel; leave patch out, or make "
            "the images smaller (--option size 16)"
        )
    if threshold is not None:
        raise MemtrainError(f"threshold={threshold} with colour: is for grey; leave it out")
    if not 2 <= levels <= GREYS:
        raise MemtrainError(f"levels={levels} with colour: must be 2..{GREYS} colours; 64 is usual")
