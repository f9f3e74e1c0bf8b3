"""Hugging Face datasets: those saved on disk, and those on the Hub by name."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from memtrain.data.prepare.arrow_files import missing_column, texts_of
from memtrain.data.prepare.limits import Budget
from memtrain.errors import MemtrainError, describe_error, did_you_mean
from memtrain.files import read_json

HUB = "hf:"
"""Begins the name of a dataset on the Hub: hf:roneneldan/TinyStories."""
SPLIT = "train"
"""The split that is read by default; a part of it is held out."""
MAX_CARD_BYTES = 2**22
ROWS = 1000
"""Rows of a dataset that are unpacked at once."""


def hub_name(path: Path) -> str:
    """The name of a dataset on the Hub; "" if the path is that of a file or folder."""
    name = str(path)
    return name.removeprefix(HUB) if name.startswith(HUB) and not path.exists() else ""


# ---------------------------------------------------------------------------------- saved on disk


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote a folder."""
    single = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return single or (folder / "dataset_dict.json").is_file()


def saved_files(folder: Path, split: str | None) -> list[Path]:
    """The Arrow files of one split, in order."""
    if (folder / "dataset_dict.json").is_file():
        card = _card(folder / "dataset_dict.json")
        names = [name for name in card.get("splits", ()) if _is_plain_name(name)]
        chosen = SPLIT if split is None else split
        if chosen not in names:
            known = did_you_mean(chosen, names)
            raise MemtrainError(f"{folder}: split={chosen}: {known}; --option split NAME")
        folder = folder / chosen
    elif split is not None:
        found = _card(folder / "state.json").get("_split")
        if split != found:
            raise MemtrainError(f"{folder}: split={split}: it holds one split; leave it out")
    entries = _card(folder / "state.json").get("_data_files")
    named = [one.get("filename") for one in entries or () if isinstance(one, dict)]
    if not named or not all(map(_is_plain_name, named)):
        raise MemtrainError(f"{folder}: state.json names no Arrow files; save the dataset again")
    return [folder / str(name) for name in named]


def _card(path: Path) -> dict[str, Any]:
    try:
        plain = read_json(path, MAX_CARD_BYTES)
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    if not isinstance(plain, dict):
        raise MemtrainError(f"{path}: must be a JSON object")
    return plain


def _is_plain_name(name: object) -> bool:
    """Whether a name from a card stays inside its folder."""
    return isinstance(name, str) and bool(name) and PurePosixPath(name).name == name


# -------------------------------------------------------------------------------------- on the Hub


def hub_texts(
    name: str, column: str, split: str | None, subset: str | None, budget: Budget
) -> Iterator[bytes | None]:
    """The texts of one column of a dataset on the Hub, which is downloaded once."""
    where = f"{HUB}{name}"
    try:
        import datasets
    except ImportError:
        raise MemtrainError(
            f'{where}: needs the datasets package: pip install "memtrain[data]"'
        ) from None
    try:
        with _quiet():
            found: Any = datasets.load_dataset(name, subset, split=split or SPLIT)
    except Exception as error:  # of the network, the Hub, and the dataset's files
        raise MemtrainError(
            f"{where}: cannot be loaded ({describe_error(error)}); check the name, split, subset "
            "and connection, or pass a folder that save_to_disk wrote elsewhere"
        ) from None
    if column not in found.column_names:
        raise missing_column(where, column, found.column_names)
    kind = getattr(found.features[column], "dtype", "")
    if kind not in ("string", "large_string"):
        raise MemtrainError(f"{where}: column={column}: holds {kind or 'lists'}, must be strings")
    for table in found.select_columns([column]).with_format("arrow").iter(batch_size=ROWS):
        for chunk in table.column(column).chunks:
            yield from texts_of(chunk, budget)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of every retry: the error says it all."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets", "httpx")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
