"""Read texts, images and tokens from strings, files and arrays as a model's tokens, in pieces."""

import codecs
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from memtrain.data.codec import TokenCodec
from memtrain.data.prepare.tokenize import cut_text
from memtrain.data.store import open_array
from memtrain.data.tokenizer import open_tokenizer
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

Source = str | Path | np.ndarray
"""A text, a file, or tokens (P,)."""
PIECE = 2**16
"""Bytes of a file, or characters of a text, that are encoded at once."""
LONGEST_NUMBER = 8
"""Digits of a token's number, as in a prompt."""


def source_tokens(
    source: Source, codec: TokenCodec, *, skip_unknown: bool = False
) -> Iterator[Int64[np.ndarray, " K"]]:
    """The tokens of a source, in pieces, as the whole would be encoded.

    Args:
        source: a text; a file with what the model takes: a text, an image, token numbers, or a .npy
            of tokens; or an array of tokens.
        codec: of the model.
        skip_unknown: leave out characters that do not occur in the training text.

    Raises:
        MemtrainError: the model cannot read it.
    """
    if isinstance(source, np.ndarray):
        yield from _checked_pieces(source, codec, "tokens")
    elif isinstance(source, str):
        text = _known(source, codec, "text", skip_unknown) if codec.text else source
        if text or not skip_unknown:  # nothing may be left; an empty text is refused
            yield codec.encode_text(text)
    elif source.suffix == ".npy":
        try:
            yield from _checked_pieces(open_array(source), codec, str(source))
        except (OSError, ValueError) as error:
            if isinstance(error, MemtrainError):
                raise
            raise MemtrainError(f"{source}: {_reason(error)}") from None
    elif codec.picture is not None:
        yield codec.encode_image(source)
    elif codec.text:
        yield from _text_tokens(source, codec, skip_unknown)
    else:
        yield from _numbers(source, codec)


def _checked_pieces(
    tokens: Integer[np.ndarray, "..."], codec: TokenCodec, name: str
) -> Iterator[Int64[np.ndarray, " K"]]:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise MemtrainError(
            f"{name}: {tokens.dtype} of shape {tokens.shape}: must be whole numbers, 1-D"
        )
    for first in range(0, len(tokens), PIECE):
        piece = np.asarray(tokens[first : first + PIECE], np.int64)
        outside = piece[(piece < 0) | (piece >= codec.writable)]
        if len(outside):
            raise MemtrainError(
                f"{name}: {outside[0]} is not a token, must be 0..{codec.writable - 1}"
            )
        yield piece


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            while block := file.read(PIECE):
                yield block
    except OSError as error:
        raise MemtrainError(f"{path}: {_reason(error)}") from None


def _text_tokens(
    path: Path, codec: TokenCodec, skip_unknown: bool
) -> Iterator[Int64[np.ndarray, " K"]]:
    """The tokens of a text file: its bytes, or the tokens of a tokenizer."""
    pieces = _known_text(path, codec, skip_unknown)
    if not codec.tokenizer:
        for text in pieces:
            yield np.frombuffer(_encoded(text), np.uint8).astype(np.int64)
        return
    tokenizer = open_tokenizer(codec.tokenizer)
    for text in _cut(pieces):
        tokens = tokenizer.encode([text])[0].astype(np.int64)
        if tokenizer.unknown is not None and tokenizer.unknown in tokens:
            if not skip_unknown:
                raise MemtrainError(
                    f"{path}: holds characters that the model's tokenizer does not know; "
                    "--skip-unknown (skip_unknown=True) leaves them out"
                )
            tokens = tokens[tokens != tokenizer.unknown]
        yield tokens


def _cut(pieces: Iterator[str]) -> Iterator[str]:
    """Pieces of a text that a tokenizer encodes as it would the whole."""
    text = ""
    for piece in pieces:
        text += piece
        *ready, text = cut_text(text, PIECE)
        yield from ready
    if text:
        yield text


def _known_text(path: Path, codec: TokenCodec, skip_unknown: bool) -> Iterator[str]:
    """A text file in pieces; of a model of bytes, bytes that are not UTF-8 stay what they are."""
    errors = "strict" if codec.tokenizer else "surrogateescape"
    decoder = codecs.getincrementaldecoder("utf-8")(errors=errors)
    try:
        for block in _blocks(path):
            yield _known(decoder.decode(block), codec, str(path), skip_unknown)
        yield _known(decoder.decode(b"", final=True), codec, str(path), skip_unknown)
    except UnicodeDecodeError as error:
        raise MemtrainError(f"{path}: is not UTF-8 text ({error.reason})") from None


def _known(text: str, codec: TokenCodec, name: str, skip_unknown: bool) -> str:
    """The text without characters that the training text does not have, or an error about one."""
    alphabet = bytes(codec.alphabet)
    if not alphabet or not _encoded(text).translate(None, alphabet):
        return text
    allowed = {one for one in set(text) if not _encoded(one).translate(None, alphabet)}
    if not skip_unknown:
        unknown = next(one for one in text if one not in allowed)
        raise MemtrainError(
            f"{name}: {unknown!r} does not occur in the training text; --skip-unknown "
            "(skip_unknown=True) leaves such characters out"
        )
    return "".join(one for one in text if one in allowed)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _numbers(path: Path, codec: TokenCodec) -> Iterator[Int64[np.ndarray, " K"]]:
    """The tokens of a file of numbers with spaces between them."""
    rest = b""
    for block in _blocks(path):
        *words, rest = (rest + block + b".").split()
        rest = rest[:-1]
        if len(rest) > LONGEST_NUMBER:
            words, rest = [*words, rest], b""
        yield _read_words(words, codec, path)
    yield _read_words(rest.split(), codec, path)


def _read_words(words: list[bytes], codec: TokenCodec, path: Path) -> Int64[np.ndarray, " K"]:
    for word in words:
        if not word.isdigit() or len(word) > LONGEST_NUMBER or int(word) >= codec.writable:
            raise MemtrainError(
                f"{path}: {word[:20].decode('ascii', 'replace')!r}: this model reads tokens; must "
                f"be numbers 0..{codec.writable - 1} separated by spaces, or a .npy of them"
            )
    return np.array([int(word) for word in words], np.int64)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
