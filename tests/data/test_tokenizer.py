"""Tokenizers: any text survives, tokens have exact bytes, streams break no character."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.data.codec import TokenCodec
from memtrain.data.tokenizer import END_OF_TEXT, TextTokenizer, open_tokenizer, train_bpe
from memtrain.errors import MemtrainError

TEXTS = ["the hen and the other hens\nate café crumbs.\n" * 9, "then they left the barn\n" * 9]


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_bpe(TEXTS, 280)


def codec_of(tokenizer: TextTokenizer) -> TokenCodec:
    size = tokenizer.vocab_size
    return TokenCodec(vocab_size=size, start_token=0, text=True, tokenizer=tokenizer.text)


@pytest.fixture(scope="module")
def words() -> TextTokenizer:
    """A tokenizer of words in lower case, which loses spaces and unknown words."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "hen": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return open_tokenizer(tokenizer.to_str())


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=60, deadline=None)
def test_every_text_survives_a_trained_bpe_with_exact_bytes(bpe: TextTokenizer, text: str):
    tokens = bpe.encode([text])[0]
    assert bpe.decode(tokens.tolist()) == text
    assert b"".join(bpe.byte_strings[token] for token in tokens) == text.encode()
    assert bpe.byte_lengths is not None and bpe.byte_lengths[tokens].sum() == len(text.encode())


def test_a_bpe_merges_frequent_pairs_up_to_the_size_that_was_asked_for(bpe: TextTokenizer):
    assert bpe.vocab_size == 280 and len(bpe.encode([" the"])[0]) == 1
    few = train_bpe(["abab"], 300)
    assert few.vocab_size == 258  # 256 bytes, the end of a text, and the pair that repeats


def test_training_gives_the_same_tokenizer_in_another_process(bpe: TextTokenizer):
    code = (
        "import sys, json\n"
        "from memtrain.data.tokenizer import train_bpe\n"
        "sys.stdout.write(train_bpe(json.loads(sys.stdin.read()), 280).text)"
    )
    command = [sys.executable, "-c", code]
    other = subprocess.run(
        command, input=json.dumps(TEXTS), capture_output=True, text=True, check=True
    )
    assert other.stdout == bpe.text


def test_the_name_of_a_special_token_in_a_text_is_only_text(bpe: TextTokenizer):
    tokens = bpe.encode([f"a {END_OF_TEXT} b"])[0]
    assert bpe.end_of_text is not None and bpe.end_of_text not in tokens.tolist()
    assert bpe.byte_strings[bpe.end_of_text] == b""
    assert bpe.decode([bpe.end_of_text]) == END_OF_TEXT


def test_padding_cutting_and_added_tokens_of_a_file_are_off(bpe: TextTokenizer):
    tokenizers = pytest.importorskip("tokenizers")
    other = tokenizers.Tokenizer.from_str(bpe.text)
    other.enable_truncation(3)
    other.enable_padding(length=8)
    other.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    same, text = open_tokenizer(other.to_str()), ["then they left"]
    assert same.encode(text)[0].tolist() == bpe.encode(text)[0].tolist()


def test_tokens_of_words_have_no_bytes_and_unknown_ones_are_refused(words: TextTokenizer):
    assert not words.byte_level and words.byte_lengths is None
    assert words.unknown == 0 and words.newline is None and words.end_of_text is None
    codec = codec_of(words)
    assert codec.encode_text("The hen").tolist() == [1, 2]
    with pytest.raises(MemtrainError, match="the model's tokenizer does not know; leave them out"):
        codec.encode_text("the cow")


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_stream_shows_whole_characters_and_all_of_them(bpe: TextTokenizer, data):
    """Whatever tokens a model samples, and however they are cut."""
    tokens = np.array(data.draw(st.lists(st.integers(0, bpe.vocab_size - 1), max_size=200)), int)
    codec = codec_of(bpe)
    stream, shown = codec.stream(), []
    for place in range(0, len(tokens), step := data.draw(st.integers(1, 4))):
        shown.append(stream.add(tokens[place : place + step]))
        assert not shown[-1].endswith("\ufffd")
    assert "".join([*shown, stream.finish()]) == codec.decode_text(tokens)


def test_a_stream_waits_for_the_end_of_a_character(bpe: TextTokenizer):
    tokens = bpe.encode(["a😀b"])[0]
    stream = codec_of(bpe).stream()
    assert len(tokens) == 6  # the emoji is no token
    shown = [stream.add(tokens[place : place + 1]) for place in range(6)]
    assert shown == ["a", "", "", "", "😀", "b"] and stream.finish() == ""


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": {"type": "BPE"}}', "not json"])
def test_what_is_no_tokenizer_is_one_line(text: str):
    with pytest.raises(MemtrainError, match="is not the tokenizer.json|has no tokens") as caught:
        open_tokenizer(text)
    assert "\n" not in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch, bpe: TextTokenizer):
    open_tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MemtrainError, match=r'pip install "memtrain\[data\]"'):
        codec_of(bpe).encode_text("hen")
    with pytest.raises(MemtrainError, match=r'pip install "memtrain\[data\]"'):
        train_bpe(TEXTS, 300)
