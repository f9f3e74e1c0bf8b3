"""Tokens that stay on disk."""

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.data import token_file as module
from memtrain.data.token_file import TokenFile
from memtrain.errors import MemtrainError

DTYPES = {"<u1": 200, "<u2": 60_000, "<u4": 10_000_000}


def stored(folder: Path, dtype: str, count: int = 500) -> tuple[TokenFile, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, DTYPES[dtype], count).astype(dtype)
    path = folder / "train.bin"
    path.write_bytes(tokens.tobytes())
    return TokenFile(path, np.dtype(dtype), count, DTYPES[dtype]), tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_are_slices_of_the_tokens(tmp_path: Path, dtype: str):
    file, tokens = stored(tmp_path, dtype)
    offsets = np.array([0, 7, 480, 7])
    found = file.windows(offsets, 20)
    assert found.dtype == np.int64
    assert found.tolist() == [tokens[at : at + 20].tolist() for at in offsets]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_and_blocks_are_those_of_an_array(tmp_path: Path, monkeypatch, dtype: str):
    monkeypatch.setattr(module, "READ", 64)
    file, tokens = stored(tmp_path, dtype)
    assert len(file) == len(tokens) and file.nbytes == tokens.nbytes
    for part in (slice(None), slice(3, 3), slice(490, 900), slice(5, 411)):
        assert file[part].tolist() == tokens[part].tolist()
    blocks = list(file.checked_blocks(hashlib.sha256(tokens.tobytes()).hexdigest()))
    assert len(blocks) > 3 and np.concatenate(blocks).tolist() == tokens.tolist()


@given(first=st.integers(0, 49), size=st.integers(1, 50))
def test_a_window_anywhere_is_read_whole(tmp_path_factory, first: int, size: int):
    file, tokens = stored(tmp_path_factory.mktemp("tokens"), "<u2", 100)
    assert (
        file.windows(np.array([first]), size)[0].tolist() == tokens[first : first + size].tolist()
    )


def test_a_file_of_another_size_is_refused(tmp_path: Path):
    path = stored(tmp_path, "<u2")[0].path
    with pytest.raises(MemtrainError, match=r"train.bin has 1,000 bytes, 998 were written"):
        TokenFile(path, np.dtype("<u2"), 499, 60_000)


def test_a_file_that_is_removed_or_replaced_is_still_read(tmp_path: Path):
    file, tokens = stored(tmp_path, "<u2")
    (tmp_path / "other").write_bytes(b"something else")
    (tmp_path / "other").rename(file.path)
    assert file[:].tolist() == tokens.tolist()
    file.path.unlink()
    assert file.windows(np.array([3]), 5)[0].tolist() == tokens[3:8].tolist()


def cut(path: Path) -> None:
    os.truncate(path, 300)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"12345678")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("happens", [cut, overwritten])
@pytest.mark.parametrize("offset", [0, 400])
def test_a_file_that_is_changed_in_place_is_an_error_and_not_a_crash(tmp_path, happens, offset):
    file, _ = stored(tmp_path, "<u2")
    happens(file.path)
    with pytest.raises(MemtrainError, match=r"train.bin: changed while it was in use; [^\n]*$"):
        file.windows(np.array([offset]), 4)


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(tmp_path: Path):
    path = tmp_path / "train.bin"
    tokens = np.arange(1000, dtype="<u2")
    path.write_bytes(tokens.tobytes())
    file = TokenFile(path, np.dtype("<u2"), 1000, 990)
    assert file.windows(np.array([0, 980]), 10).max() == 989
    message = r"token 990 is 990, outside the vocabulary 0..989: damaged; [^\n]*$"
    with pytest.raises(MemtrainError, match=message):
        file.windows(np.array([7, 983]), 8)
    with pytest.raises(MemtrainError, match="token 999 is 999"):
        file[991:]


def test_changed_tokens_are_found_by_their_checksum(tmp_path: Path):
    file, _ = stored(tmp_path, "<u2")
    with pytest.raises(MemtrainError, match=r"train.bin: is not what was written \(checksum\)"):
        list(file.checked_blocks("0" * 64))


def test_a_disk_that_fails_is_one_line(tmp_path: Path, monkeypatch):
    file, _ = stored(tmp_path, "<u2")

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(MemtrainError, match=r"train.bin: Input/output error$"):
        file.windows(np.array([0]), 4)


def test_the_file_is_closed_with_the_last_reference(tmp_path: Path):
    file, _ = stored(tmp_path, "<u1")
    before = len(os.listdir("/proc/self/fd"))
    del file
    assert len(os.listdir("/proc/self/fd")) == before - 1
