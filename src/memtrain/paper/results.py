"""What a sweep's folder holds, read as if anybody had written it: setup.json and results.jsonl."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from memtrain.config.validation import check_device
from memtrain.errors import MemtrainError
from memtrain.files import (
    open_append,
    parse_json,
    read_bytes,
    read_text,
    refuse_links,
    write_atomic,
)
from memtrain.paper import is_figure
from memtrain.paper.base import SCALES, STAND_INS, Result, Scale, Setup

MAX_SETUP_BYTES = 2**16
MAX_RESULTS_BYTES = 2**27
"""Fifteen figures at the paper's sizes keep about a third of that."""
DEEPEST = 8
"""Levels of lists and objects in what a figure measured."""
COSTS = ("steps", "tokens", "sequential_ops", "seconds")


# ----------------------------------------------------------------------------------- setup.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What setup.json says: a folder has one scale, and a report needs no options."""

    scale: Scale
    data_dir: str
    device: str
    figures: list[str]
    root: str
    """See `Setup.root`."""


def read_setup(folder: Path) -> Stored | None:
    """What a folder is of; None if nothing was reproduced there.

    Raises:
        MemtrainError: setup.json is damaged.
    """
    path = folder / "setup.json"
    try:
        text = read_text(path, MAX_SETUP_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    plain = parse_json(text, f"{path}: not JSON")
    if not isinstance(plain, dict):
        raise MemtrainError(f"{path}: must be a JSON object; take another folder")
    if plain.get("root") is None:
        plain["root"] = _older_root(folder)
    for name in ("scale", "data_dir", "device", "root"):
        value = plain.get(name)
        if not isinstance(value, str) or "\0" in value or (name == "scale") > (value in SCALES):
            raise MemtrainError(f"{path}: {name}={value!r}: damaged; take another folder")
    check_device(plain["device"])
    figures = plain.get("figures")
    if not isinstance(figures, list) or not all(
        isinstance(name, str) and is_figure(name) for name in figures
    ):
        raise MemtrainError(f"{path}: figures={figures!r}: must be a list of figures' names")
    return Stored(**{field.name: plain[field.name] for field in fields(Stored)})


def write_setup(folder: Path, stored: Stored) -> None:
    """Write setup.json, whole and forced to disk."""
    path = folder / "setup.json"
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links(path, folder)
    write_atomic(path, (json.dumps(asdict(stored), indent=2) + "\n").encode())


def settled(setup: Setup) -> Setup:
    """The setup with the folder's own root, by which its runs are known."""
    stored = read_setup(setup.folder)
    return setup if stored is None else replace(setup, root=stored.root)


def _older_root(folder: Path) -> str:
    """The root of a folder that does not tell it: where the folder was when its runs were made.

    Keys of such folders were made from paths, which the configs of the runs still hold.
    """
    for path in sorted(folder.glob("runs/*/config.json")):
        try:
            plain = parse_json(read_text(path, MAX_SETUP_BYTES), path.name)
            data = plain["data"]["path"]
            ending = next(end for name in STAND_INS if data.endswith(end := f"/data/{name}"))
        except (OSError, MemtrainError, LookupError, TypeError, AttributeError, StopIteration):
            continue  # damaged, or a run without such data
        return data.removesuffix(ending)
    return str(folder)


# -------------------------------------------------------------------------------- results.jsonl


class ResultsFile:
    """results.jsonl: appended line by line, each forced to disk before the next."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "results.jsonl"

    def read(self) -> list[Result]:
        """All whole lines, in order. A last line cut short by a crash is no result.

        Raises:
            MemtrainError: a line is damaged; the message says which.
        """
        lines = self._content().split(b"\n")[:-1]
        return [self._result(number, line) for number, line in enumerate(lines, start=1)]

    def _content(self) -> bytes:
        try:
            return read_bytes(self.path, MAX_RESULTS_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def _result(self, number: int, line: bytes) -> Result:
        place = f"{self.path}: line {number}"
        try:
            plain = parse_json(line.decode(), place)
        except UnicodeDecodeError as error:
            raise MemtrainError(f"{place}: not UTF-8 text ({error})") from None
        try:
            return checked_result(plain)
        except MemtrainError as error:
            raise MemtrainError(f"{place}: damaged: {error}") from None

    def append(self, result: Result) -> None:
        refuse_links(self.path, self.folder)
        with open_append(self.path) as file:
            file.write(json.dumps(asdict(result)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def mend(self) -> None:
        """Cut off the line that a crash left unfinished."""
        if not self.path.exists():
            return
        whole = self._content().rfind(b"\n") + 1
        refuse_links(self.path, self.folder)
        with open_append(self.path) as file:
            os.ftruncate(file.fileno(), whole)


def checked_result(plain: Any) -> Result:
    """A result from its JSON, every value of the kind that it is used as.

    Raises:
        MemtrainError: a field is missing, unknown, or of another kind.
    """
    known = {field.name for field in fields(Result)}
    if not isinstance(plain, dict) or not known - {"diverged"} <= plain.keys() <= known:
        raise MemtrainError(f"must be an object with {', '.join(sorted(known))}")
    for name in ("figure", "job", "key"):
        _need(isinstance(plain[name], str), name, plain[name], "a text")
    _need(isinstance(plain.get("diverged", ""), str), "diverged", plain.get("diverged"), "a text")
    _need(type(plain["version"]) is int, "version", plain["version"], "a whole number")
    tags = plain["tags"]
    right = isinstance(tags, dict) and all(
        isinstance(tag, str) or is_number(tag) or isinstance(tag, bool) for tag in tags.values()
    )
    _need(right, "tags", tags, "an object of texts, numbers and truth values")
    _need(_has_numbers(plain["cost"], COSTS), "cost", plain["cost"], f"numbers: {', '.join(COSTS)}")
    curve = plain["curve"]
    right = isinstance(curve, list) and all(map(_is_point, curve))
    _need(right, "curve", curve, "a list of evaluations")
    measured = plain["measured"]
    right = isinstance(measured, dict) and _is_plain(measured, DEEPEST)
    _need(right, "measured", measured, "an object of numbers, texts and lists")
    return Result(**plain)


def _need(right: bool, name: str, value: Any, what: str) -> None:
    if not right:
        raise MemtrainError(f"{name}={str(value)[:60]}: must be {what}")


def is_number(value: Any) -> bool:
    """A float, or a whole number that one can hold; truth values are not numbers."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _has_numbers(value: Any, names: Sequence[str]) -> bool:
    return isinstance(value, Mapping) and all(is_number(value.get(name)) for name in names)


def _is_point(value: Any) -> bool:
    return (
        _has_numbers(value, (*COSTS, "rnn_nats", "rnn_accuracy"))
        and isinstance(value.get("stage"), str)
        and all(is_number(number) for name, number in value.items() if name != "stage")
    )


def _is_plain(value: Any, depth: int) -> bool:
    """Texts, numbers, truth values, and lists and objects of them down to a depth."""
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(inner, depth - 1) for inner in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(inner, depth - 1) for inner in value)
    return value is None or isinstance(value, str | bool) or is_number(value)
