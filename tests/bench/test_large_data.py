"""The benchmark of a large token file next to a small one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from memtrain.bench import large_data as module
from memtrain.bench.large_data import (
    DataCase,
    Memory,
    PeakMemory,
    data_record,
    measure_data,
    print_data,
    write_tokens,
)
from memtrain.cli import main
from memtrain.config import EngineConfig
from memtrain.errors import MemtrainError

CPU = torch.device("cpu")


def test_written_tokens_are_a_plain_array(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 100)
    write_tokens(tmp_path / "tokens.npy", 1050)
    tokens = np.load(tmp_path / "tokens.npy")
    assert tokens.dtype == np.uint16 and len(tokens) == 1050
    assert tokens.max() < 1024 and len(np.unique(tokens[:100])) > 50
    assert not np.array_equal(tokens[:100], tokens[100:200])


def test_the_peak_of_allocated_memory_is_seen_after_it_is_freed():
    watched = PeakMemory()
    before = module.peak("RssAnon")
    filled = np.ones(2**25)  # 256 MB
    watched._look()
    del filled
    peaks = watched.end()
    if before is None:  # not on Linux
        assert peaks == Memory(rss_anon=None, vm_hwm=None)
        return
    assert peaks.rss_anon is not None and peaks.rss_anon >= before + 2**28
    assert peaks.vm_hwm is not None and peaks.vm_hwm >= peaks.rss_anon


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    with pytest.raises(MemtrainError, match=r"gigabytes=3: .* need 6.0 GB, .* has 1.0 GB free"):
        measure_data(3.0, "tiny", EngineConfig(device="cpu"), 1.0, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "--gigabytes", "0"], "gigabytes=0.0: must be above 0"),
        (["data", "--folder", "/nowhere"], "folder=/nowhere: No such file"),
        (["smt", "--gigabytes", "1"], "gigabytes: only for data; memtrain bench data --gigabytes"),
        (["data", "--minutes", "1"], "minutes: only for growth"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], message: str, capsys):
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown and len(shown.strip().splitlines()) == 1


CASES = [
    DataCase(
        name=name,
        file_bytes=size,
        prepare_seconds=1.0,
        prepare_memory=Memory(rss_anon=10**8, vm_hwm=2 * 10**8),
        placement=f"data: {name}",
        steps_per_second={"smt": rate, "bptt": 8.0},
        train_memory=Memory(rss_anon=None, vm_hwm=None),
    )
    for name, size, rate in (("small", 10**7, 40.0), ("large", 3 * 10**9, 30.0))
]


def test_the_tables_compare_the_speeds(capsys):
    print_data(CASES, CPU)
    shown = capsys.readouterr().out
    assert "smt: the large store at 75% of the small one's speed" in shown
    assert "large: data: large" in shown and "100 MB" in shown
    assert json.loads(json.dumps(data_record(CASES, "tiny", CPU)))["cases"][1]["name"] == "large"


@pytest.mark.slow
def test_both_stores_are_prepared_and_trained_from(tmp_path: Path):
    """In processes of their own."""
    small, large = measure_data(0.02, "tiny", EngineConfig(device="cpu"), 1e-3, tmp_path)
    assert "in memory" in small.placement and "read from disk" in large.placement
    assert all(rate > 0 for case in (small, large) for rate in case.steps_per_second.values())
    assert not list(tmp_path.iterdir())
