"""Downloads are checked, and without a network one line says what to get."""

import gzip
import hashlib
import io
import socket
import struct
import sys
import threading
import types
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memtrain.data.codec import decode_text
from memtrain.data.prepare import download, prepare
from memtrain.errors import MemtrainError

TRAIN = np.random.default_rng(0).integers(0, 256, (3, 28, 28), np.uint8)
TEST = np.zeros((1, 28, 28), np.uint8)


def refusal(tmp_path: Path, call: Callable[[Path], object]) -> str:
    """The one line with which a call refuses; it must leave nothing where it was to write."""
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    with pytest.raises(MemtrainError) as caught:
        call(place / "out")
    assert list(place.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def idx(images: np.ndarray) -> bytes:
    return struct.pack(">4I", 0x803, *images.shape) + images.tobytes()


def idx_labels(*labels: int) -> bytes:
    return struct.pack(">2I", 0x801, len(labels)) + bytes(labels)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("a download"))


def hub_with(monkeypatch, download: Callable) -> None:
    """Stand in for huggingface_hub, whether it is installed or not."""
    hub = types.ModuleType("huggingface_hub")
    monkeypatch.setattr(hub, "hf_hub_download", download, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


@pytest.mark.parametrize(
    ("name", "file"),
    [("mnist", "t10k-images-idx3-ubyte.gz"), ("tinystories", "TinyStories-valid.txt")],
)
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_files_to_get_are_named(
    tmp_path: Path, monkeypatch, name: str, file: str, installed: bool
):
    def nothing_cached(*_, local_files_only: bool, **__):
        assert local_files_only
        raise FileNotFoundError("not in the cache")

    hub_with(monkeypatch, nothing_cached)
    if not installed:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = refusal(tmp_path, lambda out: prepare(name, out=out))
    assert f"{name}: cannot reach" in message and file in message and "--data-dir" in message


def test_a_name_lookup_that_hangs_is_not_waited_for(monkeypatch):
    answer = threading.Event()

    def hang(*_):
        answer.wait()
        raise OSError(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "create_connection", hang)
    assert not download._answers("https://example.invalid", seconds=0.01)
    answer.set()


def test_a_server_or_its_proxy_is_probed(monkeypatch):
    probed = []

    def connect(address, seconds):
        probed.append(address)
        return io.BytesIO()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    assert download._answers("https://example.invalid/data")
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "proxy.invalid:3128"})
    assert download._answers("https://example.invalid/data")
    assert probed == [("example.invalid", 443), ("proxy.invalid", 3128)]


def test_mnist_is_downloaded_and_checked(tmp_path: Path, monkeypatch):
    files = {
        "train-images-idx3-ubyte.gz": gzip.compress(idx(TRAIN)),
        "t10k-images-idx3-ubyte.gz": gzip.compress(idx(TEST)),
    }
    labels = {
        "train-labels-idx1-ubyte.gz": gzip.compress(idx_labels(3, 1, 2)),
        "t10k-labels-idx1-ubyte.gz": gzip.compress(idx_labels(8)),
    }
    monkeypatch.setattr(download, "_answers", lambda url: True)
    monkeypatch.setattr(
        urllib.request,
        "urlopen",
        lambda url, timeout: io.BytesIO((files | labels)[url.rsplit("/", 1)[1]]),
    )
    message = refusal(tmp_path, lambda out: prepare("mnist", out=out))
    assert "damaged download (checksum)" in message
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(download, "MNIST_SHA256", sums)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in labels.items()}
    monkeypatch.setattr(download, "MNIST_LABELS_SHA256", sums)
    store = prepare("mnist", out=tmp_path / "out")
    assert np.array_equal(store.tokens("train"), TRAIN.reshape(-1))
    assert store.labels("train").tolist() == [3, 1, 2]


def test_a_download_that_breaks_off_is_one_line(tmp_path: Path, monkeypatch):
    def break_off(*_, **__):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(download, "_answers", lambda url: True)
    monkeypatch.setattr(urllib.request, "urlopen", break_off)
    message = refusal(tmp_path, lambda out: prepare("mnist", out=out))
    assert "Connection reset by peer" in message and "--data-dir" in message


def test_the_hub_is_not_probed_in_offline_mode(tmp_path: Path, monkeypatch):
    def from_cache(repo, name, *, local_files_only, **_):
        assert local_files_only
        return str(tmp_path / name)

    for name in download.TINYSTORIES_SHA256:
        (tmp_path / name).write_text(name)
    hub_with(monkeypatch, from_cache)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(download, "_answers", lambda url: pytest.fail("it was probed"))
    message = refusal(tmp_path, lambda out: prepare("tinystories", out=out))
    assert "damaged download (checksum)" in message
    sums = {n: hashlib.sha256(n.encode()).hexdigest() for n in download.TINYSTORIES_SHA256}
    monkeypatch.setattr(download, "TINYSTORIES_SHA256", sums)
    store = prepare("tinystories", out=tmp_path / "out")
    assert decode_text(store.tokens("train")) == "TinyStories-train.txt"


def test_an_error_of_the_hub_is_one_line(tmp_path: Path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("401 Client Error.\n\nRepository not found\nfor url")

    hub_with(monkeypatch, fail)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(download, "_answers", lambda url: True)
    message = refusal(tmp_path, lambda out: prepare("tinystories", out=out))
    assert "TinyStories-train.txt: 401 Client Error." in message
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = refusal(tmp_path, lambda out: prepare("tinystories", out=out))
    assert "pip install memtrain[data]" in message
