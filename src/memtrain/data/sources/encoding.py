"""Text and pictures as tokens, and the notes on what was left out on the way."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer, UInt8

from memtrain.data.pictures import Copies, Picture, Pictures, encode_pictures
from memtrain.data.store import Split
from memtrain.data.text import EncodedText, encode_text
from memtrain.errors import MemtrainError


def encode_named(raw: bytes, mode: str, separator: bool, where: str) -> EncodedText:
    """The tokens of a text; an error says where the text is."""
    try:
        return encode_text(raw, mode, separator=separator)
    except MemtrainError as error:
        raise MemtrainError(f"{where}: {error}") from None


def non_ascii_note(encoded: EncodedText, prefix: str) -> tuple[str, ...]:
    """A note on what is beyond ASCII, if anything is: dropped, or kept as bytes."""
    if encoded.kept_bytes:
        kept = f"kept {encoded.kept_bytes:,} bytes beyond ASCII"
        return (f"{prefix}{kept}; --option mode ascii drops them",)
    if not encoded.dropped_bytes:
        return ()
    characters, count = encoded.dropped_characters, encoded.dropped_bytes
    return (f"{prefix}dropped {characters:,} non-ASCII characters ({count:,} bytes)",)


def spell_pictures(
    pictures: Pictures,
    held: Sequence[bool],
    *,
    levels: int,
    patch: int,
    threshold: int | None,
    copies: Copies,
) -> tuple[Picture, dict[str, Split]]:
    """How pictures are spelled, and the tokens of both splits.

    Args:
        pictures: all of them.
        held: which are held out; these have no copies.
        levels: grey levels.
        patch: side of the squares that make one token.
        threshold: darker is ink.
        copies: what else is learned of the others.
    """
    _, height, width = pictures.gray.shape
    picture = Picture(height=height, width=width, levels=levels, patch=patch)

    def tokens(gray: UInt8[np.ndarray, "N H W"]) -> Integer[np.ndarray, " T"]:
        spelled = encode_pictures(gray, levels=levels, patch=patch, threshold=threshold)
        return spelled.reshape(-1)

    test = np.array(held)
    train = [tokens(gray) for gray in copies.of(pictures.gray[~test])]
    splits = {"train": Split(np.concatenate(train)), "test": Split(tokens(pictures.gray[test]))}
    return picture, splits


def copies_note(copies: Copies) -> tuple[str, ...]:
    """A note on the copies that are in train, if any are."""
    if copies.count == 1:
        return ()
    ways = ["mirrored"] * copies.mirror + [f"moved by {copies.shift}"] * bool(copies.shift)
    return (f"train holds {copies.count} copies of a picture: {' and '.join(ways)}",)


def skipped_note(pictures: Pictures) -> tuple[str, ...]:
    """A note on the files that were skipped, if any were."""
    if not pictures.skipped:
        return ()
    named = ", ".join(pictures.skipped[:5]) + (", ..." if len(pictures.skipped) > 5 else "")
    files = "file" if len(pictures.skipped) == 1 else "files"
    return (f"skipped {len(pictures.skipped):,} unreadable {files}: {named}",)
