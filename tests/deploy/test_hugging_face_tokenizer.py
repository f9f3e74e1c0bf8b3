"""The exported tokenizer gives the numbers that the network was trained on, for any text."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hugging_face_testing import SEPARATED, exported
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from memtrain.data.codec import TokenCodec, decode_text
from memtrain.data.tokenizer import END_OF_TEXT, TextTokenizer, train_bpe
from memtrain.deploy.hugging_face.tokenizer import export_tokenizer
from memtrain.errors import MemtrainError
from model_testing import TEXT, decided_model

TEXTS = (
    "Once upon a time, there was a cat.",
    " leading and  double spaces \n\n\tand lines\r\n",
    "naïve café, Ünïcödé ĀĊĠ",  # the last three are how byte-level tokenizers write bytes
    "日本語と한국어 🙂🏳️‍🌈 \u0301a",
    "\x00\x01\x7f\u200b\ufeff",
)


def bpe(texts: tuple[str, ...] = TEXTS) -> TokenCodec:
    tokenizer = train_bpe(texts, 300)
    return replace(TEXT, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.text)


@pytest.mark.parametrize("codec", [TEXT, SEPARATED, bpe()], ids=["bytes", "separated", "bpe"])
def test_tokens_are_those_of_the_codec_and_decode_to_the_text(tmp_path: Path, codec: TokenCodec):
    exported(tmp_path, decided_model(codec))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    spelling = replace(codec, alphabet=())  # which refuses characters that are not in it
    for text in TEXTS:
        tokens = tokenizer(text).input_ids
        assert tokens == spelling.encode_text(text).tolist()
        assert tokenizer.decode(tokens) == (
            text if codec is not SEPARATED else text.replace("\0", END_OF_TEXT)
        )
    both = tokenizer([TEXTS[0], "It"], padding=True)
    assert both.input_ids[1][:2] == [tokenizer.pad_token_id] * 2
    assert sum(both.attention_mask[1]) == len(spelling.encode_text("It"))


def test_bytes_that_are_no_text_decode_as_in_memtrain():
    tokenizer = Tokenizer.from_str(export_tokenizer(TEXT).text)
    random = np.random.default_rng(0)
    for _ in range(200):
        tokens = random.integers(0, 256, 12)
        assert tokenizer.decode(tokens.tolist()) == decode_text(tokens)


def test_special_tokens_come_after_the_vocabulary(tmp_path: Path):
    exported(tmp_path, decided_model())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 259
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert special == [256, 257, 258]
    assert tokenizer.decode([72, *special, 105], skip_special_tokens=True) == "Hi"
    assert tokenizer("<|pad|>").input_ids == [256]


def test_the_byte_between_texts_is_the_end_of_a_text(tmp_path: Path):
    exported(tmp_path, decided_model(SEPARATED))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 0 and len(tokenizer) == 258
    assert tokenizer("a<|endoftext|>b\0").input_ids == [97, 0, 98, 0]
    assert tokenizer.decode([97, 0], skip_special_tokens=True) == "a"


def test_a_tokenizer_with_an_end_of_text_keeps_it():
    codec = bpe()
    found = export_tokenizer(codec)
    assert found.end == TextTokenizer(codec.tokenizer).end_of_text
    assert found.vocab_size == codec.vocab_size + 2


def test_a_tokenizer_without_an_end_of_text_gets_one_and_adds_nothing_to_a_text():
    plain = json.loads(bpe().tokenizer)
    plain["added_tokens"] = []
    names = sorted(plain["model"]["vocab"], key=plain["model"]["vocab"].__getitem__)
    names.remove(END_OF_TEXT)
    plain["model"]["vocab"] = {name: number for number, name in enumerate(names)}
    plain["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "a", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"a": {"id": "a", "ids": [names.index("a")], "tokens": ["a"]}},
    }
    codec = replace(TEXT, vocab_size=len(names), tokenizer=json.dumps(plain))
    found = export_tokenizer(codec)
    assert found.end == len(names) + 2 and found.vocab_size == len(names) + 3
    encoded = Tokenizer.from_str(found.text).encode("a cat").ids
    assert encoded == codec.encode_text("a cat").tolist()


def test_numbers_with_gaps_are_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    codec = replace(TEXT, vocab_size=6, start_token=0, tokenizer=tokenizer.to_str())
    with pytest.raises(MemtrainError, match="gaps below 6"):
        export_tokenizer(codec)
