"""The runs below a folder, read from their files alone: no models, no data."""

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from memtrain.config import RunConfig
from memtrain.config.serialize import read_config
from memtrain.data.codec import read_codec
from memtrain.errors import CheckpointError, MemtrainError
from memtrain.files import open_regular, parse_json, read_text
from memtrain.runs.checkpoint import FILES, MAX_HEADER_BYTES, MAX_STATE_BYTES, numbered
from memtrain.runs.progress import MetricsFile, Progress, read_progress
from memtrain.runs.run_folder import LOCK, is_run

INSIDE = ("checkpoints", "figures", "samples")
"""Folders of a run, which hold no runs."""
DEPTH = 3
"""Runs are looked for at most this many folders down."""
State = Literal["running", "stopped", "finished", "damaged"]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run, as its files describe it."""

    folder: Path
    name: str = ""
    data: str = ""
    """The prepared data's or file's name, else the kind of task."""
    method: str = ""
    """The stages with steps, as in "smt-dmt"."""
    cell: str = ""
    parameters: int | None = None
    """Of cell and readout; None without a checkpoint."""
    state: State = "stopped"
    stage: str = ""
    """The stage that is being trained, or the last one."""
    steps: int = 0
    """Steps of all stages done; `planned` of them in all, unless a time limit ends a stage."""
    planned: int = 0
    tokens: int = 0
    sequential_ops: int = 0
    seconds: float = 0.0
    """Training time, without evaluations and checkpoints."""
    rnn: float | None = None
    """The last held-out loss of the RNN, and of its teacher."""
    teacher: float | None = None
    best: float | None = None
    """The lowest held-out loss of the RNN."""
    loss: str = ""
    """What losses are, as in "nats per character"; "" if that is not known."""
    changed: float = 0.0
    """When its files last changed, in seconds since 1970."""
    problem: str = ""
    """Why it could not be read."""
    identity: str = field(default="", repr=False)
    """Identifies its data, for comparison."""
    config: RunConfig | None = field(default=None, repr=False)
    records: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The evaluated lines of metrics.jsonl."""

    def to_json(self) -> dict[str, Any]:
        """The columns of the table as plain data."""
        plain = asdict(self) | {"folder": str(self.folder)}
        return {key: plain[key] for key in plain if key not in ("config", "records", "identity")}


def list_runs(folder: Path | str = "runs") -> list[RunSummary]:
    """The runs in a folder and its subfolders, the last changed first.

    Raises:
        MemtrainError: there is no such folder.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise MemtrainError(
            f"{folder}: no such folder; memtrain train makes runs in runs/, memtrain runs FOLDER "
            "lists those of another folder"
        )
    found = [summarize(path) for path in _run_folders(folder, DEPTH)]
    return sorted(found, key=lambda one: (-one.changed, str(one.folder)))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    for path in sorted(folder.iterdir()) if depth else ():
        hidden = path.name.startswith(".") or path.name in INSIDE
        if path.is_dir() and not path.is_symlink() and not hidden:
            yield from _run_folders(path, depth - 1)


def summarize(folder: Path) -> RunSummary:
    """Describe one run; a damaged one is a summary that says why."""
    changed = _changed(folder)
    try:
        config = read_config(folder / "config.json")
        checkpoint, progress = newest_progress(folder)
        lines = MetricsFile(folder / "metrics.jsonl").read()
    except (MemtrainError, OSError) as error:
        problem = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        return RunSummary(
            folder=folder,
            name=folder.name,
            state="damaged",
            problem=str(problem),
            changed=changed,
        )
    stages = {name: stage.steps for name, stage in config.stages().items() if stage.steps}
    names, finished = list(stages), progress.stage >= len(stages)
    evaluated = [line for line in lines if _nats(line, "rnn") is not None]
    last = evaluated[-1] if evaluated else {}
    totals = progress.totals()
    running = is_training(folder)
    if running and lines:  # further than the newest checkpoint
        totals |= {key: lines[-1].get(key, totals[key]) for key in totals}
    return RunSummary(
        folder=folder,
        name=config.name,
        data=_data_name(config),
        method="-".join(names),
        cell=config.cell.kind,
        parameters=_parameters(checkpoint) if checkpoint else None,
        state="running" if running else "finished" if finished else "stopped",
        stage=lines[-1]["stage"]
        if running and lines
        else names[min(progress.stage, len(names) - 1)],
        steps=int(totals["total_steps"]),
        planned=sum(stages.values()),
        tokens=int(totals["total_tokens"]),
        sequential_ops=int(totals["total_sequential_ops"]),
        seconds=float(totals["total_seconds"]),
        rnn=_nats(last, "rnn"),
        teacher=_nats(last, "teacher"),
        best=progress.best.nats if progress.best else None,
        loss=_loss_name(config, progress, last),
        changed=changed,
        identity=progress.data or repr(config.data),
        config=config,
        records=evaluated,
    )


def newest_progress(folder: Path) -> tuple[Path | None, Progress]:
    """The newest checkpoint with a readable state.json, and its progress; its weights are not read.

    Raises:
        CheckpointError: there are checkpoints, and none is readable.
    """
    problem = ""
    for path in reversed(numbered(folder / "checkpoints")):
        try:
            state = parse_json(read_text(path / "state.json", MAX_STATE_BYTES), "state.json")
            return path, read_progress(state.get("progress") if isinstance(state, dict) else None)
        except (OSError, MemtrainError) as error:
            problem = problem or f"checkpoint {path.name}: {error}"
    if problem:
        raise CheckpointError(problem)
    return None, Progress()


def is_training(folder: Path) -> bool:
    """Whether a process holds the run's lock.

    The lock is only tried if the process that its file names may be alive, so that looking does
    not get in the way of a process that is just starting.
    """
    try:
        host, process = read_text(folder / LOCK, 1024).split()
    except (OSError, ValueError):  # a MemtrainError is a ValueError
        return False
    if host == socket.gethostname() and not _is_alive(process):
        return False
    with open_regular(folder / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return host == socket.gethostname()
    return False


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    return True


def _changed(folder: Path) -> float:
    places = [folder / name for name in ("config.json", "metrics.jsonl", "checkpoints")]
    return max((path.stat().st_mtime for path in places if path.exists()), default=0.0)


def _data_name(config: RunConfig) -> str:
    path = str(getattr(config.data, "path", ""))
    return (
        path.rpartition(":")[2]
        if config.data.kind == "custom"
        else Path(path).name or config.data.kind
    )


def _parameters(checkpoint: Path) -> int | None:
    """Parameters of the RNN, from the header of the weights; None if that is damaged."""
    try:
        with open_regular(checkpoint / FILES[0]) as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(size, MAX_HEADER_BYTES)), FILES[0])
        shapes = [one["shape"] for name, one in header.items() if name.startswith("rnn.")]
        return sum(_product(shape) for shape in shapes)
    except (OSError, MemtrainError, LookupError, TypeError, AttributeError):
        return None


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _nats(line: dict[str, Any], model: str) -> float | None:
    """The held-out loss of a model in a line of metrics, if there is one."""
    found = line.get("evaluation")
    score = found.get(model) if isinstance(found, dict) else None
    nats = score.get("nats") if isinstance(score, dict) else None
    return float(nats) if isinstance(nats, int | float) else None


def _loss_name(config: RunConfig, progress: Progress, last: dict[str, Any]) -> str:
    """What held-out losses are: nats per character, per pixel, ..."""
    if not last:
        return ""
    unit = "value" if config.data.kind == "series" else "target"
    if isinstance(progress.spelling, dict):
        unit = read_codec(progress.spelling, "state.json").unit
    return f"{last['evaluation'].get('loss_name', 'nats')} per {unit}"


def make_frame(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as a pandas DataFrame."""
    try:
        import pandas
    except ImportError:
        raise MemtrainError('a DataFrame needs pandas: pip install "memtrain[frames]"') from None
    return pandas.DataFrame(list(rows))


def runs_frame(folder: Path | str = "runs") -> Any:
    """The runs below a folder as a pandas DataFrame, one row per run, the last changed first.

    Columns are the fields of `RunSummary`: folder, name, data, method, cell, parameters, state,
    stage, steps, planned, tokens, sequential_ops, seconds, rnn, teacher and best (held-out
    losses), loss, changed and problem.

    Raises:
        MemtrainError: there is no such folder, or pandas is missing.
    """
    return make_frame([one.to_json() for one in list_runs(folder)])
