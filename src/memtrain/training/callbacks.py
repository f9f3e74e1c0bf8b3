"""Hooks into a run: what a callback receives, and how several of them are called."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrain.errors import EndStage, FailedElsewhereError, MemtrainError, describe_error
from memtrain.evaluation.evaluate import Evaluation
from memtrain.runs.distributed import Group
from memtrain.runs.progress import StageProgress

if TYPE_CHECKING:
    from memtrain.training.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The numbers of one step."""

    record: dict[str, Any]
    """The step's line of metrics.jsonl: stage, counters, losses, and the evaluation if there was
    one."""
    losses: dict[str, float]
    """The loss, its parts and the gradient norms."""
    steps: int
    """Steps of the whole stage."""
    evaluation: Evaluation | None
    """The stage's newest held-out scores; None before its first evaluation."""
    unit: str
    """What one target of the task is, such as a character or a pixel."""
    seconds_left: float | None = None
    """Until the stage's time limit, if it has one."""

    @property
    def stage(self) -> str:
        return self.record["stage"]

    @property
    def step(self) -> int:
        """Within the stage, from 1."""
        return self.record["step"]

    @property
    def total_steps(self) -> int:
        """Steps of all stages so far."""
        return self.record["total_steps"]

    @property
    def loss(self) -> float:
        return self.losses["loss"]

    @property
    def evaluated(self) -> bool:
        """Whether `evaluation` was made after this very step."""
        return "evaluation" in self.record

    @property
    def held_out(self) -> float | None:
        """The newest held-out loss of the RNN."""
        return None if self.evaluation is None else self.evaluation.rnn.nats

    @property
    def held_out_teacher(self) -> float | None:
        """The newest held-out loss of the teacher."""
        found = None if self.evaluation is None else self.evaluation.teacher
        return None if found is None else found.nats


class Callback:
    """Hooks into `run.train(callbacks=[...])`. Derive from it and define the ones you need.

    With several processes, only the first calls them. From any hook of a stage you may

    - raise `memtrain.EndStage("why")`: the stage ends after this step, or after one more if this
      one was not evaluated, and the next one starts;
    - raise a `MemtrainError`: the run is saved and stops with its message. Any other exception
      does the same.
    """

    def on_start(self, run: "Run") -> None:
        """Training starts, or continues; `run.progress` has the steps that are done."""

    def on_stage_start(self, stage: str, step: int, steps: int) -> None:
        """A stage starts, or continues, at a step."""

    def on_step(self, metrics: Metrics) -> None:
        """A step is done; called every `log.every` steps and after each evaluation."""

    def on_evaluation(self, metrics: Metrics) -> None:
        """Held-out sequences were scored after a step; `on_step` follows."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is whole on disk. Training may be a few steps further by now."""

    def on_stage_end(self, stage: str, step: int) -> None:
        """A stage has ended after a step, and is saved."""

    def on_end(self) -> None:
        """Training has ended, stopped or failed."""


class EarlyStopping(Callback):
    """Ends a stage with `patience` after that many evaluations without a lower held-out loss.

    The counters are part of the run's progress, so a resumed run ends at the same step.
    """

    def on_start(self, run: "Run") -> None:
        self.run = run

    def on_evaluation(self, metrics: Metrics) -> None:
        stage = self.run.config.stages()[metrics.stage]
        teacher = metrics.stage == "pretrain"  # which trains nothing else
        loss = metrics.held_out_teacher if teacher else metrics.held_out
        progress = self.run.progress.stages[-1]
        if progress.lengths_over < len(stage.curriculum):
            return  # whole sequences, on which it is scored, are still to come
        if loss is None or not progress.note_loss(loss) or not stage.patience:
            return
        if progress.since_lowest >= stage.patience and metrics.step < metrics.steps:
            raise EndStage(early_end(progress, stage.patience))


def early_end(progress: StageProgress, patience: int) -> str:
    """Why a stage with patience ended."""
    lowest = "" if progress.lowest is None else f" than {progress.lowest:.4f}"
    return f"no lower held-out loss{lowest} in {patience} evaluations"


def check_callbacks(callbacks: object) -> None:
    """Refuse what is not a sequence of callbacks."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise MemtrainError(
            f"callbacks={type(callbacks).__name__}: must be a list, as callbacks=[MyCallback()]"
        )
    for one in callbacks:
        if isinstance(one, type) and issubclass(one, Callback):
            raise MemtrainError(
                f"callbacks: {one.__name__} is a class; pass an object, {one.__name__}(...)"
            )
        if not isinstance(one, Callback):
            raise MemtrainError(
                f"callbacks: {type(one).__name__} is not a memtrain.Callback; derive from it"
            )


class Hooks:
    """The callbacks of a run. Only the main process calls them; all agree on what they ask for."""

    def __init__(self, callbacks: Iterable[Callback], group: Group) -> None:
        self.callbacks = list(callbacks) if group.main else []
        self.group = group
        self.checkpoint = -1
        """The number of the last checkpoint that they know of."""
        self._end: EndStage | None = None
        self.error: MemtrainError | None = None

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback; what one raises is kept for `settle`."""
        for callback in self.callbacks:
            try:
                getattr(callback, hook)(*arguments)
            except EndStage as end:
                self._end = self._end or end
            except MemtrainError as error:
                self.error = self.error or error
            except Exception as error:  # the user's code
                name = f"{type(callback).__name__}.{hook}"
                wrapped = MemtrainError(f"callback {name} raised {describe_error(error)}")
                wrapped.__cause__ = error
                self.error = self.error or wrapped

    def tell_checkpoint(self, saved: int, folder: Path) -> None:
        """Call `on_checkpoint` if a newer one is whole on disk."""
        if saved > self.checkpoint:
            self.checkpoint = saved
            self.tell("on_checkpoint", folder / f"{saved:08d}")

    def settle(self, *, keep_end: bool = False) -> Exception | None:
        """What a callback asked for since the last call, an error first. All processes call it.

        Args:
            keep_end: leave a wish to end the stage for the next call.
        """
        end = None if keep_end else self._end
        code = 2.0 if self.error is not None else 1.0 if end is not None else 0.0
        asked = self.group.first(code)
        if asked == 2:
            found, self.error = self.error, None
            return found or FailedElsewhereError("a callback failed in the main process")
        if asked == 1:
            found, self._end = self._end, None
            return found or EndStage("a callback of the main process asked for it")
        return None
