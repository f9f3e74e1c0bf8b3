"""Files from a stranger: nothing in them runs, writes elsewhere, or takes the memory."""

import gzip
import hashlib
import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import TINY
from memtrain import cli
from memtrain.config import CellConfig, Recall, RunConfig
from memtrain.config.serialize import from_json, to_json
from memtrain.data.prepare import prepare_path
from memtrain.errors import CheckpointError, MemtrainError
from memtrain.training.run import Run

SCRIPTS = Path(__file__).parents[1] / "scripts"
SOURCE = Path(__file__).parents[1] / "src"


class Mark:
    """A pickle that leaves a file where it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    Run.create(replace(TINY, bptt=replace(TINY.bptt, steps=0)), folder).train()
    return folder


def replace_file(run: Path, name: str, content: bytes) -> None:
    """Put this content in every checkpoint, with a checksum that fits."""
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / name).write_bytes(content)
        state = json.loads((checkpoint / "state.json").read_text())
        state["sha256"][name] = hashlib.sha256(content).hexdigest()
        (checkpoint / "state.json").write_text(json.dumps(state))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
def test_a_pickle_named_as_a_checkpoint_is_refused_unopened(run: Path, tmp_path: Path, name: str):
    replace_file(run, name, pickle.dumps(Mark(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match="SafetensorError|not as long"):
        Run.open(run)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("header", [2**63 - 1, 2**40, 10**8 + 1])
def test_a_checkpoint_that_claims_a_huge_header_is_refused(run: Path, header: int):
    replace_file(run, "weights.safetensors", struct.pack("<Q", header) + b"{}")
    with pytest.raises(CheckpointError, match="SafetensorError|not as long"):
        Run.open(run)


def test_a_checkpoint_that_claims_a_huge_tensor_is_refused(run: Path):
    text = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})
    content = struct.pack("<Q", len(text)) + text.encode() + b"\0" * 64
    replace_file(run, "weights.safetensors", content)
    with pytest.raises(CheckpointError, match="SafetensorError|not as long"):
        Run.open(run)


def test_a_checkpoint_that_is_a_link_to_another_file_is_not_followed(run: Path, tmp_path: Path):
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "weights.safetensors").rename(tmp_path / checkpoint.name)
        (checkpoint / "weights.safetensors").symlink_to(tmp_path / checkpoint.name)
    with pytest.raises(CheckpointError, match="weights.safetensors is missing"):
        Run.open(run)


def test_a_pickle_in_place_of_a_config_or_an_array_is_refused_unopened(run: Path, tmp_path: Path):
    evil = pickle.dumps(Mark(tmp_path / "mark"))
    (run / "config.json").write_bytes(evil)
    with pytest.raises(MemtrainError, match="config"):
        Run.open(run)
    np.save(tmp_path / "tokens.npy", np.array([Mark(tmp_path / "mark")]), allow_pickle=True)
    with pytest.raises(MemtrainError, match="tokens.npy"):
        prepare_path(tmp_path / "tokens.npy", tmp_path / "out")
    assert not (tmp_path / "mark").exists() and not (tmp_path / "out").exists()


def test_models_beyond_the_machine_are_refused_before_memory_is_taken(tmp_path: Path):
    cell = CellConfig(width=2**16, layers=256)  # the upper bounds
    with pytest.raises(MemtrainError, match=r"models have .* parameters, .* GiB; this machine has"):
        Run.create(replace(TINY, cell=cell), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("digits", [10, 30, 4000])
def test_absurd_numbers_are_refused_at_once(digits: int):
    with pytest.raises(MemtrainError, match="key_symbols=.*: must be at most"):
        Recall(key_symbols=10**digits, key_length=4096)
    text = to_json(TINY).replace('"memory_tokens": 2', '"memory_tokens": ' + "9" * (digits + 500))
    with pytest.raises(MemtrainError, match="memory_tokens=.*: must be at most|not a config"):
        from_json(text)


def test_an_oversized_config_is_not_read(run: Path):
    with (run / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MemtrainError, match="larger than"):
        Run.open(run)


# --------------------------------------------------------------------------------------- archives


def claims(side: int) -> bytes:
    """A PNG whose header claims side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    )


def test_an_image_of_50000_by_50000_pixels_is_refused_from_its_header(tmp_path: Path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "bomb.png").write_bytes(claims(50_000))
    with pytest.raises(MemtrainError, match="bomb.png: refused, claims"):
        prepare_path(tmp_path / "pictures", tmp_path / "out")


def test_a_zip_with_paths_outside_its_folder_writes_nothing(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        archive.writestr("../escaped.png", b"")
    before = sorted(tmp_path.parent.iterdir())
    with pytest.raises(MemtrainError, match="points outside of the zip"):
        prepare_path(tmp_path / "evil.zip", tmp_path / "out")
    assert sorted(tmp_path.parent.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.zip"]


def test_a_gzip_bomb_is_refused(tmp_path: Path):
    stream = io.BytesIO()
    with gzip.open(stream, "wb") as file:
        for _ in range(80):
            file.write(b"all work and no play\n" * 50_000)
    (tmp_path / "bomb.txt.gz").write_bytes(stream.getvalue())
    with pytest.raises(MemtrainError, match="refused, unpacks to more than"):
        prepare_path(tmp_path / "bomb.txt.gz", tmp_path / "out")


# ----------------------------------------------------------------------------------- any bytes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=12,
)


def paths_of(plain: dict, prefix: tuple = ()) -> list[tuple]:
    found = []
    for key, value in plain.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths_of(value, (*prefix, key))
    return found


PLAIN = json.loads(to_json(TINY))


@given(st.sampled_from(paths_of(PLAIN)), JSON)
def test_a_config_with_any_value_anywhere_is_accepted_or_refused_with_a_reason(path: tuple, value):
    plain = json.loads(to_json(TINY))
    place = plain
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        assert isinstance(from_json(json.dumps(plain)), RunConfig)
    except MemtrainError as error:
        assert str(error).strip()


WORDS = st.sampled_from(
    ["train", "resume", "eval", "generate", "data", "demo", "retrieval", "--help", "--smt.steps"]
    + ["--cell.kind", "--folder", "--json", "--count", "-1", "1e999", "nan", "gru", "--", "-", ""]
) | st.text(max_size=8).filter(lambda text: "\0" not in text)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS, max_size=5))
def test_any_arguments_end_in_an_exit_status(tmp_path: Path, monkeypatch, capsys, words):
    def never(*_, **__):
        raise MemtrainError("no training here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "create", never)
    monkeypatch.setattr("memtrain.demo.run_demo", never)
    monkeypatch.setattr("memtrain.data.prepare.prepare", never)
    try:
        status = cli.main(words)
    except SystemExit as stop:  # --help
        status = stop.code or 0
    assert status in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([".txt", ".txt.gz", ".npy", ".zip", ".parquet", ""]), st.binary(max_size=200)
)
def test_any_bytes_as_a_data_file_are_accepted_or_refused_with_a_reason(
    tmp_path: Path, suffix, content
):
    heads = {".gz": b"\x1f\x8b\x08", ".npy": b"\x93NUMPY\x01\x00", ".zip": b"PK\x03\x04"}
    path = tmp_path / f"file{suffix}"
    path.write_bytes(heads.get(path.suffix, b"") + content)
    try:
        prepare_path(path, tmp_path / "out", overwrite=True)
    except MemtrainError as error:
        assert str(error).strip()


# ------------------------------------------------------------------------------ the two scripts


def script(*arguments: str) -> str:
    import os

    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=SCRIPTS, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_hundred_damaged_files_are_accepted_or_refused_with_a_reason():
    assert "100 cases, 0 failed" in script("fuzz.py", "--cases", "100", "--seed", "3")


@pytest.mark.slow
def test_a_repeatedly_killed_run_ends_like_an_uninterrupted_one(tmp_path: Path):
    folder = str(tmp_path / "kills")
    output = script("kill_test.py", "--kills", "3", "--steps", "20", "--folder", folder)
    assert "3 of 3 kills resumed" in output


@pytest.mark.slow
def test_two_thousand_damaged_files():
    assert "2000 cases, 0 failed" in script("fuzz.py", "--cases", "2000", "--seed", "11")
