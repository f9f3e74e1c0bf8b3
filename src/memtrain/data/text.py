"""Text as tokens and back: one token a byte.

A text may hold several documents. They are split at lines that hold nothing but
`<|endoftext|>`, as in TinyStories; such a line is never part of a document.
"""

import re
from array import array
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from memtrain.errors import MemtrainError, did_you_mean

TEXT_VOCAB = 256
SEPARATOR_TOKEN = 0
TEXT_MODES = ("bytes", "ascii")

_SEPARATOR = re.compile(rb"^<\|endoftext\|>[ \t]*(?:\r?\n|\r?\Z)", re.MULTILINE)
_NON_ASCII = bytes(range(128, 256))
_LEAD_BYTE = 192  # in UTF-8 a character beyond ASCII has one byte from here on
_BLOCK = 2**24


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text as tokens."""

    tokens: UInt8[np.ndarray, " N"]
    starts: Int64[np.ndarray, " K"]
    """Where each document starts."""
    dropped_characters: int
    dropped_bytes: int
    kept_bytes: int
    """Beyond ASCII, in mode "bytes"."""


def encode_text(
    raw: bytes | bytearray, mode: str = "bytes", *, separator: bool = False
) -> EncodedText:
    """Turn a text into tokens. It takes little more memory than the text and the tokens.

    Args:
        raw: UTF-8, or anything else in mode "bytes".
        mode: "bytes" keeps every byte of every document, "ascii" drops characters beyond ASCII,
            as the paper does.
        separator: put token 0 between documents; without it they follow one another directly,
            as in the paper.
    """
    if mode not in TEXT_MODES:
        raise MemtrainError(f"mode={mode!r}: {did_you_mean(mode, TEXT_MODES)}")
    beyond, characters = _count_from(raw, 128), _count_from(raw, _LEAD_BYTE)
    dropped = mode == "ascii" and beyond > 0
    text = raw.translate(None, _NON_ASCII) if dropped else raw
    if separator and SEPARATOR_TOKEN in text:
        raise MemtrainError("separator: the text holds byte 0 itself; leave the separator off")

    begins, ends = array("q", [0]), array("q")
    for line in _SEPARATOR.finditer(text):
        ends.append(line.start())
        begins.append(line.end())
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
    )


def _count_from(raw: bytes | bytearray, code: int) -> int:
    """How many bytes are at least so high."""
    whole = np.frombuffer(raw, np.uint8)
    parts = (whole[start : start + _BLOCK] for start in range(0, len(whole), _BLOCK))
    return sum(int((part >= code).sum()) for part in parts)


def decode_text(tokens: Integer[np.ndarray, " N"]) -> str:
    """The text that tokens spell; what is no UTF-8 becomes U+FFFD."""
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < TEXT_VOCAB):
        raise MemtrainError(
            f"tokens {tokens.min()}..{tokens.max()} are no text: must be 0..{TEXT_VOCAB - 1}"
        )
    return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
