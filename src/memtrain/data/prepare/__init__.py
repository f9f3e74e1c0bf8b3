"""Data sets become stores: MNIST, TinyStories, Sketchy, and files of the user's own.

Each `prepare_...` reads its files, writes a store to `out` and returns it opened. Whatever goes
wrong is one line of a `MemtrainError`, and nothing is left behind.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from memtrain.data.prepare.file_kind import require_kind
from memtrain.data.prepare.mnist import prepare_mnist
from memtrain.data.prepare.options import checked_options
from memtrain.data.prepare.sketchy import prepare_sketchy
from memtrain.data.prepare.tinystories import prepare_tinystories
from memtrain.data.prepare.user_files import prepare_images, prepare_text, prepare_tokens
from memtrain.data.store import Store
from memtrain.errors import MemtrainError, did_you_mean

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
        raise MemtrainError(f"data set {name!r}: {did_you_mean(name, DATA_SETS)}")
    function = DATA_SETS[name]
    return function(data_dir, out, overwrite=overwrite, **checked_options(function, options))


def prepare_path(path: Path, out: Path, *, overwrite: bool = False, **options: Any) -> Store:
    """Prepare files of the user's by what they are: text, images or a .npy of tokens.

    A folder that holds both text and images is read as what it holds more of; a note says so.
    """
    own = {"text": prepare_text, "images": prepare_images, "tokens": prepare_tokens}
    function = own[require_kind(path, "").recipes[0]]
    return function(path, out, overwrite=overwrite, **checked_options(function, options))
