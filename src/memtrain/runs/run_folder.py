"""The folder of a run: created by one process, trained by one at a time, never mixed with another.

Every run has a random identity, in run.json and in each of its checkpoints, so that a checkpoint of
another run is never taken for its own. The process that creates, replaces or trains a run holds the
lock of its folder; the kernel releases it when the process dies.
"""

import json
import secrets
import shlex
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from memtrain.config import TORCH_CELLS, DataConfig, LabelFile, RunConfig, Series, Stream
from memtrain.config.serialize import read_config, to_json
from memtrain.data.store import identity_of
from memtrain.data.store_reader import open_store
from memtrain.errors import CheckpointError, MemtrainError
from memtrain.files import locked, parse_json, read_text, refuse_links, unique_name
from memtrain.runs.checkpoint import DISK, Files, numbered
from memtrain.runs.fingerprint import Record, read_record

RUN_VERSION = 1
RUN_FILE, LOCK = "run.json", ".lock"
MAX_RUN_BYTES = 2**20
TRACKING = ("tracking.json", "tensorboard", "wandb")
"""What trackers write into a run's folder."""
OURS = (".draft-", ".trash-")
"""Prefixes of files that a crash may leave behind."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """The content of run.json."""

    id: str
    """Random; empty while the run is being created."""
    made_of: Record = field(default_factory=dict)
    """A record of the task and cell, where the config does not describe them (fingerprint.py)."""

    def to_json(self) -> bytes:
        plain = {"version": RUN_VERSION, "id": self.id, "made_of": self.made_of}
        return (json.dumps(plain, indent=2) + "\n").encode()


def read_run_file(folder: Path) -> RunFile | None:
    """Read run.json; None if there is none, as in a run of an older memtrain.

    Raises:
        MemtrainError: it is damaged.
    """
    path = folder / RUN_FILE
    try:
        plain = parse_json(read_text(path, MAX_RUN_BYTES), str(path))
    except FileNotFoundError:
        return None
    if not isinstance(plain, dict) or not isinstance(plain.get("id"), str):
        raise MemtrainError(f"{path}: has no id of a run")
    if plain.get("version") != RUN_VERSION:
        raise MemtrainError(
            f"{path}: version {plain.get('version')!r}, this memtrain reads {RUN_VERSION}; use the "
            "memtrain that wrote it"
        )
    return RunFile(plain["id"], read_record(plain.get("made_of", {}), str(path)))


def whole_run_file(folder: Path) -> RunFile | None:
    """As `read_run_file`, but refuse a run whose creation was interrupted."""
    found = read_run_file(folder)
    if found is not None and not found.id:
        raise MemtrainError(
            f"{folder}: the process that made this run ended before it was complete; train it again"
        )
    return found


def held(folder: Path) -> AbstractContextManager[None]:
    """Lock the run: no other process may train or replace it meanwhile.

    Raises:
        Locked: another process holds the lock; the message names process and machine.
    """
    busy = f"{folder}: another process trains or replaces this run; wait for it, or stop it"
    return locked(folder / LOCK, busy)


# --------------------------------------------------------------------------------------- create


def make_folder(
    config: RunConfig, folder: Path, overwrite: bool, made_of: Record, files: Files = DISK
) -> str:
    """Create the run's folder with its config; returns the run's identity.

    Files that are not a run's are never touched. With `overwrite`, all checkpoints of the old run
    are deleted before anything of the new one is written, whenever a crash comes.

    Raises:
        MemtrainError: a run or other files are there, or the old run cannot be removed.
    """
    _check_free(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        _check_free(folder, overwrite)  # another process may have made one
        refuse_links(folder / "checkpoints", folder)
        _clear(folder, files)
        run = RunFile(secrets.token_hex(16), made_of)
        _write_atomic(folder / RUN_FILE, RunFile("").to_json(), files)
        _write_atomic(folder / "config.json", to_json(config).encode(), files)
        _write_atomic(folder / RUN_FILE, run.to_json(), files)
    return run.id


def _check_free(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise MemtrainError(f"{folder}: is a file; a run is a folder, name another")
    # Listed once: another process may be creating a run, and files may appear at any moment.
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    if "config.json" in names and (folder / "config.json").exists():
        found = read_run_file(folder) if not overwrite else None
        incomplete = found is not None and not found.id
        if not overwrite and not incomplete:
            problem = f"{folder}: a run is there already"
            raise MemtrainError(
                f"{problem}; Run.open({str(folder)!r}) continues it, overwrite=True replaces it, "
                "or create this one in another folder",
                f"{problem}; memtrain resume {shlex.quote(str(folder))} continues it, --overwrite "
                "replaces it, --folder takes another place",
            )
        return
    others = [name for name in names if name not in (LOCK, RUN_FILE) and not name.startswith(OURS)]
    if others:
        raise MemtrainError(
            f"{folder}: holds files that are not a run ({min(others)}); choose an empty folder"
        )


def _clear(folder: Path, files: Files) -> None:
    """Remove a run's files except config and identity; the checkpoints first, atomically."""
    path = folder / "checkpoints"
    try:
        if path.exists():
            trash = folder / unique_name(".trash-checkpoints-")
            files.rename(path, trash)
            files.sync(folder)
        clear_leftovers(folder, files)
        for name in ("metrics.jsonl", "figures", "samples", *TRACKING):
            path = folder / name
            if path.exists() or path.is_symlink():
                files.remove(path)
    except OSError as error:
        raise MemtrainError(
            f"{error.filename or path}: could not be removed ({error.strerror}); remove it, or "
            "choose another folder"
        ) from None


def write_config(folder: Path, config: RunConfig) -> None:
    """Replace the run's config. Its lock must be held."""
    _write_atomic(folder / "config.json", to_json(config).encode(), DISK)


def clear_leftovers(folder: Path, files: Files = DISK) -> None:
    """Remove files of a process that was killed while it created or replaced the run."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(OURS):
            files.remove(path)


def _write_atomic(path: Path, content: bytes, files: Files) -> None:
    """As `memtrain.files.write_atomic`, with operations that tests can make fail."""
    draft = path.with_name(unique_name(f".draft-{path.name}-"))
    files.write(draft, content)
    files.sync(draft)
    files.rename(draft, path)
    files.sync(path.parent)


# ---------------------------------------------------------------------------------------- train


def newest_number(folder: Path) -> int:
    """The highest number of a run's checkpoints, whole or not; -1 if there are none."""
    found = [path.name.removesuffix(".old") for path in numbered(folder / "checkpoints")]
    return max(map(int, found), default=-1)


def check_unchanged(folder: Path, run: str, newest: int) -> None:
    """Refuse to train a run that changed since it was opened. Its lock must be held.

    Args:
        folder: the run's folder.
        run: the run's identity when it was opened.
        newest: its `newest_number` when it was opened.
    """
    if not (folder / "config.json").is_file():
        raise MemtrainError(f"{folder}: the run is gone since it was opened (no config.json)")
    found = whole_run_file(folder)
    if found is not None and found.id != run:
        raise MemtrainError(f"{folder}: another run was made there since it was opened; open it")
    refuse_links(folder / "checkpoints", folder)
    if (folder / "checkpoints").exists() and not (folder / "checkpoints").is_dir():
        raise MemtrainError(f"{folder / 'checkpoints'}: is not a folder; remove it")
    if (now := newest_number(folder)) > newest:
        raise MemtrainError(
            f"{folder}: another process trained it to step {now} since it was opened; open it again"
        )


class Guard:
    """Checks before each checkpoint that the folder still belongs to the run.

    Deleted config.json and run.json are written again: without them the checkpoints could not be
    used. Create it while the lock is held.
    """

    def __init__(self, folder: Path, config: RunConfig, run: RunFile) -> None:
        self.folder = folder
        self.files = {"config.json": to_json(config).encode()}
        if run.id and (folder / RUN_FILE).exists():
            self.files[RUN_FILE] = run.to_json()
        self.run = run
        self.holder = self._holder()

    def _holder(self) -> str | None:
        try:
            return read_text(self.folder / LOCK, 1024)
        except (OSError, MemtrainError):
            return None

    def check(self) -> list[str]:
        """Check the folder; returns messages about files that were written again.

        Raises:
            CheckpointError: another run, or another process, has taken the folder.
        """
        if not self.folder.is_dir():
            return []  # the write that follows fails
        found = read_run_file(self.folder)
        if found is not None and self.run.id and found.id != self.run.id:
            raise CheckpointError(f"{self.folder}: another run was made there while it was trained")
        holder = self._holder()
        if holder is not None and self.holder is not None and holder != self.holder:
            raise CheckpointError(f"{self.folder}: another process trains it ({holder.strip()})")
        refuse_links(self.folder / "checkpoints", self.folder)
        missing = [name for name in self.files if not (self.folder / name).exists()]
        if holder is None and len(missing) == len(self.files):
            raise CheckpointError(f"{self.folder}: its files were removed while it was trained")
        for name in missing:
            try:
                _write_atomic(self.folder / name, self.files[name], DISK)
            except OSError as error:
                raise CheckpointError(f"{self.folder / name}: is gone ({error})") from None
        return [f"{self.folder / name}: was gone; written again" for name in missing]


# ----------------------------------------------------------------------------------------- open


def is_run(folder: Path | str) -> bool:
    """Whether a folder holds a run."""
    return (Path(folder) / "config.json").is_file()


def read_folder(folder: Path) -> RunConfig:
    """Read the config of the run in a folder."""
    if not is_run(folder):
        hint = "config.json is missing; memtrain train makes one"
        if is_run(Path("runs") / folder):  # its bare name
            hint = f"did you mean {Path('runs') / folder}?"
        raise MemtrainError(f"{folder}: no run there; {hint}")
    return read_config(folder / "config.json")


def check_imports(folder: Path, config: RunConfig, *, cell_given: bool, task_given: bool) -> None:
    """Refuse a config that names a class to import, unless it is given as an object."""
    imported = ":" in config.cell.kind and config.cell.kind not in TORCH_CELLS
    named = [config.cell.kind] if imported and not cell_given else []
    named += [config.data.path] if config.data.kind == "custom" and not task_given else []
    if named:
        part = "cell" if named[0] == config.cell.kind else "task"
        problem = f"{folder}: this run imports {named[0]}; pass"
        raise MemtrainError(
            f"{problem} allow_code=True if you trust it, or the object itself, {part}=...",
            f"{problem} --allow-code if you trust it",
        )


def find_data(folder: Path, data: DataConfig, learned: str) -> DataConfig:
    """Find a run's data relative to the working directory, or to the folder of runs.

    Args:
        folder: the run's folder.
        data: the data of its config.
        learned: the identity of its training data, if that is known.
    """
    if not isinstance(data, Stream | LabelFile | Series) or Path(data.path).is_absolute():
        return data
    places = [Path(data.path), folder.resolve().parent.parent / data.path]
    if isinstance(data, LabelFile | Series):
        there = [place for place in places if place.is_file()]
        return replace(data, path=str(there[0])) if there else data
    there = [place for place in places if (place / "meta.json").is_file()]
    if not there:
        raise MemtrainError(
            f"{folder}: its data, {data.path}, is neither here nor next to the runs; go to the "
            f"folder that holds it, or prepare it again: memtrain data SOURCE --out {data.path}, "
            "with the --option of before"
        )
    if len(there) > 1 and learned:
        there.sort(key=lambda place: identity_of(open_store(place).splits) != learned)
    return replace(data, path=str(there[0]))


def check_data(folder: Path, data: DataConfig, learned: str, found: str) -> None:
    """Refuse other data than the run's: its held-out part may be in the run's training data."""
    if learned and found != learned:
        if isinstance(data, Series):
            raise MemtrainError(
                f"{data.path}: is not the data that {folder} learned from, its numbers differ; "
                "restore the file, or train a new run"
            )
        name = data.kind if not isinstance(data, Stream | LabelFile) else data.path
        raise MemtrainError(
            f"{name}: is not the data that {folder} learned from; prepare that again, with "
            "the same options, or train a new run"
        )
