"""Stores: what is written is read back, and what is not whole is refused."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain import files
from memtrain.data import store as store_module
from memtrain.data import store_reader
from memtrain.data.images import ImageFormat
from memtrain.data.prepare import store_writer
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.store import Split, StoreMeta, open_array, require_tokens
from memtrain.data.store_reader import load_splits, open_store
from memtrain.errors import MemtrainError


def stream(*tokens: int, starts: tuple[int, ...] = (0,)) -> Split:
    return Split(np.array(tokens, np.int64), np.array(starts, np.int64))


def meta(**changes: Any) -> StoreMeta:
    return StoreMeta(**{"name": "toy", "vocab_size": 10, "source": "a test", **changes})


SPLITS = {"train": stream(1, 2, 3, 9, 0, starts=(0, 2)), "test": stream(4, 5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A written store of five and two tokens."""
    write_store(tmp_path / "toy", meta(notes=("two notes", "é")), SPLITS)
    return tmp_path / "toy"


def edit(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "meta.json"
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))


def refusal(call: Callable[[], object]) -> str:
    """The one line of the error that a call must raise."""
    with pytest.raises(MemtrainError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------ round trip


def test_the_files_are_plain_tokens_starts_and_json(folder: Path):
    assert (folder / "train.bin").read_bytes() == bytes([1, 2, 3, 9, 0])
    assert np.load(folder / "train.starts.npy").tolist() == [0, 2]
    plain = json.loads((folder / "meta.json").read_text())
    assert plain == {
        "version": 1,
        "name": "toy",
        "vocab_size": 10,
        "source": "a test",
        "document_length": None,
        "picture": None,
        "text": False,
        "separator": None,
        "notes": ["two notes", "é"],
        "dtype": "uint8",
        "splits": {
            "train": {
                "tokens": 5,
                "documents": 2,
                "sha256": hashlib.sha256(bytes([1, 2, 3, 9, 0])).hexdigest(),
                "text_bytes": None,
            },
            "test": {
                "tokens": 2,
                "documents": 1,
                "sha256": hashlib.sha256(bytes([4, 5])).hexdigest(),
                "text_bytes": None,
            },
        },
    }


def test_written_tokens_are_read_back(folder: Path):
    store = open_store(folder, verify=True)
    assert store.meta == meta(notes=("two notes", "é"))
    assert store.tokens("train").tolist() == [1, 2, 3, 9, 0]
    assert store.starts("train").tolist() == [0, 2]
    assert store.starts("test").tolist() == [0]
    assert store.splits["train"].documents == 2


def test_tokens_are_a_read_only_map_of_the_file(folder: Path):
    tokens = open_store(folder).tokens("train")
    assert isinstance(tokens, np.memmap) and not tokens.flags.writeable


def test_documents_of_one_length_need_no_starts_file(tmp_path: Path):
    picture = ImageFormat(height=2, width=3)
    pictures = meta(vocab_size=256, document_length=6, picture=picture)
    split = Split(np.arange(12, dtype=np.uint8))
    store = write_store(tmp_path / "p", pictures, {"train": split, "test": split})
    assert sorted(p.name for p in store.folder.iterdir()) == ["meta.json", "test.bin", "train.bin"]
    assert store.starts("train").tolist() == [0, 6]
    assert store.splits["train"].documents == 2
    assert open_store(store.folder).meta.picture == picture


def test_more_than_256_tokens_take_two_little_endian_bytes(tmp_path: Path):
    split = stream(0, 258, 65535)
    store = write_store(tmp_path / "w", meta(vocab_size=2**16), {"train": split, "test": split})
    assert (store.folder / "train.bin").read_bytes() == bytes([0, 0, 2, 1, 255, 255])
    assert store.tokens("test").tolist() == [0, 258, 65535]


def test_more_than_65536_tokens_take_four_little_endian_bytes(tmp_path: Path):
    split = stream(0, 65536, 2**24 - 1)
    store = write_store(tmp_path / "w", meta(vocab_size=2**24), {"train": split, "test": split})
    assert (store.folder / "train.bin").read_bytes() == bytes(
        [0, 0, 0, 0, 0, 0, 1, 0, 255, 255, 255, 0]
    )
    assert json.loads((store.folder / "meta.json").read_text())["dtype"] == "uint32"
    again = open_store(store.folder, verify=True)
    assert again.tokens("test").tolist() == [0, 65536, 2**24 - 1]
    assert load_splits(again)["train"].tokens[2:].tolist() == [2**24 - 1]
    assert again.nbytes == 24


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, "uint8"), (257, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32"), (2**24, "uint32")],
)
def test_tokens_take_the_smallest_type_that_holds_the_vocabulary(vocab_size: int, dtype: str):
    assert meta(vocab_size=vocab_size).dtype.name == dtype


def test_the_bytes_that_occur_are_recorded_of_a_text(tmp_path: Path):
    split = stream(*b"banana")
    text = meta(vocab_size=256, text=True)
    store = write_store(tmp_path / "t", text, {"train": split, "test": stream(*b"fig")})
    assert bytes(store.splits["train"].alphabet) == b"abn"
    assert bytes(open_store(store.folder).splits["test"].alphabet) == b"fgi"


@settings(max_examples=25)  # each is synced to disk
@given(data=st.data(), vocab_size=st.sampled_from([2, 255, 256, 257, 2**16]))
def test_any_tokens_survive(data, vocab_size: int, tmp_path_factory: pytest.TempPathFactory):
    row = st.lists(st.integers(0, vocab_size - 1), min_size=2, max_size=40)
    rows = {name: data.draw(row) for name in ("train", "test")}
    splits = {name: stream(*tokens) for name, tokens in rows.items()}
    folder = tmp_path_factory.mktemp("any") / "store"
    write_store(folder, meta(vocab_size=vocab_size), splits)
    store = open_store(folder, verify=True)
    assert {name: store.tokens(name).tolist() for name in rows} == rows


def test_a_stream_longer_than_a_block_is_written_whole(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(store_module, "BLOCK", 2)
    store = write_store(tmp_path / "long", meta(), SPLITS)
    assert open_store(store.folder, verify=True).tokens("train").tolist() == [1, 2, 3, 9, 0]


def test_these_modules_do_not_import_torch():
    code = "import sys, memtrain.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --------------------------------------------------------------------------------- writing, badly


@pytest.mark.parametrize(
    ("changes", "train", "message"),
    [
        ({}, stream(1, 10), "holds the token 10, outside the vocabulary 0..9"),
        ({}, stream(1, -1), "holds the token -1"),
        ({}, stream(1), "train would hold 1 token, at least 2 are needed"),
        ({}, stream(1, 2, starts=(0, 2)), "needs the starts"),
        ({}, stream(1, 2, starts=(1,)), "needs the starts"),
        ({}, stream(1, 2, starts=(0, 1, 1)), "needs the starts"),
        ({}, Split(np.array([1, 2])), "needs the starts"),
        ({"document_length": 3}, Split(np.array([1, 2])), "not documents of 3"),
        ({"document_length": 2}, stream(1, 2), "not documents of 2"),
    ],
)
def test_bad_tokens_are_refused_and_leave_nothing(
    tmp_path: Path, changes: dict, train: Split, message: str
):
    splits = {**SPLITS, "train": train}
    error_message = refusal(lambda: write_store(tmp_path / "toy", meta(**changes), splits))
    assert message in error_message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 1}, "vocab_size=1: must be 2..16,777,216"),
        ({"vocab_size": 2**24 + 1}, "vocab_size=16777217: must be 2..16,777,216"),
        ({"document_length": 0}, "document_length=0"),
        ({"separator": 10}, "separator=10: must be 0..9"),
        (
            {"document_length": 4, "picture": ImageFormat(height=2, width=3)},
            "an image has 6 tokens",
        ),
    ],
)
def test_invalid_meta_is_refused(changes: dict, message: str):
    assert message in refusal(lambda: meta(**changes))


def test_a_store_is_replaced_only_with_overwrite(folder: Path):
    other = {**SPLITS, "test": stream(7, 7, 7)}
    assert "is prepared already" in refusal(lambda: write_store(folder, meta(), other))
    assert open_store(folder).tokens("test").tolist() == [4, 5]
    write_store(folder, meta(), other, overwrite=True)
    assert open_store(folder, verify=True).tokens("test").tolist() == [7, 7, 7]
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]


def test_only_a_store_is_ever_replaced(tmp_path: Path, folder: Path):
    (folder / "thesis.txt").write_text("ten years")
    message = refusal(lambda: write_store(folder, meta(), SPLITS, overwrite=True))
    assert "holds other files" in message and (folder / "thesis.txt").exists()
    (tmp_path / "file").write_text("")
    message = refusal(lambda: write_store(tmp_path / "file", meta(), SPLITS, overwrite=True))
    assert "is a file" in message


def test_an_empty_folder_may_become_a_store(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert write_store(tmp_path / "empty", meta(), SPLITS).splits["test"].tokens == 2


@pytest.mark.parametrize("failing", ["sync", "publish"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_store(
    folder: Path, monkeypatch, failing: str, error: BaseException
):
    def fail(*_: Path) -> None:
        raise error

    monkeypatch.setattr(store_writer, failing, fail)
    with pytest.raises((MemtrainError, KeyboardInterrupt)) as caught:
        write_store(folder, meta(), {**SPLITS, "test": stream(7, 7)}, overwrite=True)
    assert "No space left" in str(caught.value) or caught.type is KeyboardInterrupt
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]
    assert open_store(folder, verify=True).tokens("test").tolist() == [4, 5]


def test_the_old_store_comes_back_if_the_new_one_cannot_be_placed(folder: Path, monkeypatch):
    rename = Path.rename

    def refuse_the_draft(path: Path, target: Path) -> Path:
        if path.name.startswith(".draft-") and not path.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_the_draft)
    refusal(lambda: write_store(folder, meta(), SPLITS, overwrite=True))
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]
    assert open_store(folder, verify=True).tokens("test").tolist() == [4, 5]


def test_stale_drafts_are_removed(tmp_path: Path, monkeypatch):
    left = [".draft-toy-0123456789ab", ".draft-other-0123456789ab-old", ".draft-toy-4711"]
    kept = [".draft-toy-notes", ".draft-toy-ba9876543210"]  # named otherwise; holds other files
    for name in left + kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").write_bytes(b"half")
    (tmp_path / kept[1] / "thesis.txt").write_text("ten years")
    (tmp_path / ".draft-link-0123456789ab").symlink_to(tmp_path / kept[0])
    before = sorted(p.name for p in tmp_path.iterdir())
    write_store(tmp_path / "toy", meta(), SPLITS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*before, "toy"])  # too young
    monkeypatch.setattr(store_writer, "STALE_SECONDS", -60)
    write_store(tmp_path / "toy", meta(), SPLITS, overwrite=True)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == sorted([*kept, ".draft-link-0123456789ab", "toy"])


def test_draft_names_are_unique_across_machines(tmp_path: Path, monkeypatch):
    """Two containers have the same process numbers."""
    drafts = []
    publish = store_writer.publish
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(store_writer, "publish", lambda *a: (drafts.append(a[0].name), publish(*a)))
    for _ in range(2):
        write_store(tmp_path / "toy", meta(), SPLITS, overwrite=True)
    assert len(set(drafts)) == 2 and [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_without_locks_two_writers_still_leave_one_complete_store(tmp_path: Path, monkeypatch):
    """Each writes its whole store between any two steps of the other."""
    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    for overwrite in (False, True):
        for step in ("check_place", "sync"):
            folder = tmp_path / f"{step}-{overwrite}" / "toy"
            if overwrite:
                write_store(folder, meta(name="old"), SPLITS)
            original, meddled = getattr(store_writer, step), []

            def meddle(*args, original=original, meddled=meddled, folder=folder):
                if not meddled and any(folder.parent.glob(".draft-toy-*")):
                    meddled.append(True)
                    other = {**SPLITS, "test": stream(7, 7)}
                    write_store(folder, meta(name="other"), other, overwrite=True)
                return original(*args)

            monkeypatch.setattr(store_writer, step, meddle)
            try:
                write_store(folder, meta(name="mine"), SPLITS, overwrite=overwrite)
                expected = "mine"
            except MemtrainError as error:
                assert "is prepared already" in str(error) and not overwrite
                expected = "other"
            monkeypatch.setattr(store_writer, step, original)
            assert meddled and open_store(folder, verify=True).meta.name == expected
            assert [path.name for path in folder.parent.iterdir()] == ["toy"]


def test_a_store_published_at_the_last_moment_is_not_mixed_with_ours(folder: Path, monkeypatch):
    rename = Path.rename
    monkeypatch.setattr(files.fcntl, "flock", unsupported)

    def quicker(path: Path, target: Path) -> Path:
        if path == folder:  # moved away; another one is published at once
            rename(path, target)
            monkeypatch.setattr(Path, "rename", rename)
            write_store(folder, meta(name="quicker"), SPLITS)
            return target
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", quicker)
    refusal(lambda: write_store(folder, meta(name="slower"), SPLITS, overwrite=True))
    assert open_store(folder, verify=True).meta.name == "quicker"
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]


def unsupported(*_: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def test_nothing_is_written_through_a_link(tmp_path: Path, folder: Path):
    (tmp_path / "link").symlink_to(folder)
    assert open_store(tmp_path / "link").tokens("test").tolist() == [4, 5]  # to read is fine
    for overwrite in (False, True):
        message = refusal(
            lambda o=overwrite: write_store(tmp_path / "link", meta(), SPLITS, overwrite=o)
        )
        assert "link: is a symbolic link" in message and str(folder) in message
    assert open_store(folder).tokens("test").tolist() == [4, 5]
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")  # a folder on the way is the user's own
    write_store(tmp_path / "data" / "toy", meta(), SPLITS)
    assert open_store(tmp_path / "disk" / "toy").splits["test"].tokens == 2


def test_an_unwritable_folder_is_a_one_line_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    message = refusal(lambda: write_store(tmp_path / "file" / "toy", meta(), SPLITS))
    assert "toy: is a file, or under one" in message
    message = refusal(lambda: write_store(tmp_path / ("x" * 300), meta(), SPLITS))
    assert "File name too long" in message


def test_a_second_writer_of_one_store_waits_and_logs_it(tmp_path: Path, caplog):
    messages = []

    def second() -> None:
        try:
            write_store(tmp_path / "toy", meta(name="second"), SPLITS)
        except MemtrainError as error:
            messages.append(str(error))

    thread = threading.Thread(target=second)
    with store_writer.store_lock(tmp_path / "toy"):
        thread.start()
        while not caplog.messages:
            time.sleep(0.01)
        assert not (tmp_path / "toy").exists()
        (tmp_path / "toy").mkdir()
        write_store(tmp_path / "made", meta(name="first"), SPLITS)
        (tmp_path / "made").rename(tmp_path / "toy")
    thread.join(timeout=60)
    line = rf"waiting for another process that prepares \S+toy \(process {os.getpid()} on \S+\)"
    assert re.fullmatch(line, caplog.messages[0])
    assert messages and "is prepared already" in messages[0]
    assert open_store(tmp_path / "toy", verify=True).meta.name == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


# --------------------------------------------------------------------------------- opening, badly


def test_a_folder_without_meta_is_not_a_store(tmp_path: Path):
    assert "no prepared data here" in refusal(lambda: open_store(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "version 2, this memtrain reads version 1"),
        (lambda m: m.pop("version"), "version None"),
        (lambda m: m.pop("name"), "name: missing"),
        (lambda m: m.update(colour=1), "colour: StoreMeta has no such field"),
        (lambda m: m.update(vocab_size="10"), "vocab_size='10': must be a whole number"),
        (lambda m: m.update(vocab_size=True), "vocab_size=True: must be a whole number"),
        (lambda m: m.update(vocab_size=9), "holds the token 9, outside the vocabulary 0..8"),
        (lambda m: m.update(vocab_size=300), "dtype 'uint8': 300 tokens are stored as uint16"),
        (lambda m: m.update(text=1), "text=1: must be true or false"),
        (lambda m: m.update(notes="one"), "notes='one': must be a list"),
        (lambda m: m.update(notes=[1]), "notes=1: must be a string"),
        (lambda m: m.update(picture={"height": 2}), "picture.width: missing"),
        (lambda m: m.pop("text"), "text: missing"),
        (lambda m: m.pop("separator"), "separator: missing"),
        (lambda m: m.update(document_length=2), "does not hold 2 documents"),
        (lambda m: m.update(splits={"train": {}}), "splits: must be train and test"),
        (lambda m: m["splits"].update(train=5), "train: 5: must be a JSON object"),
        (lambda m: m["splits"]["train"].update(tokens=6), "train.bin has 5 bytes, 6 were written"),
        (lambda m: m["splits"]["train"].update(tokens=1), "1 tokens, at least 2 are needed"),
        (lambda m: m["splits"]["train"].update(documents=3), "does not hold 3 documents"),
    ],
)
def test_a_changed_meta_is_refused(folder: Path, change: Callable[[dict], None], message: str):
    edit(folder, change)
    assert message in refusal(lambda: open_store(folder))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff"])
def test_a_meta_that_is_not_a_json_object_is_refused(folder: Path, text: str):
    (folder / "meta.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "meta.json" in refusal(lambda: open_store(folder))


def test_a_file_cut_short_is_refused(folder: Path):
    (folder / "train.bin").write_bytes(b"\1\2")
    assert "train.bin has 2 bytes, 5 were written" in refusal(lambda: open_store(folder))


def test_a_file_with_bytes_added_to_it_is_refused(folder: Path):
    with (folder / "train.bin").open("ab") as file:
        file.write(b"\0")
    assert "train.bin has" in refusal(lambda: open_store(folder))


def test_a_missing_file_is_refused(folder: Path):
    (folder / "test.bin").unlink()
    assert "test.bin" in refusal(lambda: open_store(folder))


def test_a_changed_file_is_found_by_its_checksum(folder: Path):
    (folder / "train.bin").write_bytes(bytes([1, 2, 3, 9, 1]))
    assert open_store(folder).tokens("train")[-1] == 1
    assert "checksum" in refusal(lambda: open_store(folder, verify=True))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\3\4", b"no array at all"])
def test_damaged_starts_are_refused(folder: Path, content: bytes):
    (folder / "train.starts.npy").write_bytes(content)
    assert "train.starts.npy" in refusal(lambda: open_store(folder))


@pytest.mark.parametrize("starts", [[0, 5], [0, 0], [1, 2], [0.0, 2.0], [[0, 2]]])
def test_invalid_starts_are_refused(folder: Path, starts: list):
    np.save(folder / "train.starts.npy", np.array(starts))
    assert "does not hold 2 documents" in refusal(lambda: open_store(folder))


def test_labels_that_are_not_one_per_document_are_refused(folder: Path):
    store = open_store(folder)
    assert "has no labels" in refusal(lambda: store.labels("train"))
    for damaged in (np.zeros(3, np.uint16), np.zeros(2, np.int64), np.array([0, None])):
        np.save(folder / "train.labels.npy", damaged, allow_pickle=True)
        assert "train.labels.npy is not what was written" in refusal(lambda: store.labels("train"))
    np.save(folder / "train.labels.npy", np.array([1, 0], np.uint16))
    assert store.labels("train").tolist() == [1, 0]


def test_pickled_starts_are_never_loaded(folder: Path):
    np.save(folder / "train.starts.npy", np.array([0, None], dtype=object), allow_pickle=True)
    assert "train.starts.npy" in refusal(lambda: open_store(folder))


def test_a_short_split_error_names_the_tokens_needed(folder: Path):
    store = open_store(folder)
    require_tokens(store, "train", 5)
    message = refusal(lambda: require_tokens(store, "train", 321))
    assert "train holds 5 tokens, at least 321 are needed" in message


def test_an_unknown_split_is_named(folder: Path):
    assert "did you mean train?" in refusal(lambda: open_store(folder).tokens("trian"))


@pytest.mark.parametrize("name", ["train.starts.npy", "train.bin", "meta.json"])
def test_a_named_pipe_in_place_of_a_file_is_refused(folder: Path, name: str):
    """Reading it would never end."""
    store = open_store(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refusal(lambda: open_store(folder))
    refusal(lambda: load_splits(store))
    with pytest.raises(ValueError, match="regular file"):
        open_array(folder / name)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("mnist", "memtrain data mnist --out {} prepares it"),
        ("sketchy", "memtrain data sketchy --data-dir FOLDER --out {} prepares it"),
        ("text", "memtrain train text --data PATH"),
        (
            "book-1a2b3c4d",
            "memtrain data SOURCE --out {} prepares it, with the same --option as before",
        ),
    ],
)
def test_a_missing_store_error_names_the_command(tmp_path: Path, name: str, command: str):
    message = refusal(lambda: open_store(tmp_path / name))
    assert message.endswith("; " + command.format(tmp_path / name)) or command in message


# ---------------------------------------------------------------------------------------- large


def test_tokens_of_a_large_store_are_not_scanned_when_it_is_opened(folder: Path, monkeypatch):
    """Those that are read are checked then."""
    (folder / "train.bin").write_bytes(bytes([1, 2, 3, 99, 0]))
    assert "holds the token 99" in refusal(lambda: open_store(folder))
    monkeypatch.setattr(store_reader, "SCANNED_TOKENS", 4)
    store = open_store(folder)
    file = store.token_file("train")
    assert file.windows(np.array([0]), 3).tolist() == [[1, 2, 3]]
    message = refusal(lambda: file.windows(np.array([1]), 3))
    assert "train.bin: token 3 is 99, outside the vocabulary 0..9" in message
    assert "checksum" in refusal(lambda: open_store(folder, verify=True))


def test_a_truncated_store_is_refused_on_disk_and_in_memory(folder: Path):
    store = open_store(folder)
    os.truncate(folder / "train.bin", 3)
    for on_disk in (True, False):
        message = refusal(lambda place=on_disk: load_splits(store, on_disk=place))
        assert "train.bin" in message and message.endswith("remove it and prepare it again")


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20))
    message = refusal(lambda: write_store(tmp_path / "toy", meta(), SPLITS))
    assert "toy: needs 3.1e-08 GB, its disk has 2e-08 GB free; free some, or prepare" in message
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, monkeypatch):
    def full(path: Path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(store_writer, "sync", full)
    message = refusal(lambda: write_store(tmp_path / "toy", meta(), SPLITS))
    assert "toy: No space left on device; nothing is left behind; free some" in message
    assert not list(tmp_path.iterdir())
