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

    Where byte 0 is between the texts of the training data, it is the end of a text.
    """
    vocab = byte_table()
    added = [_added(PADDING, TEXT_VOCAB), _added(START_OF_TEXT, TEXT_VOCAB + 1)]
    normalizer, end = None, TEXT_VOCAB + 2
    if SEPARATOR_TOKEN in codec.alphabet:
        # A token can have one name: in a text, the byte is replaced by it.
        end, name = SEPARATOR_TOKEN, chr(SEPARATOR_TOKEN)
        vocab = {name: byte for name, byte in vocab.items() if byte != end}
        normalizer = {"type": "Replace", "pattern": {"String": name}, "content": END_OF_TEXT}
    added.append(_added(END_OF_TEXT, end) | {"normalized": normalizer is not None})
    vocab |= {one["content"]: one["id"] for one in added}
    byte_level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
    byte_level |= {"trim_offsets": True, "use_regex": False}
    plain = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda one: one["id"]),
        "normalizer": normalizer,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return ExportedTokenizer(
        json.dumps(plain, ensure_ascii=False),
        padding=TEXT_VOCAB,
        start=TEXT_VOCAB + 1,
        end=end,
        end_name=END_OF_TEXT,
        vocab_size=len(vocab),
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
