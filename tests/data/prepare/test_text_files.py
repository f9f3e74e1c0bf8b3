"""Texts of every kind become one text; what is not text is refused with what to do."""

import codecs
import csv
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from memtrain.data.codec import encode_text
from memtrain.data.prepare import arrow_files, limits, prepare_text, records
from memtrain.data.prepare import text_files as reading
from memtrain.data.prepare.text_files import Texts, read_text
from memtrain.errors import MemtrainError


def documents(texts: Texts) -> list[bytes]:
    encoded = encode_text(texts.raw)
    return [part.tobytes() for part in np.split(encoded.tokens, encoded.starts[1:])]


def refused(path: Path, content: bytes, column: str | None = None) -> str:
    path.write_bytes(content)
    with pytest.raises(MemtrainError) as caught:
        read_text(path, column)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


# ------------------------------------------------------------------------------------ plain text


def test_files_may_be_plain_gzipped_or_of_any_name(tmp_path: Path):
    put(
        tmp_path,
        {
            "a.txt": b"plain",
            "a.txt.gz": gzip.compress(b"zipped"),
            "README": b"read me",
            "main.py": b"print()",
            "page.html": b"<p>",
        },
    )
    assert read_text(tmp_path / "a.txt").raw == b"plain"
    assert read_text(tmp_path / "a.txt.gz").raw == b"zipped"
    assert read_text(tmp_path / "README").raw == b"read me"
    assert read_text(tmp_path / "main.py").raw == b"print()"
    assert read_text(tmp_path / "page.html") == Texts(bytearray(b"<p>"))


def test_every_file_of_a_folder_is_a_document_in_sorted_order(tmp_path: Path):
    files = {
        "b.txt": b"second\n",
        "a.txt.gz": gzip.compress(b"first"),
        "deep/c.TXT": b"third",
        "deep/d.md": b"",
        "e.jsonl": b'{"text": "fourth"}\n{"text": "fifth"}\n',
    }
    texts = read_text(put(tmp_path, files))
    assert documents(texts) == [b"first\n", b"second\n", b"third\n", b"fourth\n", b"fifth"]
    assert texts.notes == (
        "read 2 .txt, 1 .txt.gz, 1 .md, 1 .jsonl",
        "each row is a document, its column text",
    )


def test_other_files_of_a_folder_are_counted(tmp_path: Path):
    ends = ("pdf", "exe", "mp3", "o", "zip", "dat")
    files = {f"{n}.{end}": b"x" for end in ends for n in range(2)}
    files |= {
        "a.txt": b"text",
        "Makefile": b"x",
        "0.png": b"x",
        ".hidden": b"x",
        ".git/a.txt": b"x",
    }
    put(tmp_path, files)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "cycle").symlink_to(tmp_path)
    texts = read_text(tmp_path)
    assert texts.raw == b"text"
    assert texts.notes == (
        "passed over 16 files: 2 .dat, 2 .exe, 2 .mp3, 2 .o, 2 .pdf and 6 others",
    )


def test_programs_of_a_folder_are_read_unless_they_are_not_text(tmp_path: Path):
    files = {
        "a.py": b"print()",
        "b.md": b"# B",
        "c.rs": b"fn main() {}",
        "d.ts": b"\x47\x00\x11" * 50,  # a video
        "e.js.gz": gzip.compress(b"let e"),
        "f.h": "wide".encode("utf-16"),
        "g.png": b"x",
    }
    texts = read_text(put(tmp_path, files))
    assert documents(texts) == [b"print()\n", b"# B\n", b"fn main() {}\n", b"let e"]
    assert texts.notes == (
        "read 1 .py, 1 .md, 1 .rs, 1 .js.gz",
        "passed over 3 files: 1 .h, 1 .png, 1 .ts",
    )


@pytest.mark.parametrize("cut", [5, 20, -4])
def test_a_gzip_cut_short_is_one_line(tmp_path: Path, cut: int):
    content = gzip.compress(b"many words, " * 50)[:cut]
    assert "damaged or cut short" in refused(tmp_path / "cut.txt.gz", content)


def test_missing_texts_are_named(tmp_path: Path):
    with pytest.raises(MemtrainError, match=r"nothing.txt: no such file or folder"):
        read_text(tmp_path / "nothing.txt")
    with pytest.raises(MemtrainError, match=r"is a folder without text or images; \.txt, "):
        read_text(tmp_path)


def test_latin_1_is_kept_as_bytes_with_a_note_and_refused_for_ascii(tmp_path: Path):
    path = tmp_path / "caf\x1b[2J.txt"
    path.write_bytes("Le café était fermé.\n".encode("latin-1") * 20)
    store = prepare_text(path, tmp_path / "out")
    shown = "caf\\x1b[2J.txt"
    assert store.meta.notes[0] == f"not UTF-8 (perhaps Latin-1), bytes kept unchanged: {shown}"
    with pytest.raises(MemtrainError, match="mode=ascii: .* is not UTF-8.*iconv"):
        prepare_text(path, tmp_path / "other", mode="ascii")


def test_utf8_is_checked_beyond_the_first_block(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4)
    path = tmp_path / "a.txt"
    for content, right in (
        ("abcé€ and so on".encode(), True),  # é is cut by a block
        (b"abc\xc3" + b"defg", False),
        (b"abcd" + b"efg\xc3", False),
        (b"abcdefgh\xff", False),
    ):
        path.write_bytes(content)
        assert (read_text(path).not_utf8 == ()) == right, content


def test_byte_0_anywhere_is_not_text(tmp_path: Path):
    message = refused(tmp_path / "a.txt", b"x" * 70_000 + b"\0")
    assert "holds byte 0 at 70,000" in message and "tr -d" in message


def test_more_text_than_memory_is_refused_before_it_is_read(tmp_path: Path, monkeypatch):
    put(tmp_path, {"a.txt": b"x" * 400, "b.txt": b"x" * 400, "c.txt.gz": gzip.compress(b"x" * 999)})
    for module in (limits, reading):
        monkeypatch.setattr(module, "available_memory", lambda: 2000)
    monkeypatch.setattr(reading, "_add", lambda *_: pytest.fail("it was read"))
    with pytest.raises(MemtrainError, match=r"needs .* GiB of memory or more.*; split it"):
        read_text(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(reading, "available_memory", lambda: 2000)
    with pytest.raises(MemtrainError, match=r"c.txt.gz: needs .* GiB of memory or more"):
        read_text(tmp_path / "c.txt.gz")


def test_gzipped_texts_are_bounded_together(tmp_path: Path):
    bomb = gzip.compress(b"a" * 2**24)
    folder = put(tmp_path / "bombs", {f"{n}.txt.gz": bomb for n in range(5)})
    with pytest.raises(MemtrainError, match="bombs: refused, unpacks to more than 67,108,864 byte"):
        read_text(folder)
    assert len(read_text(folder / "0.txt.gz").raw) == 2**24


def test_gzip_contents_are_recognised_too(tmp_path: Path):
    rows = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows))
    assert documents(read_text(tmp_path / "a.jsonl.gz")) == [b"one\n", b"two"]
    assert "is a PNG image; unpack it" in refused(
        tmp_path / "b.gz", gzip.compress(b"\x89PNG\r\n\x1a\n")
    )


# ----------------------------------------------------------------------------------------- rows


def test_rows_of_jsonl_are_documents(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "é one\n", "n": 1}, {"text": None}, {"text": ""}, {"text": "two \ud800"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(codecs.BOM_UTF8 + b"\n" + lines.encode())
    assert documents(read_text(path)) == ["é one\n".encode(), b"two ?"]
    path.write_text('{"body": "other"}\n')
    assert read_text(path, "body").raw == b"other"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"body": "x", "id": 1}\n', "line 1: column=text: does not exist"),
        (b'{"body": "x", "id": 1}\n', "of: body, id"),
        (b'{"text": "x"}\n{"text": 7}\n', "line 2: column=text: must be a string"),
        (b'{"text": "x"}\n["text"]\n', "line 2: must be a JSON object"),
        (b'{"text": "x"}\n{"tex', "line 2: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'{"text": "x"}\n{"text": "\xff"}\n', "line 2: not UTF-8"),
        (b'{"text": "' + b"x" * 100 + b'"}\n', "a row of more than 50 bytes"),
    ],
)
def test_bad_jsonl_is_one_line(tmp_path: Path, monkeypatch, content: bytes, message: str):
    if b"x" * 100 in content:
        monkeypatch.setattr(records, "MAX_ROW", 50)
    assert message in refused(tmp_path / "a.jsonl", content)


def test_rows_of_csv_and_tsv_are_documents(tmp_path: Path):
    long = "x" * 200_000  # the csv module's own limit is 131,072
    path = tmp_path / "a.csv"
    path.write_text(f'id,text\n1,"one, ""quoted""\nline"\n\n2,\n3,{long}\n')
    assert documents(read_text(path)) == [b'one, "quoted"\nline\n', long.encode()]
    assert csv.field_size_limit() == 131_072
    path.write_text("id;text\r\n1;one, two\r\n")
    assert read_text(path).raw == b"one, two"
    path.write_text("id,text\n1,one,\n")  # a mark after the last field
    assert read_text(path).raw == b"one"
    (tmp_path / "a.tsv").write_text("body\tid\none, two\t1\n")
    assert read_text(tmp_path / "a.tsv", "body").raw == b"one, two"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,body\n1,x\n", "column=text: does not exist; choose one with --option column NAME"),
        (b"id,body\n1,x\n", "of: id, body"),
        (b"", "column=text: does not exist"),
        (b"id,text\n1\n", "row 1 has 1 fields, the header names 2"),
        (b"id,text\n1,one\n2,two, three\n", "row 2 has 3 fields, the header names 2; write a text"),
        (b"text;id\none; two;1\n", "a text that holds a semicolon in quotes"),
        (b'id,text\n1,one\n2,"two\n3,three\n', "row 2: damaged, or not CSV (unexpected end"),
        (b'id,text\n1,"one" two\n', "a quote in quotes, and that quote twice"),
        (b'id,text\n1,"' + b"y\n" * 50, "a row of more than 50 bytes"),
        (b'id,text\n1,"' + b'","\n' * 50, "a row of more than 50 bytes"),
    ],
)
def test_bad_csv_is_one_line(tmp_path: Path, monkeypatch, content: bytes, message: str):
    monkeypatch.setattr(records, "MAX_ROW", 50)
    assert message in refused(tmp_path / "a.csv", content)


def test_an_array_of_json_is_rows_and_other_json_names_jsonl(tmp_path: Path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "one"}, "two"]')
    assert documents(read_text(path)) == [b"one\n", b"two"]
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert documents(read_text(path)) == [b"one\n", b"two"]
    path.write_text('{"text": "one\u2028line"}\r\n{"text": "two\x85"}\n\n', encoding="utf-8")
    assert documents(read_text(path)) == ["one\u2028line\n".encode(), "two\x85".encode()]
    path.write_text('{"text": "one\u2028line"}', encoding="utf-8")
    assert documents(read_text(path)) == ["one\u2028line".encode()]
    assert "line 3: not JSON" in refused(path, b'{"text": "one"}\n\n{"text": "tw')
    assert "write JSONL instead" in refused(path, b'{\n"text": "one"\n}')
    assert "write JSONL instead" in refused(path, b'[{"text": "o')
    assert "item 1: column=text: does not exist" in refused(path, b'[{"body": "one"}]')
    monkeypatch.setattr(records, "MAX_JSON", 20)
    assert "JSON of more than 20 bytes; write JSONL" in refused(path, b'["a", "b", "c", "d", "e"]')


def test_a_column_of_plain_text_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(MemtrainError, match="column=body: plain text has no columns"):
        prepare_text(tmp_path / "a.txt", tmp_path / "out", column="body")


# -------------------------------------------------------------------------------------- parquet


@pytest.fixture
def write_parquet():
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(path: Path, columns: dict, **options) -> Path:
        parquet.write_table(pyarrow.table(columns), path, **options)
        return path

    return write


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert 'pip install "memtrain[data]"' in refused(tmp_path / "a.parquet", b"PAR1")


def test_every_row_of_a_parquet_file_is_a_document(tmp_path: Path, write_parquet):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"n": [1, 2, 3], "text": ["é one", None, "two"], "body": ["x", "y", ""]})
    assert documents(read_text(path)) == ["é one\n".encode(), b"two"]
    assert documents(read_text(path, "body")) == [b"x\n", b"y"]
    assert "not a parquet file, or damaged" in refused(path, path.read_bytes()[:-20])
    write_parquet(path, {"story": ["a"], "text": [1]})
    assert "column=text: holds int64, must be strings" in refused(path, path.read_bytes())
    message = refused(path, path.read_bytes(), "body")
    assert "column=body: does not exist" in message and "of: story, text" in message


def test_parquet_that_is_not_utf8_is_one_line(tmp_path: Path, write_parquet):
    path = write_parquet(
        tmp_path / "a.parquet", {"text": ["ääää", "b"]}, compression="none", use_dictionary=False
    )
    content = path.read_bytes().replace("ääää".encode(), b"\xff" * 8)
    assert "damaged ('utf-8' codec can't decode" in refused(path, content)


def test_parquet_rows_that_share_their_bytes_are_bounded(tmp_path: Path, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x" * 2**19] * 140}, compression="zstd")
    assert path.stat().st_size < 2000
    message = refused(path, path.read_bytes())
    assert "refused, unpacks to more than 67,108,864 bytes, over 200 times its size" in message


def test_parquet_rows_that_take_no_space_are_bounded(tmp_path: Path, monkeypatch, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 5000})
    monkeypatch.setattr(arrow_files, "MAX_ROWS", 1000)
    assert "refused, claims 5,000 rows, more than 1,000" in refused(path, path.read_bytes())
