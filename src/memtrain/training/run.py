"""A run: a folder, its models, and the stages that train them.

runs/NAME/config.json       the whole RunConfig
          run.json          the run's identity, and a record of its task and cell
          metrics.jsonl     a line every few steps: losses, counters, evaluations
          checkpoints/      the last few and the best; each resumes bit-exactly
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from memtrain.accel.engine import Engine
from memtrain.config import Custom, DataConfig, RunConfig
from memtrain.data.codec import TokenCodec
from memtrain.data.labels import LabelsTask
from memtrain.data.series_format import SeriesFormat
from memtrain.data.task import Task, build_task, check_task
from memtrain.errors import MemtrainError, check_whole
from memtrain.evaluation.evaluate import (
    EVALUATION_SEED,
    Evaluation,
    default_sequences,
    evaluate,
)
from memtrain.evaluation.forecasts import ForecastEvaluation, evaluate_forecasts
from memtrain.files import read_bytes, write_atomic
from memtrain.models.build import build_models
from memtrain.objectives.base import Objective
from memtrain.objectives.bptt import BPTT
from memtrain.objectives.dmt import DMT
from memtrain.objectives.from_labels import DMTFromLabels, SMTFromLabels
from memtrain.objectives.smt import SMT, Pretrain
from memtrain.runs import changes as allowed
from memtrain.runs import fingerprint, run_folder
from memtrain.runs.async_checkpoint import CheckpointWriter
from memtrain.runs.checkpoint import Checkpoint, latest_checkpoint, load_weights
from memtrain.runs.distributed import ALONE, Group
from memtrain.runs.processes import Interrupted
from memtrain.runs.progress import MAX_METRICS_BYTES, MetricsFile, Progress
from memtrain.runs.run_folder import RunFile, newest_number
from memtrain.training import initial as warm_start
from memtrain.training import notebook
from memtrain.training.callbacks import Callback, check_callbacks
from memtrain.training.console import Reporter, make_reporter
from memtrain.training.curriculum import Curriculum
from memtrain.training.label import start_from_labels
from memtrain.training.optimizer import check_optimizer
from memtrain.training.schedule import describe_new_schedule
from memtrain.training.stages import Training
from memtrain.training.step import check_batch_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Interrupted", "Run"]


class Run:
    """A run folder with its models in memory. Make one with `Run.create` or `Run.open`."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path | str = "",
        *,
        cell: nn.Module | None = None,
        task: Task | None = None,
        data: DataConfig | None = None,
        group: Group = ALONE,
    ) -> None:
        if not isinstance(config, RunConfig):
            raise MemtrainError(
                f"config={config!r}: must be a RunConfig; Run.create(config, folder) makes a run, "
                "Run.open(folder) opens one"
            )
        self.config = config
        self.folder = folder = Path(folder)
        self.id = ""
        """The run's identity, also in its checkpoints; empty without a folder and in old runs."""
        self.group = group
        self.allow_code = True
        """Whether classes that only the config on disk names may be imported."""
        self.changed: list[str] = []
        """Changes of the config that `train` will write down."""
        self.engine = Engine(config.engine, group.local_rank)
        self.engine.apply_globals()
        self.writer = CheckpointWriter(folder / "checkpoints", config.log.keep)
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.task = check_task(task) if task is not None else build_task(data or config.data)
        rnn, teacher = build_models(config, self.task.space, cell)
        if isinstance(self.task, LabelsTask):
            start_from_labels(self.task.labels, rnn, config)
        self.made_of = fingerprint.describe(
            config, self.task, rnn.cell, task_given=task is not None, cell_given=cell is not None
        )
        self.rnn = rnn.to(self.engine.device)
        self.teacher = teacher.to(self.engine.device) if teacher is not None else None
        models: dict[str, nn.Module] = {"rnn": self.rnn}
        self.models = nn.ModuleDict(models if teacher is None else models | {"teacher": teacher})
        self.engine.prepare(self.models)
        self.task.to(self.engine.device)
        self.progress = Progress(
            data=self.task.identity,
            spelling=asdict(self.spelling) if self.spelling else None,
            values=asdict(self.task.values) if self.task.values else None,
            series=asdict(self.series) if self.series else None,
            made_of=self.made_of,
        )
        for name in self.stages:
            Curriculum(self.objective(name), config.stages()[name], self.task).check(name)
        self.pending: Checkpoint | None = None
        self._newest = -1

    # ---------------------------------------------------------------------- create and open

    @classmethod
    def create(
        cls,
        config: RunConfig,
        folder: Path | str | None = None,
        *,
        overwrite: bool = False,
        cell: nn.Module | None = None,
        task: Task | None = None,
        initial: Path | str | warm_start.Loaded | None = None,
        reporter: Reporter | None = None,
        group: Group = ALONE,
    ) -> "Run":
        """Create a run in an empty folder.

        Args:
            config: the whole run.
            folder: the run's folder, by default runs/NAME; it must not hold a run already.
            overwrite: delete the run that is there.
            cell: your own cell as an object, instead of the one that `config.cell` names.
            task: your own task as an object, instead of the one that `config.data` names.
            initial: start from the weights of this run, of one of its checkpoints, or of a model
                that `memtrain.load_pretrained` returned; the config records it.
            reporter: receives messages about weights that start from nothing.
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
        group.from_main(lambda: check_batch_sizes(config, group.size))
        start = None
        if initial is not None or config.initial:
            start = warm_start.read_initial(initial if initial is not None else config.initial)
            config = replace(config, initial=start.source)
        for name, stage in config.stages().items():
            if stage.steps:
                check_optimizer(stage, f"{name}.")
        folder = Path(folder) if folder is not None else Path("runs") / config.name
        if cell is not None and (path := fingerprint.class_path(cell)):
            config = replace(config, cell=replace(config.cell, kind=path))
        if task is not None and (path := fingerprint.class_path(task)):
            config = replace(config, data=Custom(path=path))
        run = cls(config, folder, cell=cell, task=task, group=group)
        if start is not None:
            run._start_from(start, reporter or Reporter())
        made = partial(run_folder.make_folder, config, folder, overwrite, made_of=run.made_of)
        run.id = run.progress.run = group.from_main(made)
        return run

    def _start_from(self, start: warm_start.Initial, reporter: Reporter) -> None:
        """Load weights to start from."""
        warm_start.check_meaning(start, self.config, self.progress)
        trained = self.config.pretrain.steps + self.config.smt.steps * self.config.smt.train_teacher
        messages = warm_start.load_initial(
            start, self.models, self.config, needs_teacher=not trained
        )
        for message in messages if self.group.main else ():
            reporter.say(message)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        allow_code: bool = False,
        best: bool = False,
        cell: nn.Module | None = None,
        task: Task | None = None,
        changes: Mapping[str, Any] | None = None,
        reporter: Reporter | None = None,
        group: Group = ALONE,
    ) -> "Run":
        """Open a run at its newest whole checkpoint.

        Args:
            folder: the run's folder.
            allow_code: import the classes that the run's config names.
            best: open the checkpoint with the lowest held-out loss instead.
            cell: the cell as an object, if the run was created with one; it must be the same.
            task: the task as an object, if the run was created with one; it must be the same.
            changes: fields to continue with, such as {"smt.steps": 2000} for a longer run; `train`
                writes them to config.json. runs/changes.py has what may change.
            reporter: receives warnings about damaged checkpoints.
            group: the processes that train it together; all must see the folder.

        Raises:
            MemtrainError: there is no such run, it is damaged or needs something that is not
                there, or it cannot change so.
        """
        folder = Path(folder)
        config = run_folder.read_folder(folder)
        if not allow_code:
            run_folder.check_imports(
                folder, config, cell_given=cell is not None, task_given=task is not None
            )
        recorded = run_folder.whole_run_file(folder)
        newest = newest_number(folder)
        checkpoint, problems = latest_checkpoint(
            folder / "checkpoints", best=best, run=recorded.id if recorded else ""
        )
        progress = checkpoint.progress if checkpoint is not None else Progress()
        old = config
        config = allowed.apply_changes(old, changes or {})
        changed = allowed.check_changes(old, config, progress, folder)
        learned = progress.data
        data = (
            config.data if task is not None else run_folder.find_data(folder, config.data, learned)
        )
        run = cls(config, folder, cell=cell, task=task, data=data, group=group)
        if recorded is None and progress.made_of is not None:  # a copy without run.json
            made_of = fingerprint.read_record(progress.made_of, f"{folder}: its checkpoint")
            recorded = RunFile(progress.run, made_of)
        doubts = []
        if recorded is not None:
            known, parts = recorded.made_of, ("task", "cell")
            doubts = fingerprint.check_record(known, run.made_of, str(folder), parts)
            run.made_of = known
        if task is None:
            run_folder.check_data(folder, data, learned, run.task.identity)
        reporter = reporter if reporter and group.main else Reporter()
        for message in [*(f"passed over a checkpoint: {one}" for one in problems), *doubts]:
            reporter.say(message)
        if checkpoint is not None:
            run._load(checkpoint)
        run.id = run.progress.run = recorded.id if recorded else ""
        run._newest = newest
        run.allow_code = allow_code
        run.changed = [*changed, *describe_new_schedule(old, config, run.progress)]
        return run

    def _load(self, checkpoint: Checkpoint) -> None:
        progress, fresh = checkpoint.progress, self.progress
        progress.check_fits(self.config, self.folder)
        load_weights(self.models, checkpoint.weights, self.folder)
        progress.data = progress.data or fresh.data  # an old checkpoint does not have all
        if progress.spelling == "unknown":
            progress.spelling = fresh.spelling
        progress.values, progress.series = fresh.values, fresh.series
        progress.made_of = fresh.made_of if progress.made_of is None else progress.made_of
        self.progress = progress
        if progress.step == 0 and progress.stages:
            self._reopen_last_stage()
        self.writer.saved = self.writer.begun = progress.global_step
        self.pending = checkpoint

    def _reopen_last_stage(self) -> None:
        """Continue a stage that has ended, if its config now allows more steps or time."""
        last = self.progress.stages[-1]
        if self.progress.stage == len(self.progress.stages) and not last.is_over(
            self.config.stages()[last.name]
        ):
            self.progress.stage, self.progress.step = self.progress.stage - 1, last.steps

    def continue_from(self, folder: Path) -> None:
        """Take over the weights, counters and metrics of a run that has trained the first stages.

        Both configs must agree but for the stages that the other run lacks. Training continues
        as if this run had trained all stages itself. For a run that has just been created.

        Raises:
            MemtrainError: the other run has no checkpoint, or it does not fit.
        """
        recorded = run_folder.whole_run_file(folder)
        checkpoint, _ = latest_checkpoint(
            folder / "checkpoints", run=recorded.id if recorded else ""
        )
        if checkpoint is None:
            raise MemtrainError(f"{folder}: has no checkpoint to continue from; train it first")
        self._load(checkpoint)
        self.progress.run, self.progress.best = self.id, None  # that checkpoint is not here
        self.writer.saved = self.writer.begun = -1
        metrics = folder / self.metrics.path.name
        if metrics.exists():  # longer than the checkpoint knows: `train` cuts it
            write_atomic(self.metrics.path, read_bytes(metrics, MAX_METRICS_BYTES))

    def __repr__(self) -> str:
        stages = self.config.stages()
        done = {stage.name: stage.steps for stage in self.progress.stages}
        each = [f"{name} {done.get(name, 0)}/{stages[name].steps}" for name in self.stages]
        steps = ", ".join(each)
        return f"<Run {self.config.name} in {self.folder}: {steps} steps, {self.engine.device}>"

    def plot(self) -> "Figure":
        """The training curves as a matplotlib Figure: losses per stage, and held-out losses.

        Raises:
            MemtrainError: there are no metrics yet.
        """
        return notebook.plot(self)

    def _repr_png_(self) -> bytes | None:
        return notebook.png(self)

    def _repr_html_(self) -> str:
        return notebook.html(self)

    @property
    def spelling(self) -> TokenCodec | None:
        """The codec of the RNN's tokens; None if the task is not generative."""
        return self.task.spelling

    @property
    def series(self) -> SeriesFormat | None:
        """Names, scale and season of the numbers that a series has; None for other tasks."""
        found = getattr(self.task, "format", None)
        return found if isinstance(found, SeriesFormat) else None

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
            return BPTT(self.rnn, self.config.bptt)
        if self.config.has_labels:
            if name == "dmt":
                return DMTFromLabels(self.rnn, self.config.dmt)
            return SMTFromLabels(self.rnn, self.config.smt)
        assert self.teacher is not None
        models, stream = (self.teacher, self.rnn), self.task.stream
        if name == "dmt":
            return DMT(*models, self.config.dmt, stream=stream)
        kind = Pretrain if name == "pretrain" else SMT
        return kind(*models, self.config.smt, stream=stream)

    def train(
        self,
        reporter: Reporter | None = None,
        *,
        until: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> "Run":
        """Train the stages that are left.

        Args:
            reporter: shows the progress; by default a bar in a terminal, lines elsewhere.
                `memtrain.Reporter()` shows nothing.
            until: the last stage to train now (None: all).
            callbacks: `memtrain.Callback`s, such as trackers; with several processes only the first
                calls them.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGHUP; a checkpoint of the last full step is on disk.
            DivergedError: a number stopped being finite; the last good checkpoint is on disk.
            CheckpointError: a checkpoint could not be written.
            MemtrainError: another process trains the run, or changed it since it was opened; or a
                callback raised it, and a checkpoint of the last full step is on disk.
        """
        if until is not None and until not in self.stages:
            raise MemtrainError(f"until={until!r}: this run's stages are {', '.join(self.stages)}")
        last = len(self.stages) if until is None else self.stages.index(until) + 1
        if not isinstance(reporter, Reporter | None):
            remedy = "" if not isinstance(reporter, Callback) else "; pass it as callbacks=[...]"
            raise MemtrainError(
                f"reporter={type(reporter).__name__}: must be a memtrain.Reporter{remedy}"
            )
        check_callbacks(callbacks)
        reporter = (reporter or make_reporter()) if self.group.main else Reporter()
        if self.progress.stage >= last:
            reporter.close()
            return self
        Training(self, reporter, callbacks).train(last)
        return self

    # ---------------------------------------------------------------------------- evaluate

    def totals(self) -> dict[str, int | float]:
        """Steps, tokens, sequential operations and training seconds of all stages so far."""
        return self.progress.totals()

    def evaluate(
        self,
        sequences: int | None = None,
        *,
        length: int | None = None,
        data: Path | str | None = None,
        baselines: bool = False,
        seed: int = EVALUATION_SEED,
    ) -> Evaluation:
        """Score the current models on held-out sequences.

        Args:
            sequences: how many; by default as many as take seconds.
            length: tokens per sequence, for streams; by default `data.evaluate_length`.
            data: other data whose held-out part is scored, for streams: prepared with the same
                tokens, or a source, which is prepared with the run's tokenizer.
            baselines: also score n-gram models, fitted to the training data, or naive forecasts of
                numbers.
            seed: selects the sequences; the default is that of the evaluations during training.
        """
        task, device = self.task, self.engine.device
        if data is not None:
            task = self._other_data(Path(data))
        if length is not None:
            check_whole("length", length, 2)
            task = task.windows(length)
            if task.sequence_length != length:
                raise MemtrainError(
                    f"length={length}: sequences of {self.config.data.kind} have "
                    f"{task.sequence_length} tokens; only streams have any length"
                )
        if sequences is None:
            teacher = self.config.teacher
            windows = self.teacher is not None and teacher.encoder != "causal"
            window = teacher.context_length if windows else 1
            sequences = default_sequences(task.sequence_length, window, device)
        models = (self.rnn, self.teacher)
        with self.engine.eval_mode():
            return evaluate(
                task,
                *models,
                sequences=sequences,
                device=device,
                seed=seed,
                baselines=baselines,
            )

    def _other_data(self, path: Path) -> Task:
        from memtrain.data.prepare.cache import prepared_like
        from memtrain.data.stream import StreamTask

        if not isinstance(self.task, StreamTask):
            raise MemtrainError(
                f"data={path}: only runs of text, images and tokens are evaluated on other data; "
                f"{self.folder} is of {self.config.data.kind}"
            )
        store = prepared_like(self.task.store, path, Path("data"))
        return self.task.on(store, str(path)).to(self.engine.device)

    def evaluate_forecasts(
        self,
        horizon: int | None = None,
        *,
        origins: int = 64,
        count: int = 100,
        history: int | None = None,
    ) -> ForecastEvaluation:
        """Score forecasts from held-out origins, and naive ones: MSE, MAE, CRPS and coverage.

        Args:
            horizon: steps to forecast; by default a season, else a quarter of a sequence.
            origins: how many, fewer if the data has fewer.
            count: sample paths per origin.
            history: steps read before an origin; by default a sequence, and at least a season.

        Raises:
            MemtrainError: an argument is invalid, or the run's sequences are tokens.
        """
        if self.task.values is None:
            raise MemtrainError(
                f"{self.folder}: its sequences are tokens, not numbers; run.evaluate() scores them"
            )
        with self.engine.eval_mode():
            return evaluate_forecasts(
                self.rnn, self.task, horizon, origins=origins, count=count, history=history
            )
