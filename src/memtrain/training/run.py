"""A run: a folder, its models, and the stages that train them.

runs/NAME/config.json       the whole RunConfig
          run.json          the run's identity, and what it was made of beside the config
          metrics.jsonl     a line every few steps: losses, counters, evaluations
          checkpoints/      the last few and the best, each enough to go on to the bit
"""

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from memtrain.accel.engine import Engine
from memtrain.config import Custom, DataConfig, RunConfig
from memtrain.data.codec import TokenCodec
from memtrain.data.task import Task, build_task, check_task
from memtrain.errors import MemtrainError
from memtrain.evaluation.cost import sequential_ops
from memtrain.evaluation.evaluate import Evaluation, evaluate
from memtrain.models.build import build_models
from memtrain.objectives.base import Objective
from memtrain.objectives.bptt import BPTT
from memtrain.objectives.dmt import DMT
from memtrain.objectives.smt import SMT
from memtrain.training.async_checkpoint import CheckpointWriter
from memtrain.training.checkpoint import Checkpoint, latest_checkpoint, load_weights
from memtrain.training.console import Reporter, make_reporter
from memtrain.training.distributed import ALONE, Group, full_tensors, last_saved, lost_worker
from memtrain.training.fingerprint import (
    check_record,
    class_path,
    describe,
    importable,
    read_record,
)
from memtrain.training.loop import Agreement, StageLoop
from memtrain.training.metrics import MetricsFile
from memtrain.training.processes import Interrupted, stop_signals
from memtrain.training.progress import Progress, StageProgress
from memtrain.training.run_folder import (
    Guard,
    RunFile,
    check_data,
    check_imports,
    check_unchanged,
    clear_leftovers,
    find_data,
    held,
    make_folder,
    newest_number,
    read_folder,
    whole_run_file,
)
from memtrain.training.step import Trainer, check_batch_size

__all__ = ["Interrupted", "Run"]


class Run:
    """A run folder with its models in memory. Make one with `Run.create` or `Run.open`."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        cell: nn.Module | None = None,
        task: Task | None = None,
        data: DataConfig | None = None,
        group: Group = ALONE,
    ) -> None:
        self.config = config
        self.folder = folder
        self.id = ""
        """The run's identity, which its checkpoints carry; empty if it has no folder yet, or if an
        older memtrain made it."""
        self.group = group
        self.engine = Engine(config.engine, group.local_rank)
        self.engine.apply_globals()
        self.writer = CheckpointWriter(folder / "checkpoints", config.log.keep)
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.task = check_task(task) if task is not None else build_task(data or config.data)
        rnn, teacher = build_models(config, self.task.vocab_size, cell)
        self.made_of = describe(
            config, self.task, rnn.cell, task_given=task is not None, cell_given=cell is not None
        )
        self.rnn = rnn.to(self.engine.device)
        self.teacher = teacher.to(self.engine.device) if teacher is not None else None
        self.engine.prepare(self._models())
        self.task.to(self.engine.device)
        self.progress = Progress(
            data=self.task.identity,
            spelling=asdict(self.spelling) if self.spelling else None,
            made_of=self.made_of,
        )
        self.pending: Checkpoint | None = None
        self._newest = -1

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

        Raises:
            MemtrainError: a run is there, or another process makes or trains one there; or the
                config, the cell or the task is wrong. Nothing is written then.
        """
        if not isinstance(config, RunConfig):
            hint = f"recipe({config!r})" if isinstance(config, str) else 'recipe("digits")'
            raise MemtrainError(f"config={config!r}: must be a RunConfig, for example {hint}")
        for name, thing in (("cell", cell), ("task", task)):
            if isinstance(thing, type):
                raise MemtrainError(
                    f"{name}={thing.__name__}: is a class; pass an object, {thing.__name__}(...)"
                )
        group.from_main(lambda: _check_batch_sizes(config, group.size))
        folder = Path(folder) if folder is not None else Path("runs") / config.name
        if cell is not None and importable(path := class_path(cell)):
            config = replace(config, cell=replace(config.cell, kind=path))
        if task is not None and importable(path := class_path(task)):
            config = replace(config, data=Custom(path=path))
        run = cls(config, folder, cell=cell, task=task, group=group)
        run._set_id(
            group.from_main(lambda: make_folder(config, folder, overwrite, made_of=run.made_of))
        )
        return run

    def _set_id(self, identity: str) -> None:
        self.id = self.progress.run = identity

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
            cell: the cell as an object, if it was given as one: the same, or it is refused.
            task: the task as an object, likewise.
            best: take the checkpoint with the lowest held-out loss instead.
            reporter: hears of checkpoints that had to be passed over.
            group: the processes that train it together; all must see the folder.
        """
        folder = Path(folder)
        config = read_folder(folder)
        if not allow_code:
            check_imports(folder, config, cell_given=cell is not None, task_given=task is not None)
        recorded = whole_run_file(folder)
        newest = newest_number(folder)
        checkpoint, problems = latest_checkpoint(
            folder / "checkpoints", best=best, run=recorded.id if recorded else ""
        )
        progress = checkpoint.progress if checkpoint is not None else Progress()
        learned = progress.data
        data = find_data(folder, config.data, learned) if task is None else config.data
        run = cls(config, folder, cell=cell, task=task, data=data, group=group)
        if recorded is None and progress.made_of is not None:  # a copy without run.json
            made_of = read_record(progress.made_of, f"{folder}: its checkpoint")
            recorded = RunFile(progress.run, made_of)
        doubts = []
        if recorded is not None:
            doubts = check_record(recorded.made_of, run.made_of, str(folder), ("task", "cell"))
            run.made_of = recorded.made_of
        if task is None:
            check_data(folder, data, learned, run.task.identity)
        reporter = reporter if reporter and group.main else Reporter()
        for problem in problems:
            reporter.say(f"passed over a checkpoint: {problem}")
        for doubt in doubts:
            reporter.say(doubt)
        if checkpoint is not None:
            run._load(checkpoint)
        run._set_id(recorded.id if recorded else "")
        run._newest = newest
        return run

    def _load(self, checkpoint: Checkpoint) -> None:
        progress, fresh = checkpoint.progress, self.progress
        progress.check_fits(self.config, self.folder)
        load_weights(self._models(), checkpoint.weights, self.folder)
        progress.data = progress.data or fresh.data  # an old checkpoint does not have all
        progress.spelling = fresh.spelling if progress.spelling == {} else progress.spelling
        progress.made_of = fresh.made_of if progress.made_of is None else progress.made_of
        self.progress = progress
        self.writer.saved = self.writer.begun = progress.global_step
        self.pending = checkpoint

    def _models(self) -> nn.ModuleDict:
        models: dict[str, nn.Module] = {"rnn": self.rnn}
        if self.teacher is not None:
            models["teacher"] = self.teacher
        return nn.ModuleDict(models)

    def __repr__(self) -> str:
        stages = self.config.stages()
        done = {stage.name: stage.steps for stage in self.progress.stages}
        steps = ", ".join(
            f"{name} {done.get(name, 0)}/{stages[name].steps}" for name in self.stages
        )
        return f"<Run {self.config.name} in {self.folder}: {steps} steps, {self.engine.device}>"

    @property
    def spelling(self) -> TokenCodec | None:
        """What the RNN writes; None if its task asks for answers."""
        return self.task.spelling

    # ------------------------------------------------------------------------------- train

    @property
    def stages(self) -> list[str]:
        """The names of the stages that have steps, in order."""
        return [name for name, stage in self.config.stages().items() if stage.steps]

    @property
    def finished(self) -> bool:
        return self.progress.stage >= len(self.stages)

    def objective(self, name: str) -> Objective:
        if name == "bptt":
            return BPTT(self.config.bptt, self.rnn)
        assert self.teacher is not None
        stream = self.task.stream
        if name == "smt":
            return SMT(self.config.smt, self.teacher, self.rnn, stream=stream)
        return DMT(self.config.dmt, self.teacher, self.rnn, stream=stream)

    def train(self, reporter: Reporter | None = None, *, until: str | None = None) -> "Run":
        """Run the stages that are left, from where the run stands.

        Args:
            reporter: receives how it proceeds. By default a bar in a terminal, lines elsewhere;
                `memtrain.Reporter()` shows nothing.
            until: the last stage to run now (None: all).

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGHUP; a checkpoint of the last full step is on disk.
                After the last step of all, the run is `finished`.
            DivergedError: a number stopped being finite; the last good checkpoint is on disk.
            CheckpointError: a checkpoint could not be written.
            MemtrainError: another process holds the run, or trained or replaced it since it was
                opened.
        """
        if until is not None and until not in self.stages:
            raise MemtrainError(f"until={until!r}: this run's stages are {', '.join(self.stages)}")
        last = len(self.stages) if until is None else self.stages.index(until) + 1
        if not isinstance(reporter, Reporter | None):
            kind = type(reporter).__name__
            raise MemtrainError(f"reporter={kind}: must be a memtrain.Reporter")
        reporter = (reporter or make_reporter()) if self.group.main else Reporter()
        if self.progress.stage >= last:
            reporter.close()
            return self
        with stop_signals(second_ends=True) as request, ExitStack() as stack:
            stop, where, number = Agreement(request, self.group), "before its next step", 0
            self.group.from_main(lambda: self._take(stack, reporter))
            if self.config.engine.shard_teacher and self.teacher is not None:
                self.group.shard_teacher_weights(self.teacher, self.engine.device)
            try:
                with self.group.watched(self._saved):
                    self._prepare_engine(reporter)
                    while not (number := stop.reached(now=True)) and self.progress.stage < last:
                        loop = self._stage_loop(self.stages[self.progress.stage], reporter, stop)
                        with loop.trainer.frozen_rest():
                            self._start_stage(loop)
                            loop.train()
                        self.progress.stage, self.progress.step = self.progress.stage + 1, 0
                        loop.save()
                        where = f"after step {loop.trainer.step} of {loop.name}"
                    self.writer.wait()
                    if number := number or stop.reached(now=True):
                        raise stop.interrupted(where, number)
            except RuntimeError as error:
                if self.group.size == 1:
                    raise
                raise lost_worker(error, self.writer.last_whole()) from error
            finally:
                self.writer.finish()
                self._newest = newest_number(self.folder)
                reporter.close()
        return self

    def _prepare_engine(self, reporter: Reporter) -> None:
        """Report the fast paths, and compile an evaluation's kernels together, not one by one."""
        if self.engine.fast:
            reporter.say(self.engine.summary(self._models()))
        if self.config.engine.compile and self.group.size == 1:
            sequences = self.config.log.evaluate_sequences
            self.engine.precompile(self._models(), lambda: self.evaluate(sequences))

    def _saved(self) -> str:
        """What a run that ends abruptly leaves, in words."""
        saved = last_saved(self.writer.last_whole())
        return f"{saved}; continue with: memtrain resume {self.folder}"

    def _take(self, stack: ExitStack, reporter: Reporter) -> None:
        """Hold the run's folder until the stack ends, if it is as it was opened."""
        stack.enter_context(held(self.folder))
        check_unchanged(self.folder, self.id, self._newest)
        clear_leftovers(self.folder)
        if problem := self.metrics.cut(self.progress.metrics_bytes):
            reporter.say(problem)
        if lost := self.progress.metrics_lost:
            reporter.say(f"{self.metrics.path}: {lost:,} bytes of earlier lines are lost")
        guard = Guard(self.folder, self.config, RunFile(self.id, self.made_of))
        self.writer.guard = lambda: self._look_after(guard, reporter)

    def _look_after(self, guard: Guard, reporter: Reporter) -> None:
        """Before a checkpoint: the folder is the run's own, and what was deleted there is said."""
        for message in guard.check():
            reporter.say(message)
        if self.metrics.lost:
            lost = self.metrics.lost
            reporter.say(f"{self.metrics.path}: {lost:,} bytes of earlier lines are lost")
            self.progress.metrics_lost += lost
            self.metrics.lost = 0

    def _stage_loop(self, name: str, reporter: Reporter, stop: Agreement) -> StageLoop:
        seed = self._stage_seed()
        stage = self.config.stages()[name]
        trainer = Trainer(self.objective(name), stage, self.task, self.engine, seed, self.group)
        return StageLoop(
            name=name,
            trainer=trainer,
            log=self.config.log,
            progress=self.progress,
            metrics=self.metrics,
            writer=self.writer,
            reporter=reporter,
            stop=stop,
            weights=lambda: full_tensors(self._models().state_dict()),
            evaluate=self.evaluate,
        )

    def _stage_seed(self) -> int:
        """Every stage has random numbers of its own."""
        return self.config.seed * 8 + self.progress.stage

    def _start_stage(self, loop: StageLoop) -> None:
        """Restore a stage that had begun, from the run's checkpoint; else begin it."""
        trainer, progress = loop.trainer, self.progress
        if progress.step:
            assert self.pending is not None
            trainer.load_tensors(self.pending.optimizer)
            trainer.restore(progress.step, progress.stages[progress.stage])
        else:
            torch.manual_seed(self._stage_seed())
            cost = self._sequential_ops(trainer.objective)
            progress.stages.append(StageProgress(loop.name, sequential_ops_a_step=cost))
        self.pending = None

    def _sequential_ops(self, objective: Objective) -> int:
        """Operations on the critical path of one step, counted on a batch of two sequences as
        training draws them."""
        generator = torch.Generator().manual_seed(0)
        task = self.task.windows(objective.tokens_needed(), objective.empty_start_rows(2))
        batch = task.sample(2, generator).to(self.engine.device)
        with self.engine.reference(self._models()):  # kernels and graphs would hide operations
            return sequential_ops(lambda: objective(batch, generator).total)

    # -------------------------------------------------------------------------------- look

    def totals(self) -> dict[str, int | float]:
        """Steps, tokens, sequential operations and training seconds of all stages so far."""
        return self.progress.totals()

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
        if sequences is not None and sequences < 1:
            raise MemtrainError(f"sequences={sequences}: must be at least 1")
        if sequences is None:
            sequences = max(4, self._affordable_tokens() // task.sequence_length)
        with self.engine.eval_mode():
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


def _check_batch_sizes(config: RunConfig, processes: int) -> None:
    """Refuse batches that the processes cannot divide, before there is a folder."""
    for name, stage in config.stages().items():
        if stage.steps:
            check_batch_size(stage, processes, f"{name}.")
