"""Data sets become stores: MNIST, TinyStories, Sketchy, and files of the user's own.

Each `prepare_...` reads its files, writes a store to `out` and returns it opened. Whatever goes
wrong is one line of a `MemtrainError`, and nothing is left behind.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from memtrain.data.pictures.files import SUFFIXES
from memtrain.data.sources.mnist import prepare_mnist
from memtrain.data.sources.options import checked_options
from memtrain.data.sources.own import prepare_images, prepare_text, prepare_tokens
from memtrain.data.sources.sketchy import prepare_sketchy
from memtrain.data.sources.tinystories import prepare_tinystories
from memtrain.data.store import Store
from memtrain.errors import MemtrainError, nearest

__all__ = [
    "DATA_SETS",
    "checked_options",
    "prepare",
    "prepare_images",
    "prepare_mnist",
    "prepare_path",
    "prepare_sketchy",
    "prepare_text",
    "prepare_tinystories",
    "prepare_tokens",
]

DATA_SETS: dict[str, Callable[..., Store]] = {
    "mnist": prepare_mnist,
    "tinystories": prepare_tinystories,
    "sketchy": prepare_sketchy,
}


def prepare(
    name: str, *, data_dir: Path | None = None, out: Path, overwrite: bool = False, **options: Any
) -> Store:
    """Prepare one of the paper's data sets.

    Args:
        name: mnist, tinystories or sketchy.
        data_dir: the folder with its files; without it they are downloaded.
        out: the store's folder.
        overwrite: replace a store that is there.
        options: what the data set's own function takes.
    """
    if name not in DATA_SETS:
        raise MemtrainError(f"data set {name!r}: {nearest(name, DATA_SETS)}")
    function = DATA_SETS[name]
    return function(data_dir, out, overwrite=overwrite, **checked_options(function, options))


def prepare_path(path: Path, out: Path, *, overwrite: bool = False, **options: Any) -> Store:
    """Prepare files of the user's by what they are: text, images or a .npy of tokens."""
    if path.suffix == ".npy":
        function = prepare_tokens
    elif path.suffix == ".zip" or (path.is_dir() and _holds_images(path)):
        function = prepare_images
    else:
        function = prepare_text
    return function(path, out, overwrite=overwrite, **checked_options(function, options))


def _holds_images(folder: Path) -> bool:
    return any(path.suffix.lower() in SUFFIXES for path in folder.rglob("*"))
