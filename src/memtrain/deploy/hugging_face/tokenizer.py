"""The tokenizer.json of a text, with the special tokens that transformers expects."""

import json
from typing import Any, NamedTuple

from memtrain.data.codec import SEPARATOR_TOKEN, TEXT_VOCAB, TokenCodec
from memtrain.data.tokenizer import END_OF_TEXT, TextTokenizer, byte_table
from memtrain.errors import MemtrainError

START_OF_TEXT, PADDING = "<|startoftext|>", "<|pad|>"


class ExportedTokenizer(NamedTuple):
    """A tokenizer.json and its special tokens; those that are in no training data come last."""

    text: str
    """The tokenizer.json."""
    padding: int
    start: int
    end: int
    end_name: str
    vocab_size: int
    """All tokens, special ones included."""


def export_tokenizer(codec: TokenCodec) -> ExportedTokenizer:
    """The tokenizer of a text; its tokens have the numbers that the network was trained on."""
    if codec.tokenizer:
        return _extended(codec)
    return _of_bytes(codec)


def _of_bytes(codec: TokenCodec) -> ExportedTokenizer:
    """A tokenizer whose tokens are the bytes of the text.

    Where texts were separated by byte 0, that byte has a second name, and ends a text.
    """
    separated = SEPARATOR_TOKEN in codec.alphabet
    special = {PADDING: TEXT_VOCAB, START_OF_TEXT: TEXT_VOCAB + 1}
    special[END_OF_TEXT] = SEPARATOR_TOKEN if separated else TEXT_VOCAB + 2
    settings: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
    settings |= {"trim_offsets": True, "use_regex": False}
    plain = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(name, special[name]) for name in sorted(special, key=special.__getitem__)
        ],
        "normalizer": None,
        "pre_tokenizer": settings,
        "post_processor": None,
        "decoder": settings,
        "model": {"type": "BPE", "vocab": byte_table() | special, "merges": []},
    }
    return ExportedTokenizer(
        json.dumps(plain, ensure_ascii=False, indent=1),
        special[PADDING],
        special[START_OF_TEXT],
        special[END_OF_TEXT],
        END_OF_TEXT,
        max(special.values()) + 1,
    )


def _extended(codec: TokenCodec) -> ExportedTokenizer:
    """The model's own tokenizer, which adds nothing to a text, with special tokens behind it."""
    own = TextTokenizer(codec.tokenizer)
    plain = json.loads(own.text)
    plain |= {"truncation": None, "padding": None, "post_processor": None}
    names = [PADDING, START_OF_TEXT]
    if own.end_of_text is None:
        names.append(END_OF_TEXT)
    start = codec.vocab_size
    plain["added_tokens"] += [_added(name, start + place) for place, name in enumerate(names)]
    text = json.dumps(plain, ensure_ascii=False)
    ids = TextTokenizer(text).ids
    if [ids.get(name) for name in names] != list(range(start, start + len(names))):
        raise MemtrainError(
            f"--hf: the numbers of the run's tokenizer have gaps below {start}, or it has tokens "
            f"named {' or '.join(names)}, so that special tokens cannot be added; train with "
            "another tokenizer"
        )
    end = ids[END_OF_TEXT] if own.end_of_text is None else own.end_of_text
    name = next(name for name, token in ids.items() if token == end)
    return ExportedTokenizer(text, ids[PADDING], ids[START_OF_TEXT], end, name, start + len(names))


def _added(name: str, token: int) -> dict[str, Any]:
    """A special token of a tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": name, **flags, "special": True}
