"""Download MNIST and TinyStories and check their sha256.

Without a network this fails within a second, with a line that names the files to get.
"""

import hashlib
import http.client
import os
import socket
import threading
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from memtrain.errors import MemtrainError

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
    ),
}
MNIST_LABELS_SHA256 = {
    "train-labels-idx1-ubyte.gz": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
    ),
}
TINYSTORIES_REPO = "roneneldan/TinyStories"
TINYSTORIES_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
TINYSTORIES_SHA256 = {
    "TinyStories-train.txt": "c5cf5e22ff13614e830afbe61a99fbcbe8bcb7dd72252b989fa1117a368d401f",
    "TinyStories-valid.txt": "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4",
}


def download_mnist(folder: Path) -> list[Path]:
    """Download the images of train and test, then their labels, into a folder."""
    if not _answers(MNIST_URL):
        raise _unreachable("mnist", MNIST_URL, MNIST_SHA256)
    paths = []
    for name, sha256 in (MNIST_SHA256 | MNIST_LABELS_SHA256).items():
        try:
            with urllib.request.urlopen(MNIST_URL + name, timeout=20) as reply:
                data = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise MemtrainError(
                f"mnist: {MNIST_URL}{name}: {first_line(error)}; or pass --data-dir"
            ) from None
        paths.append(folder / name)
        paths[-1].write_bytes(data)
        _check_sha256(paths[-1], sha256)
    return paths


def download_tinystories() -> list[Path]:
    """Download both files into the Hub's cache, or find them there."""
    page = f"https://huggingface.co/datasets/{TINYSTORIES_REPO}"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    # Without a network the Hub's client would try for half a minute.
    online = not offline and _answers(os.environ.get("HF_ENDPOINT") or page)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        if not online:
            raise _unreachable("tinystories", page, TINYSTORIES_SHA256) from None
        raise MemtrainError(
            "tinystories: the download needs huggingface_hub: pip install memtrain[data], "
            "or pass --data-dir"
        ) from None
    paths = []
    for name, sha256 in TINYSTORIES_SHA256.items():
        try:
            path = hf_hub_download(
                TINYSTORIES_REPO,
                name,
                repo_type="dataset",
                revision=TINYSTORIES_REVISION,
                local_files_only=not online,
            )
        except Exception as error:  # the client and its HTTP library have many
            if not online:
                raise _unreachable("tinystories", page, TINYSTORIES_SHA256) from None
            raise MemtrainError(
                f"tinystories: {name}: {first_line(error)}; or pass --data-dir"
            ) from None
        paths.append(Path(path))
        _check_sha256(paths[-1], sha256)
    return paths


def _unreachable(name: str, url: str, files: Iterable[str]) -> MemtrainError:
    return MemtrainError(
        f"{name}: cannot reach {urlsplit(url).hostname}; get {' and '.join(files)} from {url}, "
        "put them in a folder and pass --data-dir FOLDER"
    )


def _answers(url: str, seconds: float = 1.0) -> bool:
    """Whether a server, or the proxy to it, accepts connections."""
    proxy = urllib.request.getproxies().get("https")
    if proxy:
        url = proxy if "://" in proxy else f"http://{proxy}"
    address = urlsplit(url)
    port = address.port or (80 if address.scheme == "http" else 443)
    answered = threading.Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection((address.hostname, port), seconds):
            answered.set()

    # In a thread, because name resolution has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def _check_sha256(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise MemtrainError(f"{path}: damaged download (checksum); delete it and try again")


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).splitlines()), type(error).__name__)
