"""Send a run's metrics to TensorBoard, Weights & Biases or trackio.

metrics.jsonl has everything already; a tracker is a copy that people can watch. tracking.json in
the run's folder notes the last step that each tracker has. A run that continues first sends the
steps that a tracker lacks, from metrics.jsonl, and leaves out those that it has: a step that is
repeated after a crash has the same numbers.
"""

import json
import os
import shlex
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrain.errors import MemtrainError, describe_error, did_you_mean
from memtrain.files import parse_json, read_text, write_atomic
from memtrain.training.callbacks import Callback, Metrics

if TYPE_CHECKING:
    from memtrain.training.run import Run

NOTES = "tracking.json"
MAX_NOTES_BYTES = 2**16
PROJECT = "memtrain"
COUNTERS = ("total_tokens", "total_sequential_ops", "total_seconds", "learning_rate")


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, named as trackers group them.

    train/loss, train/decode ...; held_out/rnn, held_out/teacher and accuracies; progress/...
    """
    counters = {f"progress/{key.removeprefix('total_')}": record[key] for key in COUNTERS}
    skipped = (*COUNTERS, "stage", "step", "total_steps", "evaluation")
    losses = {f"train/{key}": value for key, value in record.items() if key not in skipped}
    scores = {}
    for model in ("rnn", "teacher"):
        found = (record.get("evaluation") or {}).get(model)
        if isinstance(found, dict):
            scores[f"held_out/{model}"] = found["nats"]
            if found.get("accuracy") is not None:
                scores[f"held_out/{model}_accuracy"] = found["accuracy"]
    return losses | scores | counters


class Tracker(Callback):
    """Base of trackers: each step once, also when the run was stopped, killed or lengthened."""

    name = ""
    extra = "track"
    """The optional dependencies that it needs."""

    def __init__(self) -> None:
        self.folder = Path()
        self.run_id = ""
        self.done = 0
        """The last step that the tracker had when training started here."""

    def on_start(self, run: "Run") -> None:
        self.folder, self.run_id = run.folder, run.id
        self.done = int(_read_notes(run.folder, run.id).get(self.name, 0))
        try:
            self.begin(run)
        except ImportError as error:
            problem = f'{error}; install it with pip install "memtrain[{self.extra}]"'
            raise self._failed(problem) from None
        except Exception as error:  # the tracker's own code
            raise self._failed(f"{describe_error(error)}; fix that") from error
        for record in run.metrics.read():
            self._send(record)

    def on_step(self, metrics: Metrics) -> None:
        self._send(metrics.record)

    def on_end(self) -> None:
        self.end()

    def _send(self, record: Mapping[str, Any]) -> None:
        step = record["total_steps"]
        if step <= self.done:
            return
        self.write(step, numbers_of(record))
        notes = _read_notes(self.folder, self.run_id) | {self.name: step}
        plain = {"run": self.run_id, "steps": notes}
        write_atomic(self.folder / NOTES, (json.dumps(plain, indent=2) + "\n").encode())

    def _failed(self, problem: str) -> MemtrainError:
        problem = f"track={self.name}: {problem}, or train without it"
        return MemtrainError(problem, f"{problem} (--track none)")

    @abstractmethod
    def begin(self, run: "Run") -> None:
        """Start, or continue, the tracker's run."""

    @abstractmethod
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step, so that a crash does not lose them."""

    @abstractmethod
    def end(self) -> None:
        """Write what is left."""

    def where(self) -> str:
        """The command that shows what was tracked."""
        return ""


class TensorBoard(Tracker):
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    name = "tensorboard"
    writer: Any = None

    def begin(self, run: "Run") -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "tensorboard"))
        if not self.done:
            self.writer.add_text("config", f"```json\n{_config(run)}\n```", 0)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def where(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self.folder / 'tensorboard'))}"


class WandB(Tracker):
    """Weights & Biases, in the run's folder. Without an API key it is offline: nothing is sent, and
    `wandb sync RUN/wandb/offline-run-*` uploads it later."""

    name = "wandb"
    run: Any = None

    def begin(self, run: "Run") -> None:
        wandb = import_module("wandb")
        mode = os.environ.get("WANDB_MODE")
        if not mode:
            mode = "online" if _has_key() else "offline"
        quiet = {"silent": True, "console": "off", "init_timeout": 60}
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=run.id[:16],
            dir=str(run.folder),
            config=json.loads(_config(run)),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(**quiet),
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step, commit=True)

    def end(self) -> None:
        if self.run is not None:
            self.run.finish()

    def where(self) -> str:
        if self.run is None or not self.run.settings.mode.startswith("offline"):
            return "wandb: " + (getattr(self.run, "url", None) or "online")
        return f"wandb sync {shlex.quote(str(self.folder / 'wandb'))}/offline-run-*"


class Trackio(Tracker):
    """trackio, in its local storage (TRACKIO_DIR): `trackio show --project memtrain`."""

    name = extra = "trackio"
    run: Any = None

    def begin(self, run: "Run") -> None:
        trackio = import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self.run = trackio.init(
            project=project,
            name=f"{run.folder.name}-{run.id[:8]}",
            config=json.loads(_config(run)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def end(self) -> None:
        if self.run is not None:
            self.run.finish()

    def where(self) -> str:
        return f"trackio show --project {self.run.project}" if self.run is not None else ""


TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WandB, Trackio)}


def make_trackers(names: str, folder: Path) -> list[Tracker]:
    """The trackers that --track names, as "tensorboard,wandb"; without names those of before.

    Args:
        names: "" for the trackers that the run had, "none" for none of them.
        folder: the run's.

    Raises:
        MemtrainError: there is no such tracker.
    """
    chosen = [one for one in names.split(",") if one]
    if not chosen and not names:
        chosen = [name for name in _notes(folder).get("steps", {}) if name in TRACKERS]
    if chosen == ["none"]:
        return []
    for name in chosen:
        if name not in TRACKERS:
            raise MemtrainError(
                f"track={name!r}: {did_you_mean(name, [*TRACKERS, 'none'])}; several as a,b"
            )
    return [TRACKERS[name]() for name in dict.fromkeys(chosen)]


def _config(run: "Run") -> str:
    return json.dumps(asdict(run.config), indent=2)


def _has_key() -> bool:
    """Whether W&B can upload without a question to the user, which a job could not answer."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2]
    try:
        found = netrc(os.environ.get("NETRC")).authenticators(host.partition("/")[0])
    except (OSError, NetrcParseError):
        return False
    return found is not None


def _notes(folder: Path) -> dict[str, Any]:
    try:
        plain = parse_json(read_text(folder / NOTES, MAX_NOTES_BYTES), str(folder / NOTES))
    except (FileNotFoundError, MemtrainError):  # a damaged one: all steps are sent again
        return {}
    return plain if isinstance(plain, dict) and isinstance(plain.get("steps"), dict) else {}


def _read_notes(folder: Path, run: str) -> dict[str, Any]:
    """The last step of each tracker of a run."""
    plain = _notes(folder)
    steps = plain.get("steps", {}) if plain.get("run") == run else {}
    return {name: step for name, step in steps.items() if type(step) is int}
