"""Small files that unpack to gigabytes: refused in little memory."""

import gzip
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from memtrain.data.prepare import limits
from memtrain.data.prepare.limits import (
    Budget,
    available_memory,
    ignored_note,
    list_files,
    one_line,
    suffix_of,
    unpack_budget,
)
from memtrain.errors import MemtrainError

BOUNDED = """
import resource, sys
from pathlib import Path
import numpy, PIL.Image, pyarrow.parquet
from memtrain.data.prepare import prepare_path
from memtrain.errors import MemtrainError

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 2**29
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name, options in (("60.zip", {}), ("60.zip", {"size": 8}), ("texts", {}), ("rows.parquet", {})):
    try:
        prepare_path(Path(name), Path("out"), **options)
    except MemtrainError as error:
        print(error)
"""


def test_bombs_are_refused_within_half_a_gigabyte(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = io.BytesIO()
    Image.new("1", (8192, 8192)).save(image, "PNG")
    with zipfile.ZipFile(tmp_path / "60.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(60):
            archive.writestr(f"{number}.png", image.getvalue())
    (tmp_path / "texts").mkdir()
    packed = gzip.compress(b"a" * 2**24)
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt.gz").write_bytes(packed)
    table = pyarrow.table({"text": ["a" * 500_000] * 160})
    parquet.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    assert (tmp_path / "60.zip").stat().st_size < 50_000
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(source), "ARROW_DEFAULT_MEMORY_POOL": "system"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    whole, resized, texts, rows = done.stdout.splitlines()
    assert whole.startswith("60.zip: 60 images of 8192x8192 pixels take 4,026,531,840 bytes")
    assert resized.startswith("60.zip: refused, claims more than 134,217,728 pixels")
    assert texts.startswith("texts: refused, unpacks to more than")
    assert rows.startswith("rows.parquet: refused, unpacks to more than 67,108,864 bytes")


def test_a_budget_is_shared_and_grows_with_the_packed_size():
    budget = unpack_budget("a", 2**20, "unpack it")
    assert budget.limit == 200 * 2**20 and unpack_budget("a", 1, "").limit == 2**26
    budget.spend(budget.limit)
    with pytest.raises(MemtrainError, match="a: refused, unpacks to more than .*; unpack it"):
        budget.spend(1)
    with pytest.raises(MemtrainError, match="a: refused, too much; stop"):
        Budget("a", 1, "too much", "stop").spend(2)


def test_available_memory_is_part_of_the_machines():
    assert 0 < available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_containers_limit_excludes_its_page_cache(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    for name, text in (("max", "9000"), ("current", "8000"), ("stat", "anon 1000\nfile 7000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_memory() == 8000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 8000


def test_hidden_files_are_not_listed_and_other_entries_are_counted(tmp_path: Path):
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt", ".hidden", "deep/.git/c.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "cycle").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    listing = list_files(tmp_path)
    assert sorted(listing.names) == ["a.txt", "deep/b.txt", "linked.txt"]
    assert listing.others == {"broken links": 1, "linked folders": 1, "special files": 1}


def test_runs_in_a_folder_are_no_data(tmp_path: Path):
    files = ("config.json", "metrics.jsonl", "figures/loss.png", "checkpoints/1/state.json")
    for name in ("a.txt", "other/config.json", *(f"runs/text/{one}" for one in files)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    listing = list_files(tmp_path)
    assert sorted(listing.names) == ["a.txt", "other/config.json"]
    assert listing.others == {"runs of memtrain": 1}
    assert len(list_files(tmp_path / "runs" / "text").names) == 4  # the folder that is named


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch):
    with pytest.raises(MemtrainError, match="gone: No such file or directory"):
        list_files(tmp_path / "gone")
    (tmp_path / "a").write_text("")
    monkeypatch.setattr(limits, "MAX_FILES", 0)
    with pytest.raises(MemtrainError, match="holds more than 0 files; split it"):
        list_files(tmp_path)


def test_names_are_counted_by_suffix_and_shown_safely():
    assert [suffix_of(name) for name in ("a", "a.TXT", "b.tar.gz", "a.b.c")] == [
        "",
        ".txt",
        ".tar.gz",
        ".c",
    ]
    assert one_line("a\x1b[2J\n\t") == "a\\x1b[2J\\n\\t"
    assert ignored_note({}) == ()
    assert ignored_note({".md": 1200, "": 1}) == (
        "passed over 1,201 files: 1,200 .md, 1 without a suffix",
    )
