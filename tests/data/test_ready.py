"""`--data PATH`: prepared once, found again, never mistaken for something else."""

import os
from pathlib import Path

import pytest

from memtrain.config import Stream
from memtrain.data.ready import ready_store, ready_stream
from memtrain.errors import MemtrainError

BOOK = "it was a dark and stormy night\n" * 50


@pytest.fixture
def book(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)
    return Path("book.txt")


def ready(path: Path | str, recipe: str = "text", **options):
    return ready_store(recipe, Path(path), options, Path("data"))


def test_a_file_is_prepared_once_and_again_when_it_changed(book: Path, capsys):
    first = ready(book)
    assert first.folder == Path("data/book") and "prepared data/book" in capsys.readouterr().err
    written = Path("data/book/meta.json").stat().st_mtime_ns
    assert ready(book).meta == first.meta and not capsys.readouterr().err
    assert Path("data/book/meta.json").stat().st_mtime_ns == written
    book.write_text(BOOK * 2)
    later = written / 1e9 + 10
    os.utime(book, (later, later))
    assert ready(book).splits["train"].tokens > first.splits["train"].tokens


def test_options_prepare_anew(book: Path):
    ready(book)
    assert ready(book, held_out=0.5).splits["test"].tokens == len(BOOK) // 2
    with pytest.raises(MemtrainError, match="did you mean held_out"):
        ready(book, hold_out=0.5)


def test_the_same_options_find_what_was_prepared_and_a_changed_source_keeps_them(
    book: Path, capsys
):
    ready(book, held_out=0.5)
    written = Path("data/book/meta.json").stat().st_mtime_ns
    capsys.readouterr()
    for options in ({"held_out": 0.5}, {}):
        assert (
            ready_store("text", book, options, Path("data")).splits["test"].tokens == len(BOOK) // 2
        )
        assert Path("data/book/meta.json").stat().st_mtime_ns == written
        assert not capsys.readouterr().err
    book.write_text(BOOK * 2)
    later = written / 1e9 + 10
    os.utime(book, (later, later))
    assert ready(book).splits["test"].tokens == len(BOOK)
    Path("data/book/options.json").write_text("{")  # then they are not known
    assert ready(book, held_out=0.5).splits["test"].tokens == len(BOOK)


def test_prepared_data_is_taken_as_it_is(book: Path):
    folder = ready(book).folder
    assert ready(folder).folder == folder
    with pytest.raises(MemtrainError, match="is prepared already"):
        ready(folder, held_out=0.5)
    with pytest.raises(MemtrainError, match="holds text; memtrain train text --data"):
        ready(folder, "images")


def test_data_of_another_source_is_not_replaced(book: Path):
    ready(book)
    Path("other").mkdir()
    Path("other/book.txt").write_text("something else\n" * 99)
    with pytest.raises(MemtrainError, match="was prepared from book.txt"):
        ready("other/book.txt")
    with pytest.raises(MemtrainError, match="was prepared from book.txt"):
        ready("other/book.txt", held_out=0.5)


def test_a_source_is_not_mistaken_for_one_whose_path_ends_alike(book: Path):
    Path("other").mkdir()
    Path("other/book.txt").write_text("something else\n" * 99)
    os.utime(book, (1, 1))  # older than what will be prepared
    ready("other/book.txt")
    with pytest.raises(MemtrainError, match="was prepared from other/book.txt"):
        ready(book)


def test_the_same_source_by_another_path_is_found_again(book: Path, capsys):
    ready(book)
    capsys.readouterr()
    assert ready(book.resolve()).folder == Path("data/book") and not capsys.readouterr().err


def test_the_recipes_of_data_sets_refuse_another_kind(book: Path):
    folder = ready(book).folder
    assert ready(folder, "tinystories").folder == folder
    with pytest.raises(MemtrainError, match="holds text; memtrain train text --data"):
        ready(folder, "mnist")


def test_a_folder_of_the_users_under_data_is_left_alone(book: Path):
    Path("data/mine").mkdir(parents=True)
    Path("data/mine/a.txt").write_text(BOOK)
    Path("data/mine/b.txt").write_text(BOOK)
    assert ready("data/mine").folder == Path("data/mine-prepared")
    assert ready("data/mine").folder == Path("data/mine-prepared")
    assert sorted(path.name for path in Path("data/mine").iterdir()) == ["a.txt", "b.txt"]


def test_text_keeps_the_recipes_evaluation_length(book: Path):
    stream = ready_stream("text", book, Stream(path="x", evaluate_length=40), {})
    assert stream == Stream(path="data/book", evaluate_length=40)


def test_what_is_not_there_is_named(book: Path):
    with pytest.raises(MemtrainError, match="data=gone.txt: no such file or folder"):
        ready("gone.txt")
