"""A run: a folder, its models, and the stages that train them.

runs/NAME/config.json       the whole RunConfig
          metrics.jsonl     a line every few steps: losses, counters, evaluations
          checkpoints/      the last few, each enough to go on to the bit
"""

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from memtrain.config import RunConfig
from memtrain.config_json import from_json, to_json
from memtrain.data.build import build_task
from memtrain.data.spelling import Spelling
from memtrain.data.task import Task, check_task
from memtrain.errors import DivergedError, MemtrainError
from memtrain.eval.cost import sequential_ops
from memtrain.eval.evaluate import Evaluation, evaluate
from memtrain.nn.cells import build_cell
from memtrain.nn.contract import check_cell, memory_shape
from memtrain.nn.rnn import RNN
from memtrain.nn.teacher import Decoder, Teacher
from memtrain.objectives.bptt import BPTT
from memtrain.objectives.dmt import DMT
from memtrain.objectives.objective import Objective
from memtrain.objectives.smt import SMT
from memtrain.train.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from memtrain.train.engine import Engine
from memtrain.train.metrics import MetricsFile, Reporter
from memtrain.train.trainer import Trainer


class Interrupted(Exception):
    """Someone asked to stop; everything is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopRequest:
    """Which signal asked to stop, if any did."""

    signal_number = 0


def build_rnn(config: RunConfig, vocab_size: int, cell: nn.Module | None = None) -> RNN:
    """The RNN of a config, with a cell of the user's in place of what it names."""
    if cell is None:
        cell = build_cell(config.cell, vocab_size)
    else:
        check_cell(cell, vocab_size)
    _, memory_dim = memory_shape(cell)
    causal = config.readout_attention == "causal"
    return RNN(cell, Decoder(config.teacher, vocab_size, memory_dim, causal=causal))


class Run:
    """A run folder with its models in memory. Make one with `Run.create` or `Run.open`."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        cell: nn.Module | None = None,
        task: Task | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.engine = Engine(config.engine)
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.task = check_task(task) if task is not None else build_task(config.data)
        vocab_size = self.task.vocab_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.rnn = build_rnn(config, vocab_size, cell).to(self.engine.device)
            memory_tokens, memory_dim = memory_shape(self.rnn.cell)
            self.teacher = None
            if config.has_teacher:
                teacher = Teacher(config.teacher, vocab_size, memory_tokens, memory_dim)
                self.teacher = teacher.to(self.engine.device)
        self.engine.prepare(self._models())
        self.engine.prepare_rnn(self.rnn)
        self.task.to(self.engine.device)
        self.progress = {"stage": 0, "step": 0, "global_step": 0, "stages": [], "metrics_bytes": 0}
        self.pending: Checkpoint | None = None

    # ------------------------------------------------------------------------ make and open

    @classmethod
    def create(
        cls,
        config: RunConfig,
        folder: Path | str | None = None,
        *,
        overwrite: bool = False,
        cell: nn.Module | None = None,
        task: Task | None = None,
    ) -> "Run":
        """A new run in an empty folder, runs/NAME unless another is given.

        Args:
            config: the whole run.
            folder: where it will live; it must not hold a run already.
            overwrite: delete the run that is there.
            cell: a cell of yours as an object, instead of what `config.cell` names.
            task: a task of yours as an object, instead of what `config.data` names.
        """
        folder = Path(folder) if folder is not None else Path("runs") / config.name
        if cell is not None:
            kind = f"{type(cell).__module__}:{type(cell).__name__}"
            config = replace(config, cell=replace(config.cell, kind=kind))
        run = cls(config, folder, cell=cell, task=task)
        if (folder / "config.json").exists():
            if not overwrite:
                raise MemtrainError(
                    f"{folder}: a run is there already; --resume goes on with it, "
                    "--overwrite starts anew, --folder takes another place"
                )
            for name in ("checkpoints", "figures", "samples"):
                shutil.rmtree(folder / name, ignore_errors=True)
            (folder / "metrics.jsonl").unlink(missing_ok=True)
        elif folder.exists() and any(folder.iterdir()):
            raise MemtrainError(f"{folder}: holds files that are no run; take an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(to_json(config))
        return run

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        allow_code: bool = False,
        cell: nn.Module | None = None,
        task: Task | None = None,
        reporter: Reporter | None = None,
    ) -> "Run":
        """A run from its folder, at its newest whole checkpoint.

        Args:
            folder: the run's folder.
            allow_code: import the classes that the run's config names.
            cell: the cell as an object, if it was given as one.
            task: the task as an object, if it was given as one.
            reporter: hears of checkpoints that had to be passed over.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise MemtrainError(f"{folder}: no run there (config.json is missing)")
        config = from_json(path.read_text())
        if not allow_code:
            named = [config.cell.kind] if ":" in config.cell.kind and cell is None else []
            named += [config.data.path] if config.data.kind == "custom" and task is None else []
            if named:
                raise MemtrainError(
                    f"{folder}: this run imports {named[0]}; pass --allow-code if you trust it"
                )
        run = cls(config, folder, cell=cell, task=task)
        checkpoint, problems = latest_checkpoint(folder / "checkpoints")
        for problem in problems:
            (reporter or Reporter()).say(f"passed over a broken checkpoint: {problem}")
        if checkpoint is not None:
            run._load(checkpoint)
        return run

    def _load(self, checkpoint: Checkpoint) -> None:
        try:
            self._models().load_state_dict(checkpoint.weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[1].strip()
            raise MemtrainError(f"{self.folder}: weights do not fit the config: {reason}") from None
        self.progress = checkpoint.progress
        self.pending = checkpoint

    def _models(self) -> nn.ModuleDict:
        models: dict[str, nn.Module] = {"rnn": self.rnn}
        if self.teacher is not None:
            models["teacher"] = self.teacher
        return nn.ModuleDict(models)

    @property
    def spelling(self) -> Spelling | None:
        """What the RNN writes; None if its task asks for answers."""
        return self.task.spelling

    # ------------------------------------------------------------------------------- train

    @property
    def stages(self) -> list[str]:
        """The names of the stages that have steps, in order."""
        return [name for name, stage in self.config.stages().items() if stage.steps]

    @property
    def finished(self) -> bool:
        return self.progress["stage"] >= len(self.stages)

    def objective(self, name: str) -> Objective:
        if name == "bptt":
            return BPTT(self.config.bptt, self.rnn)
        assert self.teacher is not None
        if name == "smt":
            return SMT(self.config.smt, self.teacher, self.rnn)
        return DMT(self.config.dmt, self.teacher, self.rnn)

    def train(self, reporter: Reporter | None = None, *, until: str | None = None) -> "Run":
        """Run the stages that are left, from where the run stands.

        Args:
            reporter: hears how it goes.
            until: the last stage to run now (None: all).

        Raises:
            Interrupted: Ctrl-C or SIGTERM; a checkpoint of the last full step is on disk.
            DivergedError: a number stopped being finite; the last good checkpoint is on disk.
        """
        reporter = reporter or Reporter()
        self.metrics.cut(self.progress["metrics_bytes"])
        try:
            while not self.finished:
                name = self.stages[self.progress["stage"]]
                self._train_stage(name, reporter)
                if name == until:
                    break
        finally:
            reporter.close()
        return self

    def _train_stage(self, name: str, reporter: Reporter) -> None:
        index = self.progress["stage"]
        stage = self.config.stages()[name]
        objective = self.objective(name)
        seed = self.config.seed * 8 + index  # every stage has chance of its own
        trainer = Trainer(objective, stage, self.task, self.engine, seed)
        with trainer.frozen_rest():
            if self.progress["step"]:
                assert self.pending is not None
                trainer.load_tensors(self.pending.optimizer)
                done = self.progress["stages"][index]
                trainer.step, trainer.tokens = self.progress["step"], done["tokens"]
                trainer.seconds = done["seconds"]
            else:
                torch.manual_seed(seed)
                self.progress["stages"].append(
                    {"name": name, "sequential_ops_a_step": self._sequential_ops(objective)}
                )
            self.pending = None
            reporter.stage(name, trainer.step, stage.steps)
            with stop_signals() as stop:
                while trainer.step < stage.steps:
                    self._step(trainer, name, reporter)
                    if stop.signal_number and trainer.step < stage.steps:
                        self._save(trainer)
                        message = f"stopped after step {trainer.step} of {name}, all is saved"
                        raise Interrupted(message, stop.signal_number)
            trainer.objective.settle()
        self.progress |= {"stage": index + 1, "step": 0}
        self._save(trainer)

    def _step(self, trainer: Trainer, name: str, reporter: Reporter) -> None:
        log = self.config.log
        stage = self.progress["stages"][self.progress["stage"]]
        try:
            metrics = trainer.train_step()
            last = trainer.step == trainer.stage.steps
            written = trainer.step % log.every == 0 or last
            looked = last or (log.evaluate_every and trainer.step % log.evaluate_every == 0)
            saved = trainer.step % log.checkpoint_every == 0
            if written or looked or saved:
                trainer.check()
        except DivergedError as error:
            raise DivergedError(
                f"{name} {error}: stopped; the last good checkpoint stays, try a smaller "
                f"{name}.learning_rate"
            ) from None
        self.progress["step"] = trainer.step
        self.progress["global_step"] += 1
        stage |= {
            "steps": trainer.step,
            "tokens": trainer.tokens,
            "sequential_ops": trainer.step * stage["sequential_ops_a_step"],
            "seconds": trainer.seconds,
        }
        if written or looked:
            values = {key: float(value) for key, value in metrics.items()}
            record = {"stage": name, "step": trainer.step, **self.totals(), **values}
            record["learning_rate"] = trainer.learning_rate(trainer.step - 1)
            if looked:
                trainer.objective.settle()
                record["evaluation"] = asdict(self.evaluate(log.evaluate_sequences))
            self.metrics.append(record)
            reporter.advance(trainer.step, values)
        if saved and not last:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.check()
        self.progress["metrics_bytes"] = self.metrics.sync()
        checkpoint = Checkpoint(self._models().state_dict(), trainer.tensors(), self.progress)
        folder = self.folder / "checkpoints"
        number = self.progress["global_step"]
        save_checkpoint(folder, number, checkpoint, self.config.log.keep)

    def _sequential_ops(self, objective: Objective) -> int:
        """Operations on the critical path of one step, counted on a batch of two sequences."""
        generator = torch.Generator().manual_seed(0)
        batch = self.task.sample(2, generator).to(self.engine.device)
        return sequential_ops(lambda: objective(batch, generator).total)

    # -------------------------------------------------------------------------------- look

    def totals(self) -> dict[str, int | float]:
        """Steps, tokens, sequential operations and training seconds of all stages so far."""
        stages = self.progress["stages"]
        return {
            f"total_{key}": sum(stage.get(key, 0) for stage in stages)
            for key in ("steps", "tokens", "sequential_ops", "seconds")
        }

    def evaluate(
        self,
        sequences: int | None = None,
        *,
        length: int | None = None,
        baselines: bool = False,
    ) -> Evaluation:
        """Score the models as they are now on held-out sequences.

        Args:
            sequences: how many; by default seconds' worth.
            length: tokens in each, for streams; by default `data.evaluate_length`.
            baselines: also score count models, fitted to the training data.
        """
        task = self.task
        if length is not None:
            if length < 2:
                raise MemtrainError(f"length={length}: must be at least 2")
            task = task.windows(length)
            if task.sequence_length != length:
                raise MemtrainError(
                    f"length={length}: sequences of {self.config.data.kind} have "
                    f"{task.sequence_length} tokens; only streams have any length"
                )
        if sequences is None:
            sequences = max(4, self._affordable_tokens() // task.sequence_length)
        return evaluate(
            task,
            self.rnn,
            self.teacher,
            sequences=sequences,
            device=self.engine.device,
            baselines=baselines,
        )

    def _affordable_tokens(self) -> int:
        """How many held-out tokens are looked at in seconds.

        The bidirectional encoder reads a whole window for each, which only a GPU does quickly.
        """
        tokens, positions = (2**18, 2**28) if self.engine.device.type == "cuda" else (2**14, 2**20)
        teacher = self.config.teacher
        if self.teacher is None or teacher.encoder == "causal":
            return tokens
        return min(tokens, positions // teacher.context_length)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """A request that Ctrl-C or SIGTERM sets; a second one stops at once, as usual."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: object) -> None:
        stop.signal_number = number
        for name, handler in before.items():
            signal.signal(name, handler)

    before = {name: signal.signal(name, request) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
