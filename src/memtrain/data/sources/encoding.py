"""Text and pictures as tokens, and the notes on what was left out on the way."""

import numpy as np
from jaxtyping import Integer

from memtrain.data.pictures import Picture, Pictures, encode_pictures
from memtrain.data.text import EncodedText, encode_text
from memtrain.errors import MemtrainError


def encode_named(raw: bytes, mode: str, separator: bool, where: str) -> EncodedText:
    """The tokens of a text; an error says where the text is."""
    try:
        return encode_text(raw, mode, separator=separator)
    except MemtrainError as error:
        raise MemtrainError(f"{where}: {error}") from None


def dropped_note(encoded: EncodedText, prefix: str) -> tuple[str, ...]:
    """A note on the characters that were dropped, if any were."""
    if not encoded.dropped_bytes:
        return ()
    characters, count = encoded.dropped_characters, encoded.dropped_bytes
    return (f"{prefix}dropped {characters:,} non-ASCII characters ({count:,} bytes)",)


def spell_pictures(
    pictures: Pictures, *, levels: int, patch: int, threshold: int | None
) -> tuple[Picture, Integer[np.ndarray, "N L"]]:
    """How pictures are spelled, and their tokens."""
    _, height, width = pictures.gray.shape
    picture = Picture(height=height, width=width, levels=levels, patch=patch)
    return picture, encode_pictures(pictures.gray, levels=levels, patch=patch, threshold=threshold)


def skipped_note(pictures: Pictures) -> tuple[str, ...]:
    """A note on the files that were skipped, if any were."""
    if not pictures.skipped:
        return ()
    named = ", ".join(pictures.skipped[:5]) + (", ..." if len(pictures.skipped) > 5 else "")
    return (f"skipped {len(pictures.skipped):,} unreadable files: {named}",)
