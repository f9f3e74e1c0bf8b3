"""A run: a folder, its models, and the stages that train them.

runs/NAME/config.json       the whole RunConfig
          metrics.jsonl     a line every few steps: losses, counters, evaluations
          checkpoints/      the last few and the best, each enough to go on to the bit
"""

import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from memtrain.config import RunConfig
from memtrain.config_json import read_config, to_json
from memtrain.data.build import build_task
from memtrain.data.spelling import Spelling
from memtrain.data.task import Task, check_task
from memtrain.errors import CheckpointError, DivergedError, MemtrainError
from memtrain.eval.cost import sequential_ops
from memtrain.eval.evaluate import Evaluation, evaluate
from memtrain.nn.build import build_models
from memtrain.objectives.bptt import BPTT
from memtrain.objectives.dmt import DMT
from memtrain.objectives.objective import Objective
from memtrain.objectives.part import full_tensors
from memtrain.objectives.smt import SMT
from memtrain.train.checkpoint import Checkpoint, latest_checkpoint
from memtrain.train.distributed import ALONE, Group, lost_worker
from memtrain.train.engine import Engine, out_of_memory
from memtrain.train.files import write_whole
from memtrain.train.metrics import MetricsFile, Reporter
from memtrain.train.saving import CheckpointWriter
from memtrain.train.stop import Interrupted, stop_signals
from memtrain.train.trainer import Trainer

DRAFT = ".draft-config.json"
"""What is left of a run that was killed before it began."""


class Run:
    """A run folder with its models in memory. Make one with `Run.create` or `Run.open`."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        cell: nn.Module | None = None,
        task: Task | None = None,
        group: Group = ALONE,
    ) -> None:
        self.config = config
        self.folder = folder
        self.group = group
        self.engine = Engine(config.engine, group.local_rank)
        self.writer = CheckpointWriter(folder / "checkpoints", config.log.keep)
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.task = check_task(task) if task is not None else build_task(config.data)
        rnn, teacher = build_models(config, self.task.vocab_size, cell)
        self.rnn = rnn.to(self.engine.device)
        self.teacher = teacher.to(self.engine.device) if teacher is not None else None
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
        group: Group = ALONE,
    ) -> "Run":
        """A new run in an empty folder, runs/NAME unless another is given.

        Args:
            config: the whole run.
            folder: where it will live; it must not hold a run already.
            overwrite: delete the run that is there.
            cell: a cell of yours as an object, instead of what `config.cell` names.
            task: a task of yours as an object, instead of what `config.data` names.
            group: the processes that train it together.
        """
        folder = Path(folder) if folder is not None else Path("runs") / config.name
        if cell is not None:
            kind = f"{type(cell).__module__}:{type(cell).__name__}"
            config = replace(config, cell=replace(config.cell, kind=kind))
        run = cls(config, folder, cell=cell, task=task, group=group)
        if group.main:
            _make_folder(config, folder, overwrite)
        group.wait()
        return run

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        allow_code: bool = False,
        best: bool = False,
        cell: nn.Module | None = None,
        task: Task | None = None,
        reporter: Reporter | None = None,
        group: Group = ALONE,
    ) -> "Run":
        """A run from its folder, at its newest whole checkpoint.

        Args:
            folder: the run's folder.
            allow_code: import the classes that the run's config names.
            cell: the cell as an object, if it was given as one.
            task: the task as an object, if it was given as one.
            best: take the checkpoint with the lowest held-out loss instead.
            reporter: hears of checkpoints that had to be passed over.
            group: the processes that train it together; all must see the folder.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise MemtrainError(f"{folder}: no run there (config.json is missing)")
        config = read_config(path)
        if not allow_code:
            named = [config.cell.kind] if ":" in config.cell.kind and cell is None else []
            named += [config.data.path] if config.data.kind == "custom" and task is None else []
            if named:
                raise MemtrainError(
                    f"{folder}: this run imports {named[0]}; pass --allow-code if you trust it"
                )
        run = cls(config, folder, cell=cell, task=task, group=group)
        checkpoint, problems = latest_checkpoint(folder / "checkpoints", best=best)
        for problem in problems:
            (reporter or Reporter()).say(f"passed over a broken checkpoint: {problem}")
        if checkpoint is not None:
            run._load(checkpoint)
        return run

    def _load(self, checkpoint: Checkpoint) -> None:
        progress = self.progress | checkpoint.progress
        stage, done = progress["stage"], progress["stages"]
        steps = [self.config.stages()[name].steps for name in self.stages]
        if (
            stage > len(steps)
            or [one.get("name") for one in done] != self.stages[: len(done)]
            or len(done) != stage + (progress["step"] > 0)
            or (progress["step"] and progress["step"] > steps[stage])
            or any({"tokens", "seconds", "sequential_ops_a_step"} - one.keys() for one in done)
        ):
            raise CheckpointError(
                f"{self.folder}: the checkpoint's progress does not fit the config"
            )
        try:
            self._models().load_state_dict(checkpoint.weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[1].strip()[:200]
            raise MemtrainError(f"{self.folder}: weights do not fit the config: {reason}") from None
        self.progress = progress
        self.writer.saved = self.writer.begun = progress["global_step"]
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
            CheckpointError: a checkpoint could not be written.
        """
        reporter = reporter if reporter and self.group.main else Reporter()
        if self.group.main and (problem := self.metrics.cut(self.progress["metrics_bytes"])):
            reporter.say(problem)
        if self.config.engine.shard_teacher and self.teacher is not None:
            self.group.spread_teacher(self.teacher, self.engine.device)
        try:
            while not self.finished:
                name = self.stages[self.progress["stage"]]
                self._train_stage(name, reporter)
                if name == until:
                    break
            self.writer.wait()
        except RuntimeError as error:
            if self.group.size == 1:
                raise
            raise lost_worker(error, self.writer.saved) from error
        finally:
            self.writer.finish()
            reporter.close()
        return self

    def _train_stage(self, name: str, reporter: Reporter) -> None:
        index = self.progress["stage"]
        stage = self.config.stages()[name]
        objective = self.objective(name)
        seed = self.config.seed * 8 + index  # every stage has chance of its own
        trainer = Trainer(objective, stage, self.task, self.engine, seed, self.group)
        with trainer.frozen_rest():
            if self.progress["step"]:
                assert self.pending is not None
                trainer.load_tensors(self.pending.optimizer)
                done = self.progress["stages"][index]
                trainer.step, trainer.tokens = self.progress["step"], done["tokens"]
                trainer.clock.go_on(done["seconds"], done.get("start_up_seconds"), trainer.step)
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
                    if self._stopped(stop.signal_number, trainer):
                        self._save(trainer)
                        self.writer.wait()
                        message = f"stopped after step {trainer.step} of {name}, all is saved"
                        raise Interrupted(message, stop.signal_number or signal.SIGTERM)
                    if trainer.done:
                        break
            trainer.objective.settle()
        self.progress |= {"stage": index + 1, "step": 0}
        self._save(trainer)

    def _stopped(self, signal_number: int, trainer: Trainer) -> bool:
        """Whether all stop now. Processes agree where they wait for one another anyway."""
        if trainer.done:
            return False
        if self.group.size > 1 and trainer.step % self.config.log.every:
            return False
        return self.group.highest(signal_number, self.engine.device) > 0

    def _step(self, trainer: Trainer, name: str, reporter: Reporter) -> None:
        log = self.config.log
        self.writer.check()
        stage = self.progress["stages"][self.progress["stage"]]
        try:
            metrics = trainer.train_step()
            last = trainer.done
            written = trainer.step % log.every == 0 or last
            looked = last or (log.evaluate_every and trainer.step % log.evaluate_every == 0)
            saved = trainer.step % log.checkpoint_every == 0
            if written or looked or saved:
                self._tell_skipped(trainer.check(), stage, trainer.step, reporter)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, name, trainer.stage, trainer.ordered) from None
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
            "seconds": trainer.clock.seconds,
        }
        if trainer.clock.start_up is not None:
            stage["start_up_seconds"] = trainer.clock.start_up
        if written or looked:
            values = {key: float(value) for key, value in metrics.items()}
            record = {"stage": name, "step": trainer.step, **self.totals(), **values}
            record["learning_rate"] = trainer.rate
            if looked:
                trainer.objective.settle()
                evaluation = self.evaluate(log.evaluate_sequences)
                record["evaluation"] = asdict(evaluation)
                saved |= self._is_best(evaluation, name, trainer.step)
            if self.group.main:
                self.metrics.append(record)
            if trainer.stage.seconds:
                reporter.clock(trainer.clock.left)
            reporter.advance(trainer.step, values)
        if saved and not last:
            self._save(trainer)

    def _is_best(self, evaluation: Evaluation, name: str, step: int) -> bool:
        """Note the lowest held-out loss of the RNN, from the empty memory, in all stages."""
        best, nats = self.progress.get("best"), evaluation.rnn.nats
        if best is not None and not nats < best["nats"]:
            return False
        at = {"stage": name, "step": step, "global_step": self.progress["global_step"]}
        self.progress["best"] = at | {"nats": nats}
        return True

    def _tell_skipped(self, bad: int, stage: dict, step: int, reporter: Reporter) -> None:
        if bad > stage.get("skipped", 0):
            stage["skipped"] = bad
            reporter.say(
                f"{stage['name']} step {step}: {bad} steps so far had a loss or gradient that is "
                "not finite; their updates were left out"
            )

    def _save(self, trainer: Trainer) -> None:
        trainer.check()
        number, begun = self.progress["global_step"], self.writer.begun
        if number == begun and self.progress["step"]:
            return  # this very step is saved, or being saved
        self.progress["metrics_bytes"] = self.metrics.length()
        weights = full_tensors(self._models().state_dict())
        checkpoint = Checkpoint(weights, trainer.tensors(), self.progress)
        if self.group.main:
            self.writer.save(number, checkpoint, self.metrics.sync)

    def _sequential_ops(self, objective: Objective) -> int:
        """Operations on the critical path of one step, counted on a batch of two sequences."""
        generator = torch.Generator().manual_seed(0)
        batch = self.task.sample(2, generator).to(self.engine.device)
        with self.engine.reference(self._models()):  # kernels and graphs would hide operations
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
        with self.engine.looking():
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


def _make_folder(config: RunConfig, folder: Path, overwrite: bool) -> None:
    """Make the run's folder, with its config: what is there and no run is never touched."""
    if (folder / "config.json").exists():
        if not overwrite:
            raise MemtrainError(
                f"{folder}: a run is there already; --resume goes on with it, "
                "--overwrite starts anew, --folder takes another place"
            )
        for name in ("checkpoints", "figures", "samples"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    elif folder.exists() and {p.name for p in folder.iterdir()} - {DRAFT}:
        raise MemtrainError(f"{folder}: holds files that are no run; take an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", to_json(config).encode())
