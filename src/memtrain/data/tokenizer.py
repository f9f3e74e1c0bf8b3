"""Tokenizers of text: a tokenizer.json, read and trained by the `tokenizers` package.

A tokenizer is handled as the text of its tokenizer.json, which stores and checkpoints hold;
`open_tokenizer` makes it usable. The package is imported when the first tokenizer is opened.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt32

from memtrain.errors import MemtrainError, describe_error

MAX_TOKENIZER_BYTES = 2**24
"""Of a tokenizer.json, written compactly: GPT-2's has 1.3 million."""
END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
"""Names of the token between documents, in the order of preference."""
SMALLEST_VOCAB = 257
"""The 256 bytes, and the end of a text."""


class TextTokenizer:
    """A tokenizer that is ready for use. Padding, cutting and added special tokens are off."""

    def __init__(self, text: str) -> None:
        package = _package()
        try:
            self._tokenizer = package.Tokenizer.from_str(text)
        except Exception as error:  # its own errors have no common class
            raise MemtrainError(
                f"is not the tokenizer.json of the tokenizers package ({describe_error(error)})"
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # their names in a text are only text
        self.ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        """The token of each name, special tokens included."""
        if not self.ids:
            raise MemtrainError("has no tokens; train it first")
        self.vocab_size = max(self.ids.values()) + 1
        self.end_of_text = next((self.ids[name] for name in ENDS if name in self.ids), None)
        """The token between documents, if there is one."""
        decoder = json.loads(text).get("decoder") or {}
        steps = [decoder, *(decoder.get("decoders") or ())]
        self.byte_level = any(step.get("type") == "ByteLevel" for step in steps)
        """Whether tokens are strings of bytes, so that any text can be encoded."""

    @property
    def text(self) -> str:
        """Its tokenizer.json, compactly written."""
        return self._tokenizer.to_str()

    def encode(self, texts: Sequence[str]) -> list[UInt32[np.ndarray, " N"]]:
        """The tokens of each text."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    @cached_property
    def newline(self) -> int | None:
        """The token of a line end, if it is one token."""
        found = self.encode(["\n"])[0]
        return int(found[0]) if len(found) == 1 else None

    @cached_property
    def unknown(self) -> int | None:
        """The token of what the tokenizer does not know, if it has one."""
        name = getattr(self._tokenizer.model, "unk_token", None)
        return self.ids.get(name) if isinstance(name, str) else None

    @cached_property
    def byte_strings(self) -> list[bytes]:
        """The bytes of every token of a byte-level tokenizer; special tokens have none."""
        strings, table = [b""] * self.vocab_size, byte_table()
        added = self._tokenizer.get_added_tokens_decoder()
        for name, token in self.ids.items():
            if token in added:
                strings[token] = b"" if added[token].special else name.encode()
            else:
                strings[token] = bytes(table[one] for one in name if one in table)
        return strings

    @cached_property
    def byte_lengths(self) -> Int64[np.ndarray, " V"] | None:
        """The number of bytes of every token; None unless the tokenizer is byte-level."""
        return np.array([len(one) for one in self.byte_strings]) if self.byte_level else None


@lru_cache(maxsize=4)
def open_tokenizer(text: str) -> TextTokenizer:
    """The tokenizer of a tokenizer.json.

    Raises:
        MemtrainError: the package is missing, or the text is something else.
    """
    return TextTokenizer(text)


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE; it has fewer tokens than `vocab_size` if no more pairs repeat."""
    package = _package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return open_tokenizer(tokenizer.to_str())


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise MemtrainError(
            'tokenizer: needs the tokenizers package: pip install "memtrain[data]"'
        ) from None
    return tokenizers


def byte_table() -> dict[str, int]:
    """The byte of each character in the tokens of byte-level tokenizers.

    Bytes that are visible in Latin-1 stand for themselves, the others are numbered from 256 on.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
