"""setup.json and results.jsonl of a sweep's folder, validated as untrusted files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memtrain.config.serialize import structure
from memtrain.config.validation import check_device
from memtrain.errors import MemtrainError
from memtrain.files import JsonLines, parse_json, read_text, refuse_links, write_atomic
from memtrain.paper import is_figure
from memtrain.paper.base import TOY_DATA, Experiment, Job, Result, Scale
from memtrain.runs.listing import make_frame

MAX_SETUP_BYTES = 2**16
MAX_RESULTS_BYTES = 2**27
"""About three times the results of all fifteen figures at the scale paper."""
MAX_DEPTH = 8
"""Levels of lists and objects in a figure's measurements."""
COSTS = ("steps", "tokens", "sequential_ops", "seconds")
ResultId = tuple[str, int, str, str]
"""Figure, version, key and name of a job."""


# ----------------------------------------------------------------------------------- setup.json


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSetup:
    """The content of setup.json. A folder has one scale; a report needs no options."""

    scale: Scale
    data_dir: str
    device: str
    figures: list[str]
    root: str
    """See `Setup.root`."""


def read_setup(folder: Path) -> StoredSetup | None:
    """Read setup.json; None if nothing was reproduced in the folder.

    Raises:
        MemtrainError: setup.json is damaged.
    """
    path = folder / "setup.json"
    try:
        plain = parse_json(read_text(path, MAX_SETUP_BYTES), f"{path}: not JSON")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if isinstance(plain, dict) and plain.get("root") is None:
        plain["root"] = _older_root(folder)
    stored = structure(plain, StoredSetup, str(path))
    check_device(stored.device)
    for name in ("data_dir", "root"):
        if "\0" in getattr(stored, name):
            raise MemtrainError(f"{path}: {name}={getattr(stored, name)!r}: has a null character")
    if not all(map(is_figure, stored.figures)):
        raise MemtrainError(f"{path}: figures={stored.figures!r}: must be names of figures")
    return stored


def write_setup(folder: Path, stored: StoredSetup) -> None:
    """Write setup.json atomically."""
    path = folder / "setup.json"
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links(path, folder)
    write_atomic(path, (json.dumps(asdict(stored), indent=2) + "\n").encode())


def _older_root(folder: Path) -> str:
    """The root of a folder whose setup.json has none: the path at which its runs were created.

    The keys of such folders were made from paths, which the runs' configs still contain.
    """
    for path in sorted(folder.glob("runs/*/config.json")):
        try:
            plain = parse_json(read_text(path, MAX_SETUP_BYTES), path.name)
            data = plain["data"]["path"]
            ending = next(end for name in TOY_DATA if data.endswith(end := f"/data/{name}"))
        except (OSError, MemtrainError, LookupError, TypeError, AttributeError, StopIteration):
            continue  # damaged, or a run without toy data
        return data.removesuffix(ending)
    return str(folder)


# -------------------------------------------------------------------------------- results.jsonl


class ResultsFile:
    """results.jsonl: one line per result, each synced to disk before the next."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "results.jsonl"
        self.lines = JsonLines(self.path, MAX_RESULTS_BYTES)

    def read(self) -> list[Result]:
        """All complete lines, in order; a last line truncated by a crash is ignored.

        Raises:
            MemtrainError: a line is damaged; the message names it.
        """
        results = []
        for number, plain in enumerate(self.lines.read(), start=1):
            try:
                results.append(checked_result(plain))
            except MemtrainError as error:
                raise MemtrainError(f"{self.path}: line {number}: damaged: {error}") from None
        return results

    def by_id(self) -> dict[ResultId, Result]:
        """All results by `id_of`."""
        return {id_of(result): result for result in self.read()}

    def append(self, result: Result) -> None:
        refuse_links(self.path, self.folder)
        self.lines.append(asdict(result), durable=True)

    def repair(self) -> None:
        """Remove a last line truncated by a crash."""
        self.lines.truncate()


def id_of(result: Result) -> ResultId:
    return result.figure, result.version, result.key, result.job


def job_id(figure: Experiment, job: Job) -> ResultId:
    """The id that a job's result has."""
    return figure.name, figure.version, job.key, job.name


def checked_result(plain: Any) -> Result:
    """Make a result from JSON.

    Raises:
        MemtrainError: a field is missing, unknown, or of the wrong type.
    """
    result = structure(plain, Result)
    rules = {
        "tags": (_is_plain(result.tags, 1), "strings, numbers and booleans"),
        "cost": (_has_numbers(result.cost, COSTS), f"numbers: {', '.join(COSTS)}"),
        "curve": (all(map(_is_point, result.curve)), "a list of evaluations"),
        "measured": (_is_plain(result.measured, MAX_DEPTH), "numbers, strings and lists"),
    }
    for name, (valid, rule) in rules.items():
        if not valid:
            raise MemtrainError(f"{name}={str(plain[name])[:60]}: must be {rule}")
    return result


def _is_number(value: Any) -> bool:
    """Whether a value is a float, or an integer of 64 bits; booleans are not numbers."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _has_numbers(value: dict[str, Any], names: Sequence[str]) -> bool:
    return all(_is_number(value.get(name)) for name in names)


def _is_point(value: dict[str, Any]) -> bool:
    numbers = value.keys() - {"stage"} | {*COSTS, "rnn_nats", "rnn_accuracy"}
    return isinstance(value.get("stage"), str) and _has_numbers(value, [*numbers])


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a value is a string, number or boolean, or nested lists and objects of them."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(one, depth - 1) for one in inner)
    return value is None or isinstance(value, str | bool) or _is_number(value)


def results_frame(folder: Path | str) -> Any:
    """A folder's results as a pandas DataFrame: one row per job, tags and numbers as columns."""
    rows = []
    for result in ResultsFile(Path(folder)).read():
        numbers = {
            name: value
            for name, value in result.measured.items()
            if isinstance(value, int | float | str)
        }
        costs = {f"cost_{name}": value for name, value in result.cost.items()}
        rows.append({"figure": result.figure, "key": result.key, **result.tags, **numbers, **costs})
    return make_frame(rows)
