"""Encode text as tokens, one per byte, and define the codec of a data set."""

import codecs
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from memtrain.config.serialize import structure
from memtrain.data.images import ImageFormat, Pixels, decode_images, encode_images
from memtrain.data.tokenizer import open_tokenizer
from memtrain.errors import MemtrainError, did_you_mean

TEXT_VOCAB = 256
SEPARATOR_TOKEN = 0
TEXT_MODES = ("bytes", "ascii")

DOCUMENT_END = "<|endoftext|>"
"""The line between documents of a text."""
_NON_ASCII = bytes(range(128, 256))
_LEAD_BYTE = 192  # in UTF-8 a character beyond ASCII has one byte from here on
_BLOCK = 2**24
_WINDOW = 32
"""Tokens that a stream decodes again with new ones, whose text may depend on those before."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text as tokens, with counts of its non-ASCII characters."""

    tokens: UInt8[np.ndarray, " N"]
    starts: Int64[np.ndarray, " K"]
    """The start of each document."""
    dropped_characters: int
    dropped_bytes: int
    kept_bytes: int
    """Beyond ASCII, in mode "bytes"."""
    dividers: int = 0
    """Lines that are the divider."""


def encode_text(
    raw: bytes | bytearray, mode: str = "bytes", *, separator: bool = False, divider: str = ""
) -> EncodedText:
    """Encode a text as tokens, in little more memory than the text and the tokens.

    Args:
        raw: UTF-8, or anything else in mode "bytes".
        mode: "bytes" keeps every byte, "ascii" drops non-ASCII characters, as the paper does.
        separator: put token 0 between documents; the paper joins them directly.
        divider: another line that ends a document, beside `DOCUMENT_END`.
    """
    if mode not in TEXT_MODES:
        raise MemtrainError(f"mode={mode!r}: {did_you_mean(mode, TEXT_MODES)}")
    beyond, characters = _count_from(raw, 128), _count_from(raw, _LEAD_BYTE)
    dropped = mode == "ascii" and beyond > 0
    text = raw.translate(None, _NON_ASCII) if dropped else raw
    if separator and SEPARATOR_TOKEN in text:
        raise MemtrainError("separator: the text holds byte 0 itself; leave the separator off")

    begins, ends, dividers = array("q", [0]), array("q"), 0
    for line in _document_ends(divider).finditer(text):
        ends.append(line.start())
        begins.append(line.end())
        dividers += line[0].rstrip() == divider.encode().rstrip()
    ends.append(len(text))
    first, last = np.array(begins, np.int64), np.array(ends, np.int64)  # and not longlong
    first, last = first[first < last], last[first < last]  # empty documents vanish
    lengths = last - first + separator
    starts = np.cumsum(lengths) - lengths
    tokens = np.frombuffer(text, np.uint8)
    if len(starts) != 1 or lengths[0] != len(text):
        joined = np.full(int(lengths.sum()), SEPARATOR_TOKEN, np.uint8)
        for begin, end, place in zip(first.tolist(), last.tolist(), starts.tolist(), strict=True):
            joined[place : place + end - begin] = tokens[begin:end]
        tokens = joined[: len(joined) - (separator and len(joined) > 0)]
    return EncodedText(
        tokens,
        starts,
        dropped_characters=characters if dropped else 0,
        dropped_bytes=beyond if dropped else 0,
        kept_bytes=0 if mode == "ascii" else beyond,
        dividers=dividers,
    )


def _document_ends(divider: str) -> re.Pattern[bytes]:
    """Matches a whole line that ends a document."""
    marks = b"|".join(re.escape(one.encode()) for one in (DOCUMENT_END, divider) if one)
    return re.compile(rb"^(?:" + marks + rb")[ \t]*(?:\r?\n|\r?\Z)", re.MULTILINE)


def _count_from(raw: bytes | bytearray, code: int) -> int:
    """Count the bytes that are at least `code`."""
    whole = np.frombuffer(raw, np.uint8)
    parts = (whole[start : start + _BLOCK] for start in range(0, len(whole), _BLOCK))
    return sum(int((part >= code).sum()) for part in parts)


def decode_text(tokens: Integer[np.ndarray, " N"]) -> str:
    """Decode tokens as UTF-8; invalid bytes become U+FFFD."""
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < TEXT_VOCAB):
        raise MemtrainError(
            f"tokens {tokens.min()}..{tokens.max()} are not text: must be 0..{TEXT_VOCAB - 1}"
        )
    return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCodec:
    """The meaning of a data set's tokens; saved with the weights, for generation."""

    vocab_size: int
    start_token: int
    """The token that is read before the first generated one."""
    start_written: bool = True
    """Whether the start token is part of the output; if not, it is a special token that precedes
    every prompt and is never generated."""
    text: bool = False
    """Whether tokens are a text: its bytes, or the tokens of a tokenizer."""
    tokenizer: str = field(default="", repr=False)
    """The tokenizer.json of a text; empty if its tokens are bytes."""
    picture: ImageFormat | None = None
    """The format of images, if sequences are images."""
    dark_ink: bool = False
    """Whether a higher grey level is darker."""
    alphabet: tuple[int, ...] = ()
    """The bytes that occur in the training text (text only); empty if they are unknown."""
    classes: tuple[str, ...] = ()
    """The names of the classes of images, if each image begins with the token of its class. These
    are the last tokens of the vocabulary; like a start token, they are never generated."""
    class_counts: tuple[int, ...] = ()
    """The number of training images of each class."""

    def __post_init__(self) -> None:
        if self.classes and (self.start_written or len(self.class_counts) != len(self.classes)):
            raise MemtrainError("classes: need start_written=False, and as many class_counts")
        if not 0 <= self.start_token < self.vocab_size:
            raise MemtrainError(
                f"start_token={self.start_token}: must be below vocab_size, {self.vocab_size}"
            )

    @property
    def unit(self) -> str:
        """The name of one token in results, as in "nats per pixel"."""
        if self.text and not self.tokenizer:  # beyond ASCII, a character takes several bytes
            return "character" if max(self.alphabet, default=0) < 128 else "byte"
        return "pixel" if self.picture and self.picture.patch == 1 else "token"

    @property
    def writable(self) -> int:
        """Only tokens below this number may be generated."""
        if self.classes:
            return self.vocab_size - len(self.classes)
        return self.vocab_size if self.start_written else self.start_token

    def class_number(self, label: str | int) -> int:
        """The number of a class, from its name, or from the number itself."""
        if not self.classes:
            remedy = "train on images with --option labels true to choose a class"
            raise MemtrainError(f"label={_brief(str(label))}: this model has no classes; {remedy}")
        name = str(label)
        if name in self.classes:
            return self.classes.index(name)
        if name.isdecimal() and len(name) < 9 and int(name) < len(self.classes):
            return int(name)
        known = did_you_mean(name, self.classes)
        numbers = "" if self.classes[0].isdecimal() else f", or 0..{len(self.classes) - 1}"
        raise MemtrainError(f"label={_brief(name)}: {known}{numbers}")

    def sample_classes(self, count: int, seed: int) -> Int64[np.ndarray, " B"]:
        """Classes with the frequencies of the training images."""
        share = np.array(self.class_counts, np.float64)
        random = np.random.default_rng(seed)
        return random.choice(len(share), count, p=share / share.sum()).astype(np.int64)

    def split_class(
        self, tokens: Integer[np.ndarray, "*rows P"]
    ) -> tuple[Integer[np.ndarray, "*rows"] | None, Integer[np.ndarray, "*rows Q"]]:
        """The classes of images and the other tokens, where the first token is that of a class."""
        if not self.classes or not tokens.size or int(tokens[..., 0].min()) < self.writable:
            return None, tokens
        return np.asarray(tokens[..., 0] - self.writable), tokens[..., 1:]

    def encode_text(self, prompt: str) -> Int64[np.ndarray, " P"]:
        """Encode a prompt: text, or token numbers if the model generates neither text nor images.

        Raises:
            MemtrainError: the model generates images, or never saw one of the characters.
        """
        if self.picture:
            problem = f"prompt={_brief(prompt)}: this model generates images; complete one with "
            raise MemtrainError(
                f"{problem}its first tokens, an array of numbers", f"{problem}--image FILE"
            )
        if not self.text:
            return self._read_numbers(prompt)
        if not prompt:
            raise MemtrainError(
                "prompt='': must hold a character; leave it off to start without one"
            )
        known = set(self.alphabet)
        for character in prompt if known else "":
            if not known.issuperset(character.encode()):
                raise MemtrainError(
                    f"prompt={_brief(prompt)}: {character!r} does not occur in the training "
                    "text; leave it out"
                )
        if self.tokenizer:
            return self._tokenize(prompt)
        return np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)

    def _tokenize(self, prompt: str) -> Int64[np.ndarray, " P"]:
        tokenizer = open_tokenizer(self.tokenizer)
        tokens = tokenizer.encode([prompt])[0].astype(np.int64)
        if not len(tokens) or tokenizer.unknown in tokens:
            raise MemtrainError(
                f"prompt={_brief(prompt)}: holds characters that the model's tokenizer does not "
                "know; leave them out"
            )
        return tokens

    def _read_numbers(self, prompt: str) -> Int64[np.ndarray, " P"]:
        words = prompt.split()
        if not words or not all(
            word.isdecimal() and len(word) < 9 and int(word) < self.writable for word in words
        ):
            raise MemtrainError(
                f"prompt={_brief(prompt)}: this model generates tokens; must be "
                f"numbers 0..{self.writable - 1} separated by spaces"
            )
        return np.array([int(word) for word in words], np.int64)

    def encode_image(self, path: Path) -> Int64[np.ndarray, " L"]:
        """Encode an image file as tokens, resized to the data's size; without its class."""
        image = self.picture
        if image is None:
            what = "text; begin one with --prompt" if self.text else "tokens"
            raise MemtrainError(f"image={path}: this model generates {what}")
        from memtrain.data.prepare.image_files import read_image  # which imports this module

        pixels = read_image(path, (image.height, image.width), colour=bool(image.palette))
        pixels = 255 - pixels if self.dark_ink else pixels
        tokens = encode_images(
            pixels[None], levels=image.levels, patch=image.patch, palette=image.palette
        )
        return tokens[0].astype(np.int64)

    def decode_text(self, tokens: Integer[np.ndarray, " N"]) -> str:
        """The text, or the tokens as numbers."""
        if self.tokenizer:
            return open_tokenizer(self.tokenizer).decode(tokens.tolist())
        return decode_text(tokens) if self.text else " ".join(map(str, tokens.tolist()))

    def stream(self) -> "TextStream":
        """A decoder of tokens that come one chunk after another."""
        return TextStream(self)

    def decode_images(self, tokens: Integer[np.ndarray, "N L"]) -> Pixels:
        """Grey images, 0 black, or colour images; tokens of classes are left out."""
        if self.picture is None:
            raise MemtrainError("these tokens are not images")
        pixels = decode_images(self.split_class(tokens)[1], self.picture)
        return 255 - pixels if self.dark_ink else pixels


class TextStream:
    """Decodes tokens as they come; a character appears when its last byte is there."""

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tokens: list[int] = []
        self._shown = 0

    def add(self, tokens: Integer[np.ndarray, " N"]) -> str:
        """The text that these tokens complete."""
        if not self._codec.text:
            return "".join(f"{token} " for token in tokens.tolist())
        if not self._codec.tokenizer:
            return self._utf8.decode(tokens.astype(np.uint8).tobytes())
        self._tokens += tokens.tolist()
        text = self._decoded()
        new = self._rest(text.rstrip("\ufffd"))  # perhaps the start of a character
        if len(self._tokens) > 2 * _WINDOW and not text.endswith("\ufffd"):  # all of it is shown
            self._tokens = self._tokens[-_WINDOW:]
            self._shown = len(self._decoded())
        return new

    def finish(self) -> str:
        """The rest, with U+FFFD for a character that was not completed."""
        return self._rest(self._decoded()) if self._tokens else self._utf8.decode(b"", final=True)

    def _decoded(self) -> str:
        return open_tokenizer(self._codec.tokenizer).decode(self._tokens)

    def _rest(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


def read_codec(plain: Any, where: str) -> TokenCodec:
    """Read a codec from the JSON of its `asdict`; errors begin with `where`."""
    return structure(plain, TokenCodec, f"{where}: spelling")


def _brief(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 20 else f"{prompt[:17]}...")
