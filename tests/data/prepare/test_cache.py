"""`--data PATH`: prepared once, found again, never mistaken for something else."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from memtrain.config import Stream
from memtrain.data.prepare import cache, prepare_text
from memtrain.data.prepare.cache import (
    prepare_source,
    prepared_like,
    prepared_store,
    prepared_stream,
)
from memtrain.data.store import Store
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError

BOOK = "it was a dark and stormy night\n" * 50
OTHER = "it was a very bright morning..\n" * 50
assert len(BOOK) == len(OTHER)


@pytest.fixture
def book(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)  # what was just written counts
    Path("book.txt").write_text(BOOK)
    return Path("book.txt")


def ready(path: Path | str, recipe: str = "text", **options) -> Store:
    def report(line: str) -> None:
        print(line, file=sys.stderr)

    return prepared_store(recipe, Path(path), options, Path("data"), report)


def text_of(store: Store) -> bytes:
    return bytes(store.tokens("train")) + bytes(store.tokens("test"))


def stores() -> list[str]:
    return sorted(path.name for path in Path("data").iterdir())


def test_a_file_is_prepared_once_until_it_changes(book: Path, capsys, monkeypatch):
    first = ready(book)
    output = capsys.readouterr().err
    assert output == f"prepared {first.folder}: 1,395 train and 155 test tokens\n"
    assert first.folder.parent == Path("data") and len(first.folder.name) == len("book-12345678")
    with monkeypatch.context() as patch:
        patch.setattr("memtrain.data.prepare.user_files.read_text", None)  # it is not read again
        again = ready(book)
    assert again == first and not capsys.readouterr().err
    book.write_text(BOOK * 2)
    second = ready(book)
    assert text_of(second) == BOOK.encode() * 2 and "prepared" in capsys.readouterr().err
    assert text_of(open_store(first.folder, verify=True)) == BOOK.encode()  # runs keep theirs
    book.write_text(BOOK)
    assert ready(book).folder == first.folder and not capsys.readouterr().err
    assert len(stores()) == 2


@pytest.mark.parametrize("in_a_folder", [False, True])
def test_a_changed_source_with_an_older_date_and_the_same_size_is_detected(
    book: Path, in_a_folder: bool
):
    """As cp -p, rsync -a, tar and unzip leave it."""
    source = book
    if in_a_folder:
        source = Path("texts")
        source.mkdir()
        (source / "b.txt").write_text(BOOK)
        book = book.rename(source / "a.txt")
    old = ready(source)
    Path("new.txt").write_text(OTHER)
    os.utime("new.txt", (1, 1))
    shutil.copy2("new.txt", book)
    assert book.stat().st_mtime == 1
    found = ready(source)
    assert OTHER.encode() in text_of(found) and found.folder != old.folder
    os.utime(book, (2, 2))  # only its date: the same store
    assert ready(source).folder == found.folder


def test_a_source_that_changed_just_now_is_read_again(book: Path, monkeypatch, capsys):
    """It may change once more within one tick of the file system's clock."""
    monkeypatch.setattr(cache, "SETTLED_SECONDS", 1000.0)
    first = ready(book)
    with book.open("r+") as file:
        file.write(OTHER)
    assert cache.source_signature(book) == ""
    assert json.loads((first.folder / "options.json").read_text())["sources"] == {}
    assert text_of(ready(book)) == OTHER.encode()
    assert text_of(first) == BOOK.encode()


def test_other_options_make_another_store_and_omitted_ones_are_defaults(book: Path, capsys):
    half = ready(book, held_out=0.5)
    assert half.splits["test"].tokens == len(BOOK) // 2
    default = ready(book)
    assert default.splits["test"].tokens == len(BOOK) // 10
    assert ready(book, held_out=0.1).folder == default.folder  # the default, given explicitly
    assert ready(book, held_out=0.5).folder == half.folder
    assert ready(book, mode="ascii").folder != default.folder  # though its tokens are the same
    assert len(stores()) == 3
    with pytest.raises(MemtrainError, match="did you mean held_out"):
        ready(book, hold_out=0.5)


def test_a_store_records_how_it_was_prepared(book: Path):
    folder = ready(book, held_out=0.5).folder
    made = json.loads((folder / "options.json").read_text())
    assert made["options"] == {
        "mode": "bytes",
        "tokenizer": None,
        "vocab": None,
        "separator": False,
        "divider": None,
        "column": None,
        "split": None,
        "subset": None,
        "held_out": 0.5,
    }
    assert made["kind"] == "text" and made["key"].startswith(folder.name[-8:])
    assert list(made["sources"]) == [str(book.resolve())]
    for content in ("{", "[]", '{"sources": 3}', '{"key": 1, "sources": [1]}'):
        (folder / "options.json").write_text(content)  # then it is not known
        with pytest.raises(MemtrainError, match="holds other data; rename it, or remove it"):
            ready(book, held_out=0.5)


def test_a_damaged_store_is_prepared_again(book: Path):
    folder = ready(book).folder
    (folder / "train.bin").write_bytes(b"short")
    assert text_of(ready(book)) == BOOK.encode()
    (folder / "test.bin").unlink()
    assert text_of(ready(book)) == BOOK.encode()
    shutil.rmtree(folder)
    assert ready(book).folder == folder
    assert stores() == [folder.name]


def test_prepared_data_is_used_unchanged(book: Path):
    folder = ready(book).folder
    assert ready(folder).folder == folder
    with pytest.raises(MemtrainError, match="is prepared already"):
        ready(folder, held_out=0.5)
    with pytest.raises(MemtrainError, match="holds text; memtrain train text --data"):
        ready(folder, "images")


def test_stores_of_earlier_versions_are_still_accepted_by_name(book: Path):
    prepare_text(book, Path("data/book"))
    Path("data/book/options.json").write_text('{"held_out": 0.5}\n')
    assert ready("data/book").folder == Path("data/book")
    assert ready(book).folder != Path("data/book")


def test_sources_with_the_same_name_have_separate_stores(book: Path, capsys):
    Path("other").mkdir()
    Path("other/book.txt").write_text(OTHER)
    mine, theirs = ready(book), ready("other/book.txt")
    assert (text_of(mine), text_of(theirs)) == (BOOK.encode(), OTHER.encode())
    shutil.copy(book, "other/book.txt")  # the same content: the same store
    capsys.readouterr()
    for _ in range(2):
        assert ready("other/book.txt").folder == mine.folder == ready(book.resolve()).folder
    assert not capsys.readouterr().err and len(stores()) == 2


def test_another_split_makes_another_store(book: Path):
    for name, texts in {"x": [BOOK, BOOK], "y": [BOOK + BOOK[:31], BOOK[31:]]}.items():
        (Path(name) / "same").mkdir(parents=True)
        for number, text in enumerate([*texts, "the end\n"]):
            (Path(name) / "same" / f"{number}.txt").write_text(text)
    one, two = ready("x/same"), ready("y/same")
    assert text_of(one) == text_of(two) and one.folder != two.folder


def test_the_recipes_of_data_sets_refuse_another_kind(book: Path):
    folder = ready(book).folder
    assert ready(folder, "tinystories").folder == folder
    with pytest.raises(MemtrainError, match="holds text; memtrain train text --data"):
        ready(folder, "mnist")


def test_a_data_set_given_as_a_folder_is_named_after_it(book: Path):
    for split in ("train", "valid"):
        Path("stories").mkdir(exist_ok=True)
        Path(f"stories/{split}.txt").write_text(BOOK)
    store = ready("stories", "tinystories")
    assert store.folder.name.startswith("tinystories-")
    assert ready("stories", "tinystories", separator=True).folder != store.folder


def test_an_unrelated_folder_under_data_is_kept(book: Path):
    Path("data/mine").mkdir(parents=True)
    for name in ("a", "b"):
        Path(f"data/mine/{name}.txt").write_text(BOOK)
    folder = ready("data/mine").folder
    assert folder.parent == Path("data") and folder.name.startswith("mine-")
    assert sorted(path.name for path in Path("data/mine").iterdir()) == ["a.txt", "b.txt"]
    assert stores() == ["mine", folder.name]


def test_only_stores_are_replaced(book: Path):
    folder = ready(book).folder
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.txt").write_text("ten years")
    with pytest.raises(MemtrainError, match="holds other data"):
        ready(book)
    assert stores() == [folder.name] and (folder / "thesis.txt").read_text() == "ten years"


def test_preparing_by_detected_kind_finds_the_same_store(book: Path):
    store, new = prepare_source(book, {}, Path("data"))
    assert new and ready(book).folder == store.folder
    assert prepare_source(book, {"held_out": 0.1}, Path("data")) == (store, False)


def test_text_keeps_the_recipes_evaluation_length(book: Path):
    stream = prepared_stream("text", book, Stream(path="x", evaluate_length=40), {})
    assert stream == Stream(path=str(ready(book).folder), evaluate_length=40)


def test_missing_source_is_named(book: Path, monkeypatch, tmp_path: Path):
    with pytest.raises(MemtrainError, match="data=gone.txt: no such file or folder"):
        ready("gone.txt")
    url = "https://www.example.org/files/11-0.txt"
    with pytest.raises(MemtrainError, match=f"data={url}: URLs are not read"):
        ready(url)
    with pytest.raises(MemtrainError, match="no such file"):
        ready("~nobody-of-this-name/book.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert text_of(ready("~/book.txt")) == BOOK.encode()


def test_a_named_pipe_is_refused(book: Path):
    os.mkfifo("a.npy")
    with pytest.raises(MemtrainError, match="a.npy: is not a regular file"):
        ready("a.npy", "tokens")
    assert not Path("data").exists() or not stores()


def test_a_failure_names_the_folder_and_leaves_no_files(book: Path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memtrain.data.prepare.store_writer.sync", full)
    with pytest.raises(MemtrainError, match=r"data/book: No space left on device; nothing is left"):
        ready(book)
    assert stores() == []


# --------------------------------------------------------------------------- several at once

PREPARE = """
import json, sys, time
from pathlib import Path
from memtrain.data.prepare.cache import prepared_store
from memtrain.data.prepare import user_files as own
read = own.read_text
def slow(*arguments, **options):
    time.sleep(0.3)
    return read(*arguments, **options)
own.read_text = slow
held_out = json.loads(sys.argv[1])
sys.stdin.read()
def report(line):
    print(line, file=sys.stderr)
store = prepared_store("text", Path("book.txt"), {"held_out": held_out}, Path("data"), report)
print(json.dumps([str(store.folder), store.splits["test"].tokens]))
"""


def test_processes_can_prepare_one_source_concurrently(book: Path):
    """The same options: one prepares, the other waits and says so. Other options: side by side."""
    time.sleep(2.1)  # until the source has settled
    shares = [0.1, 0.1, 0.3, 0.5]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARE, json.dumps(share)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.close()  # all go
        process.stdin = None
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * 4, ended
    found = [json.loads(out) for out, _ in ended]
    assert [tokens for _, tokens in found] == [round(share * len(BOOK)) for share in shares]
    assert len({folder for folder, _ in found}) == 3 and found[0] == found[1]
    assert len(stores()) == 3  # no drafts and locks
    for folder, _ in found:
        assert text_of(open_store(Path(folder), verify=True)) == BOOK.encode()
    lines = [err.splitlines() for _, err in ended]
    twins = sorted(line.split(" ")[0] for one in lines[:2] for line in one)
    assert twins in (["prepared"], ["prepared", "waiting"])  # or one came when all was done
    assert not any("already" in line for one in lines for line in one)


def test_a_store_published_concurrently_is_used(book: Path, monkeypatch, capsys):
    """From another folder, say, with another lock."""
    from memtrain.data.prepare import cache as module

    shutil.copytree(ready(book).folder, "saved")
    folder = ready(book).folder
    shutil.rmtree(folder)
    store_key = module.store_key

    def appears(*args):
        key = store_key(*args)
        if not folder.exists():
            shutil.copytree("saved", folder)
        return key

    monkeypatch.setattr(module, "store_key", appears)
    capsys.readouterr()
    assert ready(book).folder == folder and not capsys.readouterr().err
    assert stores() == [folder.name]


def test_tokens_and_their_options(book: Path):
    np.save("row.npy", np.arange(300) % 7)
    one, two = ready("row.npy", "tokens"), ready("row.npy", "tokens", vocab_size=9)
    assert one.folder != two.folder and (one.meta.vocab_size, two.meta.vocab_size) == (7, 9)


def test_other_tokens_are_prepared_with_the_vocabulary_of_a_run(tmp_path: Path):
    for name, highest in (("own", 9), ("few", 7), ("more", 12)):
        np.save(tmp_path / f"{name}.npy", np.arange(60) % (highest + 1))
    own = prepared_store("tokens", tmp_path / "own.npy", {}, tmp_path / "data")
    few = prepared_like(own, tmp_path / "few.npy", tmp_path / "data")
    assert few.meta.vocab_size == own.meta.vocab_size == 10
    assert prepared_like(own, few.folder, tmp_path / "data").folder == few.folder
    with pytest.raises(MemtrainError, match="vocab_size=10: .*more.npy holds the token 12"):
        prepared_like(own, tmp_path / "more.npy", tmp_path / "data")
