"""The meaning of a model's tokens as JSON, for the page."""

import json
from typing import Any

from memtrain.data.codec import TokenCodec
from memtrain.data.tokenizer import TextTokenizer, open_tokenizer
from memtrain.errors import MemtrainError


def describe_vocabulary(codec: TokenCodec) -> dict[str, Any]:
    """The codec as the page's script reads it.

    Raises:
        MemtrainError: the text has a tokenizer whose tokens are not strings of bytes.
    """
    described: dict[str, Any] = {
        "kind": "image" if codec.picture else "text" if codec.text else "numbers",
        "size": codec.vocab_size,
        "writable": codec.writable,
        "start": codec.start_token,
        "startWritten": codec.start_written,
        "unit": codec.unit,
        "alphabet": list(codec.alphabet),
        "classes": list(codec.classes),
        "classCounts": list(codec.class_counts),
    }
    if codec.picture is not None:
        image = codec.picture
        described["image"] = {
            "height": image.height,
            "width": image.width,
            "levels": image.levels,
            "patch": image.patch,
            "palette": [list(colour) for colour in image.palette],
            "darkInk": codec.dark_ink,
        }
    if codec.tokenizer:
        described["bpe"] = _describe_bpe(codec.tokenizer)
    return described


def _describe_bpe(text: str) -> dict[str, Any]:
    """The bytes of each token, one character per byte, and the merges as numbers of tokens."""
    tokenizer, plain = open_tokenizer(text), json.loads(text)
    if not tokenizer.byte_level:
        raise MemtrainError(
            "--html: the tokenizer of this model is not byte-level, and the page decodes only "
            "those; train on text with --option tokenizer bpe"
        )
    strings = [token.decode("latin-1") for token in _token_bytes(tokenizer, plain)]
    reason = _why_not_typed(plain)
    merges: list[tuple[int, int, int]] = []
    if not reason:
        ids = plain["model"]["vocab"]
        pairs = [tuple(m.split(" ")) if isinstance(m, str) else m for m in plain["model"]["merges"]]
        merges = [(ids[left], ids[right], ids[left + right]) for left, right in pairs]
        if not {chr(byte) for byte in range(256)} <= set(strings):
            reason = "its tokenizer has no token for some bytes"
    return {"tokens": strings, "merges": merges, "refused": reason}


def _token_bytes(tokenizer: TextTokenizer, plain: dict[str, Any]) -> list[bytes]:
    """The bytes that each token is decoded to; special tokens show their names."""
    strings = list(tokenizer.byte_strings)
    for token in plain.get("added_tokens") or ():
        strings[token["id"]] = token["content"].encode()
    return strings


def _why_not_typed(plain: dict[str, Any]) -> str:
    """Why the page cannot encode text by this tokenizer.json; empty if it can.

    The page's script has the byte-level BPE of GPT-2, which `--option tokenizer bpe` trains.
    """
    model, before = plain["model"], plain.get("pre_tokenizer") or {}
    plainest = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(name) for name in options):
        return "its tokenizer is not a plain BPE"
    if model.get("ignore_merges") or plain.get("normalizer"):
        return "its tokenizer changes the text before it splits it"
    if any(before.get(name, value) != value for name, value in plainest.items()):
        return "its tokenizer splits text into words in its own way"
    if any(not token["special"] for token in plain.get("added_tokens") or ()):
        return "its tokenizer has added tokens"
    return ""
