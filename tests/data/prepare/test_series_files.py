"""Series of numbers from CSV, parquet and .npy files, and one line for each mistake."""

from pathlib import Path

import numpy as np
import pytest

from memtrain.data.prepare import series_files
from memtrain.data.prepare.series_files import read_table
from memtrain.data.prepare.series_table import Columns, Table
from memtrain.errors import MemtrainError

LONG = "id,day,y,z\nb,1,1,10\na,1,2,20\nb,2,3,30\na,2,4,40\n"
NAN = float("nan")


def read(folder: Path, text: str, name: str = "x.csv", **columns) -> Table:
    path = folder / name
    path.write_bytes(text.encode())
    return read_table(path, Columns(**columns))


def refused(folder: Path, text: str, **columns) -> str:
    """The one line about a CSV that cannot be read."""
    with pytest.raises(MemtrainError) as caught:
        read(folder, text, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_csv_with_every_mark_and_every_missing_number(tmp_path, mark):
    text = 'y,"z"\r\n1,2\r\n,NA\r\n?,nan\r\nNull,-1e3\r\n\r\n "5","6" \r\n'.replace(",", mark)
    table = read(tmp_path, text.replace(' "5"', '"5"').replace('"6" ', '"6"'))
    assert table.columns.targets == ("y", "z")
    expected = [[1, 2], [NAN, NAN], [NAN, NAN], [NAN, -1000], [5, 6]]
    np.testing.assert_array_equal(table.numbers, expected)
    assert table.place(4) == "line 7" and table.times is None


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_name_in_quotes_may_hold_a_mark(tmp_path, mark):
    (tmp_path / "x.csv").write_text(f'"heat, C; in\ta"{mark}t\n1{mark}2\n')
    table = read_table(tmp_path / "x.csv", Columns(time="t"))
    assert table.columns.targets == ("heat, C; in\ta",) and table.numbers.tolist() == [[1]]


def test_roles_choose_and_order_the_columns(tmp_path):
    table = read(tmp_path, "a,b,c,d\n1,2,3,x\n4,5,6,y\n", targets=("c",), known=("a",))
    assert table.numbers.tolist() == [[3, 1], [6, 4]]
    rest = read(tmp_path, "a,b,c\n1,2,3\n4,5,6\n", known=("b",))
    assert rest.columns.targets == ("a", "c") and rest.numbers.tolist() == [[1, 3, 2], [4, 6, 5]]


def test_long_format_is_grouped_by_series_in_file_order(tmp_path):
    table = read(tmp_path, LONG, time="day", series="id")
    assert table.names == ("b", "a") and table.starts.tolist() == [0, 2]
    assert table.numbers.tolist() == [[1, 10], [3, 30], [2, 20], [4, 40]]
    assert table.times is not None and table.times.tolist() == [1, 2, 1, 2]
    assert table.place(1) == "line 4"


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (["1", "2.5", "9"], [0, 1.5, 8]),
        (["2024-01-01", "2024-01-02", "2024-01-04"], [0, 86400, 3 * 86400]),
        (["2024-01-01 00:00", "2024-01-01T01:00:00", "2024-01-01 01:00:00.5"], [0, 3600, 3600.5]),
        (["2024-01-01T00:00Z", "2024-01-01T02:00+01:00", "2024-01-01T02:00Z"], [0, 3600, 7200]),
        (["2024-01", "2024-02", "2024-03"], [0, 31 * 86400, 60 * 86400]),
    ],
)
def test_times_are_numbers_or_dates(tmp_path, times, expected):
    text = "when,y\n" + "".join(f"{time},{row}\n" for row, time in enumerate(times))
    table = read(tmp_path, text, time="when")
    assert table.times is not None
    np.testing.assert_allclose(table.times - table.times[0], expected)


def test_an_empty_line_of_a_single_column_is_a_missing_number(tmp_path):
    numbers = read(tmp_path, "y\n1\n\n3\n\n\n").numbers
    np.testing.assert_array_equal(numbers, [[1], [NAN], [3]])


def test_many_chunks_equal_one(tmp_path, monkeypatch):
    text = "id,t,y\n" + "".join(f"{row % 3},{row},{row * 0.5}\n" for row in range(100))
    whole = read(tmp_path, text, time="t", series="id")
    monkeypatch.setattr(series_files, "CHUNK", 7)
    chunked = read(tmp_path, text, time="t", series="id")
    assert whole.numbers.tolist() == chunked.numbers.tolist()
    assert whole.names == chunked.names and whole.place(50) == chunked.place(50)


def test_npy_of_each_shape(tmp_path):
    rng = np.random.default_rng(0)
    for shape in ((6,), (6, 2), (3, 4, 2)):
        path = tmp_path / "x.npy"
        np.save(path, array := rng.normal(size=shape).astype(np.float32))
        table = read_table(path, Columns())
        width = 1 if len(shape) == 1 else shape[-1]
        np.testing.assert_array_equal(table.numbers, array.reshape(-1, width))
        assert table.columns.targets == tuple("01")[:width]
        assert len(table.starts) == (3 if len(shape) == 3 else 1)
    np.save(path, np.array([[0, 5, 1.5], [1, 5, 2.5], [0, 6, 3.5]]))
    table = read_table(path, Columns(targets=("2",), time="1", series="0"))
    assert table.numbers[:, 0].tolist() == [1.5, 3.5, 2.5] and table.names == ("0", "1")


def test_parquet_has_the_numbers_of_a_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    dates = np.array(["2024-01-01", "2024-01-02", "2024-01-01", "2024-01-02"], "datetime64[s]")
    columns = {
        "id": ["a", "a", "b", "b"],
        "when": dates,
        "y": pyarrow.array([1.5, None, 3.0, 4.0]),
        "n": pyarrow.array([1, 2, None, 4]),
        "note": ["w", "x", "y", "z"],
    }
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    table = read_table(path, Columns(("y",), ("n",), "when", "id"))
    np.testing.assert_array_equal(table.numbers, [[1.5, 1], [NAN, 2], [3, NAN], [4, 4]])
    assert table.names == ("a", "b") and table.place(2) == "row 3"
    assert table.times is not None and table.times.tolist()[:2] == [1704067200, 1704153600]
    with pytest.raises(MemtrainError, match=r"column 'when' has timestamp.*--data.time when"):
        read_table(path, Columns(series="id"))
    with pytest.raises(MemtrainError, match="column 'note' has string, which are not numbers"):
        read_table(path, Columns(time="when", series="id"))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(MemtrainError, match="not a parquet file, or damaged"):
        read_table(path, Columns())


def test_row_numbers_of_pandas_are_not_predicted(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, index = tmp_path / "x.parquet", "__index_level_0__"
    parquet.write_table(pyarrow.table({"y": [1.5, 2.5], index: [3, 7]}), path)
    with pytest.raises(MemtrainError, match="row numbers of pandas; .*index=False"):
        read_table(path, Columns())
    for columns in (Columns(time=index), Columns(targets=("y",)), Columns(targets=(index, "y"))):
        assert read_table(path, columns).numbers[:, -1].tolist() == [1.5, 2.5]


def test_nanoseconds_of_a_time_are_cut(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    times = pyarrow.array(np.array([1_000_000_333, 2_000_001_999], "datetime64[ns]"))
    parquet.write_table(pyarrow.table({"y": [1.5, 2.5], "t": times}), tmp_path / "x.parquet")
    table = read_table(tmp_path / "x.parquet", Columns(time="t"))
    assert table.times is not None and table.times.tolist() == [1.0, 2.000001]


def test_a_time_of_day_is_refused_in_words(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    hours = pyarrow.array([0, 1], pyarrow.time32("s"))
    parquet.write_table(pyarrow.table({"y": [1.5, 2.5], "t": hours}), path)
    with pytest.raises(MemtrainError, match=r"'t' has time32.*; a time must be a number, or a"):
        read_table(path, Columns(time="t"))
    with pytest.raises(MemtrainError, match="'t' has time32.*--data.targets a,b"):
        read_table(path, Columns())


@pytest.mark.parametrize(
    ("text", "columns", "parts"),
    [
        ("y,w\n1,sunny\n", {}, ["line 2", "'w' has 'sunny'", "not a number", "--data.targets a,b"]),
        ("y\n1\n-\n", {}, ["line 3", "'y' has '-'", "leave the field empty where a number is"]),
        ("day,y\n2024-01-01,1\n", {}, ["'day' has '2024-01-01'", "--data.time day"]),
        ("a;b\n1;2,5\n", {}, ["'b' has '2,5'", "write decimals with a point"]),
        ('a,b\n1,"1,000"\n', {}, ["'b' has '1,000'", "and nothing between thousands"]),
        ('a,b\n1,"1,234.5"\n', {}, ["'b' has '1,234.5'", "and nothing between thousands"]),
        ("y\n1\ninf\n", {}, ["line 3", "'y' has inf", "must lie within 1e+30"]),
        ("1,2\n3,4\n", {}, ["line 1: must name the columns", "add a header"]),
        (",y\n0,1\n", {}, ["line 1: column 1 has no name", "index=False"]),
        ("y,y\n0,1\n", {}, ["two columns are called 'y'"]),
        ("t,y\n2024-01-01,1\nNaT,1\n", {"time": "t"}, ["line 3", "'NaT'; a time must be an ISO"]),
        ("t,y\n2024-01-01 00:10 AM,1\n", {"time": "t"}, ["line 2", "a time must be an ISO date"]),
        ("y,z\n0,1\n1\n", {}, ["line 3: has 1 fields, the header names 2"]),
        ('y,z\n0,"1\n', {}, ["line 2: damaged, or not CSV"]),
        ('y,"z\n0,1\n', {}, ["line 1: damaged, or not CSV"]),
        ('y,"z" a\n0,1\n', {}, ["line 1: damaged, or not CSV"]),
        ("yy,z\n0,1\n", {"targets": ("y",)}, ["data.targets='y'", "no such column", "yy"]),
        (
            "t,y\n1,1\n2,1\n2,1\n",
            {"time": "t"},
            ["line 4", "the same time as line 3", "--data.ser"],
        ),
        ("t,y\n2,1\n1,1\n", {"time": "t"}, ["line 3", "a time before line 2", "sort the rows"]),
        (
            "id,t,y\na,1,1\nb,1,1\na,1,2\n",
            {"time": "t", "series": "id"},
            ["line 4: column 't' has the same time as line 2; sort the rows by time, keep one"],
        ),
        ("t,y\n01/02/2024,1\n", {"time": "t"}, ["'01/02/2024'", "ISO date such as 2024-01-31"]),
        ("t,y\n1,1\nx,1\n", {"time": "t"}, ["line 3", "a time must be a number, as the first"]),
        ("t,y\n1,1\n,1\n", {"time": "t"}, ["line 3: column 't' has no time"]),
        ("id,y\na,1\n,1\n", {"series": "id"}, ["line 3: column 'id' is empty"]),
        ("t\n1\n", {"time": "t"}, ["has no column to predict"]),
        ("y\n", {}, ["has no rows"]),
    ],
)
def test_mistakes_are_one_line_with_line_column_and_remedy(tmp_path, text, columns, parts):
    message = refused(tmp_path, text, **columns)
    assert str(tmp_path / "x.csv") in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("code", ["LATIN1", "UTF-16"])
def test_another_encoding_is_refused_with_how_to_convert_it(tmp_path, code):
    (tmp_path / "x.csv").write_text("größe\n1\n", encoding=code)
    with pytest.raises(MemtrainError, match=f"line 1: not UTF-8 text .*iconv -f {code} -t UTF-8"):
        read_table(tmp_path / "x.csv", Columns())


def test_files_of_other_kinds_are_refused(tmp_path):
    for name, part in (("x.xlsx", "CSV, parquet or .npy"), ("gone.csv", "no such file")):
        with pytest.raises(MemtrainError, match=part):
            read_table(tmp_path / name, Columns())
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(MemtrainError, match="is not a regular file"):
        read_table(tmp_path / "folder.csv", Columns())
    (tmp_path / "x.csv").write_bytes(b"y\n\xff\xfe\n")
    with pytest.raises(MemtrainError, match="line 2: not UTF-8"):
        read_table(tmp_path / "x.csv", Columns())
    path = tmp_path / "x.npy"
    np.save(path, np.array(["a"]))
    with pytest.raises(MemtrainError, match=r"must be numbers of shape \(T,\)"):
        read_table(path, Columns())
    np.save(path, np.zeros((2, 3, 1)))
    with pytest.raises(MemtrainError, match="leave it out"):
        read_table(path, Columns(series="0"))
    path.write_bytes(b"no array")
    with pytest.raises(MemtrainError, match="not a .npy file"):
        read_table(path, Columns())


def test_a_file_that_does_not_fit_in_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("memtrain.data.prepare.limits.available_memory", lambda: 10)
    assert "GiB are available" in refused(tmp_path, "y\n1\n2\n3\n")
