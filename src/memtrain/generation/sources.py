"""Read texts, images and tokens from strings, files and arrays as a model's tokens, in pieces."""

import codecs
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64

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
SKIP = "--skip-unknown (skip_unknown=True) leaves such characters out"


class SourceReader:
    """Encodes sources as a model's tokens, in pieces, as the whole would be encoded.

    Args:
        codec: of the model.
        skip_unknown: leave out characters that do not occur in the training text, which are an
            error otherwise.
    """

    def __init__(self, codec: TokenCodec, *, skip_unknown: bool = False) -> None:
        self.codec, self.skip_unknown = codec, skip_unknown
        self.left_out = 0
        """Characters, or unknown tokens of a tokenizer, that were left out."""
        self._alphabet = bytes(codec.alphabet)

    def tokens(self, source: Source) -> Iterator[Int64[np.ndarray, " K"]]:
        """The tokens of a text, an array, or a file: a text, an image, numbers, or a .npy.

        Raises:
            MemtrainError: the model cannot read it.
        """
        codec = self.codec
        if isinstance(source, np.ndarray):
            yield from self._checked(source, "tokens")
        elif isinstance(source, str):
            text = self._known(source, "text")
            if text or not self.left_out:  # an empty text is refused, unless all was left out
                yield codec.encode_text(text)
        elif source.suffix == ".npy":
            yield from self._checked(_open_tokens(source), str(source))
        elif codec.picture is not None:
            yield codec.encode_image(source)
        elif not codec.text:
            yield from self._numbers(source)
        elif codec.tokenizer:
            yield from self._tokenized(source)
        else:
            for text in self._text(source, "surrogateescape"):
                yield np.frombuffer(_encoded(text), np.uint8).astype(np.int64)

    def _checked(self, tokens: np.ndarray, name: str) -> Iterator[Int64[np.ndarray, " K"]]:
        """The tokens of an array, if they are the model's."""
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise MemtrainError(
                f"{name}: {tokens.dtype} of shape {tokens.shape}: must be whole numbers, 1-D"
            )
        for first in range(0, len(tokens), PIECE):
            piece = tokens[first : first + PIECE]
            outside = piece[(piece < 0) | (piece >= self.codec.writable)]
            if len(outside):
                raise MemtrainError(
                    f"{name}: {outside[0]} is not a token, must be 0..{self.codec.writable - 1}"
                )
            yield np.asarray(piece, np.int64)

    def _tokenized(self, path: Path) -> Iterator[Int64[np.ndarray, " K"]]:
        """The tokens that a tokenizer makes of a text file."""
        tokenizer = open_tokenizer(self.codec.tokenizer)
        for text in _cut(self._text(path, "strict")):
            tokens = tokenizer.encode([text])[0].astype(np.int64)
            unknown = tokens == (-1 if tokenizer.unknown is None else tokenizer.unknown)
            if unknown.any() and not self.skip_unknown:
                raise MemtrainError(
                    f"{path}: holds characters that the model's tokenizer does not know; {SKIP}"
                )
            self.left_out += int(unknown.sum())
            yield tokens[~unknown]

    def _text(self, path: Path, errors: str) -> Iterator[str]:
        """A text file in pieces; `errors` says what becomes of bytes that are not UTF-8."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors=errors)
        try:
            for block in _blocks(path):
                yield self._known(decoder.decode(block), str(path))
            yield self._known(decoder.decode(b"", final=True), str(path))
        except UnicodeDecodeError as error:
            raise MemtrainError(f"{path}: is not UTF-8 text ({error.reason})") from None

    def _known(self, text: str, name: str) -> str:
        """The text, without characters that the training text does not have."""
        alphabet = self._alphabet
        if not alphabet or not _encoded(text).translate(None, alphabet):
            return text
        known = {one for one in set(text) if not _encoded(one).translate(None, alphabet)}
        if not self.skip_unknown:
            unknown = next(one for one in text if one not in known)
            raise MemtrainError(f"{name}: {unknown!r} does not occur in the training text; {SKIP}")
        kept = "".join(one for one in text if one in known)
        self.left_out += len(text) - len(kept)
        return kept

    def _numbers(self, path: Path) -> Iterator[Int64[np.ndarray, " K"]]:
        """The tokens of a file of numbers with spaces between them."""
        rest = b""
        for block in _blocks(path):
            # The last word may go on in the next block.
            *words, rest = (rest + block + b".").split()
            rest = rest[:-1]
            if len(rest) > LONGEST_NUMBER:
                words.append(rest)
            yield self._words(words, path)
        yield self._words(rest.split(), path)

    def _words(self, words: list[bytes], path: Path) -> Int64[np.ndarray, " K"]:
        last = self.codec.writable - 1
        for word in words:
            if not word.isdigit() or len(word) > LONGEST_NUMBER or int(word) > last:
                raise MemtrainError(
                    f"{path}: {word[:20].decode('ascii', 'replace')!r}: this model reads tokens; "
                    f"must be numbers 0..{last} separated by spaces, or a .npy of them"
                )
        return np.array([int(word) for word in words], np.int64)


def _open_tokens(path: Path) -> np.ndarray:
    try:
        return open_array(path)
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise MemtrainError(f"{path}: {error}") from None


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            while block := file.read(PIECE):
                yield block
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror}") from None


def _cut(pieces: Iterator[str]) -> Iterator[str]:
    """Pieces of a text that a tokenizer encodes as it would the whole."""
    text = ""
    for piece in pieces:
        *ready, text = cut_text(text + piece, PIECE)
        yield from ready
    if text:
        yield text


def _encoded(text: str) -> bytes:
    """Text as bytes; those that were no UTF-8 are themselves again."""
    return text.encode("utf-8", "surrogateescape")
