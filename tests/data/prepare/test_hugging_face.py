"""Hugging Face datasets: folders that save_to_disk wrote, and names on the Hub."""

import json
import sys
import types
from pathlib import Path

import pytest

from memtrain.data.codec import encode_text
from memtrain.data.prepare import prepare_text
from memtrain.data.prepare.file_kind import kind_of
from memtrain.data.prepare.text_files import Texts, read_text
from memtrain.errors import MemtrainError

pyarrow = pytest.importorskip("pyarrow")
ROWS = ["one\ntwo", "zwei €", None, "", "three"]
KEPT = [b"one\ntwo\n", "zwei €\n".encode(), b"three"]


def save_split(folder: Path, rows: list[str | None], shards: int = 1, kind=None) -> None:
    """Write what `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{shards:05}.arrow" for n in range(shards)]
    for n, name in enumerate(names):
        part = rows[n::shards] if shards > 1 else rows
        texts = pyarrow.array(part, kind or pyarrow.string())
        table = pyarrow.table({"text": texts, "n": [*range(len(part))]})
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def save_dict(folder: Path, **splits: list[str | None]) -> None:
    for name, rows in splits.items():
        save_split(folder / name, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}))


def documents(texts: Texts) -> list[bytes]:
    encoded = encode_text(texts.raw)
    ends = [*encoded.starts[1:].tolist(), len(encoded.tokens)]
    pairs = zip(encoded.starts.tolist(), ends, strict=True)
    return [encoded.tokens[begin:end].tobytes() for begin, end in pairs]


def refusal(path: Path, **options) -> str:
    with pytest.raises(MemtrainError) as caught:
        read_text(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ saved


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_rows_of_a_saved_dataset_are_documents(tmp_path: Path, kind):
    save_split(tmp_path / "set", ROWS, kind=kind)
    assert kind_of(tmp_path / "set").description == "a Hugging Face dataset"
    texts = read_text(tmp_path / "set")
    assert documents(texts) == KEPT
    assert texts.notes == ("each row is a document, its column text",)


def test_only_the_files_that_a_dataset_names_are_read_in_order(tmp_path: Path):
    save_split(tmp_path / "set", ["a", "b", "c", "d"], shards=2)
    (tmp_path / "set" / "cache-1234.arrow").write_bytes(b"\xff\xff\xff\xff left by map")
    assert documents(read_text(tmp_path / "set")) == [b"a\n", b"c\n", b"b\n", b"d"]


def test_a_split_of_several_is_chosen(tmp_path: Path):
    save_dict(tmp_path / "set", train=ROWS, validation=["held out"])
    texts = read_text(tmp_path / "set")
    assert documents(texts) == KEPT and texts.notes[0] == "split train"
    assert documents(read_text(tmp_path / "set", split="validation")) == [b"held out"]
    line = refusal(tmp_path / "set", split="valid")
    assert "split=valid: did you mean validation? (one of train, validation)" in line
    store = prepare_text(tmp_path / "set", tmp_path / "out", held_out=0.4)
    assert store.splits["train"].documents == 2


def test_bad_cards_columns_and_files_are_one_line(tmp_path: Path):
    save_split(tmp_path / "set", ROWS)
    folder, state = tmp_path / "set", tmp_path / "set" / "state.json"
    assert "column=body: does not exist" in refusal(folder, column="body")
    assert "column=n: holds int64, must be strings" in refusal(folder, column="n")
    assert "split=test: it holds one split; leave it out" in refusal(folder, split="test")
    assert "subset=a: a dataset on disk has one" in refusal(folder, subset="a")
    (folder / "data-00000-of-00001.arrow").write_bytes(b"\xff\xff\xff\xff\x58\x01")
    assert "not an Arrow file, or damaged" in refusal(folder)
    for names in ([], [{"filename": "../../secret.arrow"}], [3], "x", [{"filename": None}]):
        state.write_text(json.dumps({"_data_files": names}))
        assert "names no Arrow files; save the dataset again" in refusal(folder)
    state.write_text("{")
    assert "state.json" in refusal(folder)


@pytest.mark.parametrize("form", ["new_file", "new_stream"])
def test_a_single_arrow_file_is_read_in_both_forms(tmp_path: Path, form: str):
    table = pyarrow.table({"body": ["one", "two"]})
    with getattr(pyarrow.ipc, form)(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert documents(read_text(tmp_path / "a.arrow", "body")) == [b"one\n", b"two"]
    assert documents(read_text(tmp_path, "body")) == [b"one\n", b"two"]  # in a folder


def test_the_datasets_package_writes_what_is_read(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"text": ROWS})
    table.filter(lambda row: row["text"] != "three").save_to_disk(str(tmp_path / "a"))
    assert documents(read_text(tmp_path / "a")) == [b"one\ntwo\n", "zwei €".encode()]
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "b"))
    assert documents(read_text(tmp_path / "b")) == KEPT


# -------------------------------------------------------------------------------------------- Hub


def test_a_dataset_on_the_hub_is_read_by_name(tmp_path: Path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    table, calls = datasets.Dataset.from_dict({"text": ROWS, "n": [1] * 5, "l": [["x"]] * 5}), []

    def load(name, subset, split):
        calls.append((name, subset, split))
        return table.select([0, 1, 2, 4]) if split == "part" else table

    monkeypatch.setattr(datasets, "load_dataset", load)
    path = Path("hf:some/stories")
    texts = read_text(path)
    assert documents(texts) == KEPT
    assert texts.notes == ("split train; each row is a document, its column text",)
    assert documents(read_text(path, split="part", subset="raw")) == KEPT
    assert calls == [("some/stories", None, "train"), ("some/stories", "raw", "part")]
    assert "column=body: does not exist; choose one" in refusal(path, column="body")
    assert "column=n: holds int64, must be strings" in refusal(path, column="n")
    assert "must be strings" in refusal(path, column="l")


def test_without_a_connection_or_the_package_it_is_one_line(monkeypatch, caplog):
    def load(*_, **__):
        import logging

        logging.getLogger("huggingface_hub").warning("thrown while requesting HEAD")
        raise ConnectionError("Couldn't reach 'some/stories' on the Hub\nmore")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    line = refusal(Path("hf:some/stories"))
    assert "hf:some/stories: cannot be loaded (ConnectionError: Couldn't reach" in line
    assert "or pass a folder that save_to_disk wrote" in line and not caplog.records
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert 'pip install "memtrain[data]"' in refusal(Path("hf:some/stories"))
