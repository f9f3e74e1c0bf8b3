"""Texts as tokens: the tokenizer sees the training part alone, bytes are counted exactly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Whitespace

from memtrain.config import Stream
from memtrain.data.prepare import prepare_text
from memtrain.data.prepare.cache import prepare_source, prepared_store
from memtrain.data.prepare.tokenize import cut_text
from memtrain.data.store import Store
from memtrain.data.store_reader import open_store
from memtrain.data.stream import StreamTask
from memtrain.data.task import build_task
from memtrain.data.tokenizer import TextTokenizer, open_tokenizer, train_bpe
from memtrain.errors import MemtrainError

LINES = [f"line {n} of a café by the sea\n" for n in range(200)]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(LINES))
    return path


def text_of(store: Store, split: str) -> str:
    return open_tokenizer(store.tokenizer()).decode(store.tokens(split).tolist())


def task_of(store: Store, length: int = 8) -> StreamTask:
    task = build_task(Stream(path=str(store.folder), evaluate_length=length))
    assert isinstance(task, StreamTask)
    return task


def made(path: Path, model: Any, **parts: Any) -> str:
    """A tokenizer.json with these parts."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(path))
    return str(path)


# --------------------------------------------------------------------------------------- prepare


def test_bytes_and_tokens_hold_out_the_same_text(book: Path, tmp_path: Path):
    plain = prepare_text(book, tmp_path / "a")
    store = prepare_text(book, tmp_path / "b", tokenizer="bpe", vocab=290)
    raw = book.read_bytes()
    assert store.meta.vocab_size == 290 and store.meta.text and store.meta.tokenizer is not None
    for split in ("train", "test"):
        assert text_of(store, split).encode() == plain.tokens(split).tobytes()
        assert store.splits[split].text_bytes == plain.splits[split].text_bytes
        assert plain.splits[split].text_bytes == plain.splits[split].tokens
        assert store.splits[split].tokens < plain.splits[split].tokens / 2
    assert (text_of(store, "train") + text_of(store, "test")).encode() == raw
    note = store.meta.notes[-1]
    assert note.startswith("tokenizer of 290 tokens, ") and note.endswith(" bytes per token")


def test_a_bpe_is_trained_on_the_training_part_alone(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("abc abc abd\n" * 90 + "xyzzy xyzzy\n" * 10)
    store = prepare_text(path, tmp_path / "a", tokenizer="bpe", vocab=300)
    whole = train_bpe([path.read_text()], 300)
    assert len(whole.encode([" xyzzy"])[0]) == 1
    own = open_tokenizer(store.tokenizer())
    assert len(own.encode([" xyzzy"])[0]) == 6 and len(own.encode([" abc"])[0]) == 1
    assert store.meta.vocab_size < 300 and "no more pairs repeat" in store.meta.notes[-1]


def test_the_cut_of_a_single_document_is_between_characters(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("é" * 50 + "€" * 50)  # 250 bytes: a tenth begins within a character
    store = prepare_text(path, tmp_path / "a", tokenizer="bpe", vocab=259)
    assert text_of(store, "train") == "é" * 50 + "€" * 42
    assert [store.splits[name].text_bytes for name in ("train", "test")] == [226, 24]


def test_what_a_tokenizer_does_not_keep_is_in_notes(book: Path, tmp_path: Path):
    path = tmp_path / "own.json"
    level = {"pre_tokenizer": ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel()}

    def notes(tokenizer: str) -> tuple[str, ...]:
        store = prepare_text(book, tmp_path / "out", tokenizer=tokenizer, overwrite=True)
        return store.meta.notes[1:-1]

    assert notes("bpe") == ()
    letters = {one: place for place, one in enumerate("abefhilnostyĠĊ0123456789")}
    dropped = made(path, models.BPE(letters, []), **level)  # é: two bytes that it has not
    assert notes(dropped) == (
        "the tokenizer drops or changes 2 different characters of the text: cé",
    )
    words = models.WordLevel({"[UNK]": 0, "line": 1, "sea": 2}, unk_token="[UNK]")
    (note,) = notes(made(path, words, pre_tokenizer=Whitespace()))
    assert note.startswith("1,200 of 1,600 tokens stand for words or characters that the tokenizer")
    whole = made(path, models.BPE({**letters, "c": 99, "Ã": 97, "©": 98}, []), **level)
    assert notes(whole) == ()


def test_documents_stay_documents_and_a_separator_has_no_bytes(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    rows = [f"story {n} of the sea" for n in range(20)]
    path.write_text("".join(f"{json.dumps({'text': row})}\n" for row in rows))
    joined = prepare_text(path, tmp_path / "a", tokenizer="bpe", vocab=300)
    marked = prepare_text(path, tmp_path / "b", tokenizer="bpe", vocab=300, separator=True)
    end = open_tokenizer(marked.tokenizer()).end_of_text
    assert joined.meta.separator is None and marked.meta.separator == end is not None
    for store, extra in ((joined, 0), (marked, 1)):
        tokenizer = open_tokenizer(store.tokenizer())
        starts, tokens = store.starts("train"), store.tokens("train").tolist()
        assert store.splits["train"].documents == 18
        # All rows but the last end with the line end that stands before the divider.
        assert store.splits["train"].text_bytes == sum(len(row) + 1 for row in rows[:18])
        for begin, after, row in zip(starts, starts[1:], rows, strict=False):
            assert tokenizer.decode(tokens[begin : after - extra]) == f"{row}\n"
    assert marked.splits["train"].tokens == joined.splits["train"].tokens + 17


def test_several_texts_are_joined_and_each_keeps_its_held_out_part(tmp_path: Path):
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    paths[0].write_text("a" * 80 + "A" * 20)
    paths[1].write_text("b" * 160 + "B" * 40)
    both = prepare_text(paths, tmp_path / "out", held_out=0.2)
    assert both.tokens("train").tobytes() == b"a" * 80 + b"b" * 160
    assert both.tokens("test").tobytes() == b"A" * 20 + b"B" * 40
    assert both.starts("test").tolist() == [0, 20]
    marked = prepare_text(paths, tmp_path / "marked", held_out=0.2, separator=True)
    assert marked.tokens("test").tobytes() == b"A" * 20 + b"\0" + b"B" * 40
    assert marked.starts("test").tolist() == [0, 21]
    assert marked.splits["test"].text_bytes == 60
    tokens = prepare_text(paths, tmp_path / "bpe", held_out=0.2, tokenizer="bpe", vocab=260)
    assert text_of(tokens, "test") == "A" * 20 + "B" * 40 and tokens.splits["test"].documents == 2
    paths[1].write_text("b")
    with pytest.raises(MemtrainError, match=r"b.txt: has 1 bytes, too few to hold a part out"):
        prepare_text(paths, tmp_path / "short")


def test_a_text_that_is_named_twice_is_refused(tmp_path: Path):
    (tmp_path / "in").mkdir()
    for name in ("in/a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 50)
    folder, a, b = tmp_path / "in", tmp_path / "in" / "a.txt", tmp_path / "b.txt"
    (tmp_path / "link.txt").symlink_to(b)
    for paths, message in (
        ([folder, b, a], "a.txt: is read with .*in too; name each text once"),
        ([a, b, folder], "in: is read with .*a.txt too"),
        ([b, a, tmp_path / "link.txt"], "link.txt: is named twice"),
    ):
        with pytest.raises(MemtrainError, match=message):
            prepare_text(paths, tmp_path / "out")


def test_two_books_are_evaluated_in_pieces_of_both(tmp_path: Path):
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(path.stem * 2000)
    task = task_of(prepare_text(paths, tmp_path / "out"), length=16)
    assert task.held_out_sequences == 22  # 11 of each, of 17 bytes with the last target
    batch = task.held_out(22, torch.Generator().manual_seed(0))
    assert sorted(batch.inputs[:, 0].tolist()) == [97] * 11 + [98] * 11
    assert (batch.inputs == batch.targets).all()  # none crosses from one into the other


def test_a_loaded_tokenizer_is_used_as_it_is(book: Path, tmp_path: Path):
    saved = tmp_path / "mine" / "tokenizer.json"
    saved.parent.mkdir()
    saved.write_text(train_bpe(LINES[:50], 290).text)
    store = prepare_text(book, tmp_path / "a", tokenizer=str(saved))
    assert store.tokenizer() == open_tokenizer(saved.read_text()).text
    assert (store.folder / "tokenizer.json").read_text() == store.tokenizer()
    assert text_of(store, "train") + text_of(store, "test") == book.read_text()
    other = prepare_text(book, tmp_path / "b", tokenizer=str(saved.parent))  # its folder
    assert other.tokens("test").tolist() == store.tokens("test").tolist()


@pytest.mark.parametrize("size", [7, 30, 64])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(size: int):
    tokenizers = pytest.importorskip("tokenizers")
    text = "".join(LINES[:12]) + "\n\n  far\n\nend.\nBegin 'it'\n\n\n- one\n- two \n three\n"
    tokenizer = train_bpe([text * 3], 320)
    assert "".join(cut_text(text, size)) == text
    if size > 30:  # a line fits, so that no piece is cut within one
        pieces = tokenizer.encode(cut_text(text, size))
        assert np.concatenate(pieces).tolist() == tokenizer.encode([text])[0].tolist()
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    modern = tokenizers.Tokenizer.from_str(tokenizer.text)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    levels = [split, tokenizers.pre_tokenizers.ByteLevel(use_regex=False, add_prefix_space=False)]
    modern.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(levels)
    other = TextTokenizer(modern.to_str())
    if size > 30:
        pieces = other.encode(cut_text(text, size))
        assert np.concatenate(pieces).tolist() == other.encode([text])[0].tolist()


# ------------------------------------------------------------------------------------------ store


def test_a_damaged_tokenizer_of_a_store_is_noticed(book: Path, tmp_path: Path):
    store = prepare_text(book, tmp_path / "a", tokenizer="bpe", vocab=300)
    path = store.folder / "tokenizer.json"
    path.write_text(path.read_text().replace("line", "lime"))
    with pytest.raises(MemtrainError, match=r"tokenizer.json is not what was written \(checksum\)"):
        open_store(store.folder)
    path.unlink()
    with pytest.raises(MemtrainError, match=r"tokenizer.json"):
        open_store(store.folder)


def test_a_store_without_the_new_fields_opens(book: Path, tmp_path: Path):
    store = prepare_text(book, tmp_path / "a")
    path = store.folder / "meta.json"
    plain = json.loads(path.read_text())
    assert "tokenizer" not in plain
    for split in plain["splits"].values():
        del split["text_bytes"]
    path.write_text(json.dumps(plain))
    old = open_store(store.folder)
    assert old.meta.tokenizer is None and old.splits["test"].text_bytes is None
    batch = task_of(old).held_out(2, torch.Generator())
    sizes = task_of(old).target_bytes(batch.targets)
    assert sizes is not None and (sizes == 1).all()


def test_a_store_that_lacks_new_options_is_found_again(book: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("memtrain.data.prepare.cache.SETTLED_SECONDS", -1)
    store, _ = prepare_source(book, {}, tmp_path / "data", "text")
    path = store.folder / "options.json"
    made = json.loads(path.read_text())
    for name in ("tokenizer", "vocab", "divider", "split", "subset"):
        del made["options"][name]
    path.write_text(json.dumps(made))
    again, new = prepare_source(book, {}, tmp_path / "data", "text")
    assert again.folder == store.folder and not new
    _, new = prepare_source(book, {"divider": "***"}, tmp_path / "data", "text")
    assert new


def test_a_changed_tokenizer_json_is_noticed(book: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("memtrain.data.prepare.cache.SETTLED_SECONDS", -1)
    saved, root = tmp_path / "tokenizer.json", tmp_path / "data"
    saved.write_text(train_bpe(LINES, 290).text)
    options = {"tokenizer": str(saved)}
    first = prepared_store("text", book, options, root)
    assert prepared_store("text", book, options, root).folder == first.folder
    saved.write_text(train_bpe(LINES, 270).text)
    second = prepared_store("text", book, options, root)
    assert (first.meta.vocab_size, second.meta.vocab_size) == (290, 270)


# ------------------------------------------------------------------------------------------- task


def test_targets_of_byte_level_tokens_have_their_exact_bytes(book: Path, tmp_path: Path):
    store = prepare_text(book, tmp_path / "a", tokenizer="bpe", vocab=300)
    task = task_of(store)
    assert task.unit == "token" and task.spelling.text
    batch = task.held_out(5, torch.Generator().manual_seed(0))
    sizes = task.target_bytes(batch.targets)
    assert sizes is not None
    texts = [task.spelling.decode_text(row.numpy()).encode() for row in batch.targets]
    assert sizes.sum(1).tolist() == [len(text) for text in texts]


def test_targets_of_a_tokenizer_that_changes_the_text_have_its_mean(book: Path, tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(train_bpe(LINES, 300).text)
    tokenizer.normalizer = tokenizers.normalizers.Replace("café", "bar")
    (tmp_path / "t.json").write_text(tokenizer.to_str())
    store = prepare_text(book, tmp_path / "a", tokenizer=str(tmp_path / "t.json"))
    info = store.splits["test"]
    raw = len(book.read_bytes())
    assert (info.text_bytes or 0) + (store.splits["train"].text_bytes or 0) == raw
    sizes = task_of(store).target_bytes(torch.zeros(1, 3, dtype=torch.long))
    assert sizes is not None
    assert sizes.tolist()[0] == pytest.approx([(info.text_bytes or 0) / info.tokens] * 3)


def test_generation_starts_where_a_line_of_a_book_does(book: Path, tmp_path: Path):
    store = prepare_text(book, tmp_path / "a", tokenizer="bpe", vocab=300)
    task = task_of(store)
    assert task.spelling.start_token == open_tokenizer(store.tokenizer()).newline
    assert set(task.spelling.alphabet) == set("".join(LINES).encode())
    with pytest.raises(MemtrainError, match="'Ж' does not occur in the training text"):
        task.spelling.encode_text("Жук")
