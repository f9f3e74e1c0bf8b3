"""MNIST, from its IDX files."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memtrain.data.images import ImageFormat, encode_images
from memtrain.data.prepare import download
from memtrain.data.prepare.finding import check_folder, first_there
from memtrain.data.prepare.idx import read_idx
from memtrain.data.store import Split, Store, StoreMeta, check_place, write_store
from memtrain.errors import MemtrainError


def prepare_mnist(
    data_dir: Path | None,
    out: Path,
    *,
    levels: int = 256,
    patch: int = 1,
    overwrite: bool = False,
) -> Store:
    """MNIST's 28x28 digits, 256 grey levels in raster order. Its labels are not read.

    Args:
        data_dir: holds the IDX files of the images.
        out: the store's folder.
        levels: grey levels; 4 with patch 2 make 196 tokens of 256 a digit.
        patch: side of the squares that make one token.
        overwrite: replace a store that is there.
    """
    picture = ImageFormat(height=28, width=28, levels=levels, patch=patch)
    check_place(out, overwrite)
    with _mnist_files(data_dir) as files:
        splits = {}
        for split, path in zip(("train", "test"), files, strict=True):
            gray = read_idx(path)
            if gray.shape[1:] != (28, 28):
                raise MemtrainError(f"{path}: shape {gray.shape}, MNIST's images are 28x28")
            tokens = encode_images(gray, levels=levels, patch=patch)
            splits[split] = Split(tokens.reshape(-1))
    meta = StoreMeta(
        name="mnist",
        vocab_size=picture.vocab_size,
        source=f"MNIST (LeCun and Cortes), from {data_dir or download.MNIST_URL}",
        document_length=picture.length,
        picture=picture,
    )
    return write_store(out, meta, splits, overwrite=overwrite)


@contextmanager
def _mnist_files(data_dir: Path | None) -> Iterator[list[Path]]:
    """The images of train and test."""
    if data_dir is None:
        with tempfile.TemporaryDirectory() as folder:
            yield download.download_mnist(Path(folder))
        return
    check_folder("mnist", data_dir)
    found = [
        first_there(data_dir, name, name.removesuffix(".gz")) for name in download.MNIST_SHA256
    ]
    missing = [
        name for name, path in zip(download.MNIST_SHA256, found, strict=True) if path is None
    ]
    if missing:
        raise MemtrainError(f"mnist: {data_dir} has no {' and no '.join(missing)}")
    yield [path for path in found if path is not None]
