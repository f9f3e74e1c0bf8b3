"""Tokens that exist already: nanoGPT's files, and tokens with their tokenizer."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from memtrain.data.prepare import prepare_path, prepare_tokens
from memtrain.data.prepare.cache import prepare_source, prepared_store
from memtrain.data.prepare.file_kind import kind_of
from memtrain.data.tokenizer import END_OF_TEXT, open_tokenizer, train_bpe
from memtrain.errors import MemtrainError


@pytest.fixture
def nanogpt(tmp_path: Path) -> Path:
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    np.arange(100, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(90, 110, dtype=np.uint16).tofile(folder / "val.bin")
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(["the hen and the other hens ate café crumbs\n"] * 9, 280).text)
    return path


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(MemtrainError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nanogpt_files_are_train_and_test(nanogpt: Path, tmp_path: Path):
    assert kind_of(nanogpt).recipes == ("tokens",)
    store = prepare_path(nanogpt, tmp_path / "out")
    assert store.tokens("train").tolist() == [*range(100)]
    assert store.tokens("test").tolist() == [*range(90, 110)]
    assert store.meta.vocab_size == 110 and not store.meta.text
    assert store.splits["test"].text_bytes is None
    assert "both read as uint16" in store.meta.notes[0]
    assert "tokens are generated as numbers; --option tokenizer" in store.meta.notes[1]
    assert prepare_tokens(nanogpt, tmp_path / "b", vocab_size=50304).meta.vocab_size == 50304


def test_a_pickle_is_never_loaded(nanogpt: Path, tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    (nanogpt / "meta.pkl").write_bytes(pickle.dumps(Evil()))
    store = prepare_path(nanogpt, tmp_path / "out")
    assert "meta.pkl is not read: a pickle can run any code" in store.meta.notes
    assert not (tmp_path / "ran").exists()


def test_the_text_beside_nanogpt_files_is_named(nanogpt: Path, tmp_path: Path):
    (nanogpt / "input.txt").write_text("First Citizen:\nBefore we proceed\n")
    assert kind_of(nanogpt).recipes == ("tokens", "text")
    notes = prepare_path(nanogpt, tmp_path / "a").meta.notes
    assert "it holds text too: memtrain train text" in notes[0]
    assert prepared_store("text", nanogpt, {}, tmp_path / "data").meta.text


def test_tokens_with_their_tokenizer_are_a_text(nanogpt: Path, saved: Path, tmp_path: Path):
    tokenizer = open_tokenizer(saved.read_text())
    train, test = tokenizer.encode(["the café hens", "other crumbs"])
    end = np.array([tokenizer.end_of_text], np.uint32)
    np.concatenate([train, end, train]).astype(np.uint16).tofile(nanogpt / "train.bin")
    np.concatenate([test, end]).astype(np.uint16).tofile(nanogpt / "val.bin")
    store, _ = prepare_source(nanogpt, {"tokenizer": str(saved)}, tmp_path / "data")
    assert store.meta.text and store.meta.vocab_size == 280
    assert store.starts("train").tolist() == [0, len(train) + 1]
    assert store.starts("test").tolist() == [0]
    assert store.splits["train"].text_bytes == 2 * len("the café hens".encode())
    assert store.splits["test"].text_bytes == len("other crumbs")
    text = tokenizer.decode(store.tokens("train").tolist())
    assert text == f"the café hens{END_OF_TEXT}the café hens"
    for recipe in ("tokens", "text"):
        assert prepared_store(recipe, store.folder, {}, tmp_path).folder == store.folder


def test_an_array_of_tokens_with_its_tokenizer_is_a_text(saved: Path, tmp_path: Path):
    tokens = open_tokenizer(saved.read_text()).encode(["the hen ate crumbs\n" * 20])[0]
    np.save(tmp_path / "a.npy", tokens.astype(np.int64))
    store = prepare_tokens(tmp_path / "a.npy", tmp_path / "out", tokenizer=str(saved))
    assert store.meta.text
    assert sum(info.text_bytes or 0 for info in store.splits.values()) == 19 * 20


def test_wrong_nanogpt_files_and_options_are_one_line(nanogpt: Path, saved: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert "val.bin is the held-out part; leave it out" in refusal(
        prepare_tokens, nanogpt, out, held_out=0.2
    )
    np.array([279, 280], np.uint16).tofile(nanogpt / "val.bin")
    line = refusal(prepare_tokens, nanogpt, out, tokenizer=str(saved))
    assert "holds the token 280, and the tokenizer has 280; name the tokenizer.json" in line
    line = refusal(prepare_tokens, nanogpt, out, vocab_size=281, tokenizer=str(saved))
    assert "the tokenizer has 280" in line
    (nanogpt / "val.bin").write_bytes(b"abc")
    assert "val.bin: has 3 bytes, which are no tokens of two bytes" in refusal(
        prepare_tokens, nanogpt, out
    )
    (nanogpt / "val.bin").write_bytes(b"")
    assert "val.bin: has 0 bytes" in refusal(prepare_tokens, nanogpt, out)
    assert not out.exists()
