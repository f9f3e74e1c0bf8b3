"""A curriculum over the sequence length: a stage trains on shorter sequences first.

Tasks make sequences of each length themselves (`Task.of_length`). On a stream the windows are as
long as the objective needs, so there the steps of its rollouts grow.
"""

from memtrain.config import StageConfig
from memtrain.data.task import Task, check_task
from memtrain.errors import MemtrainError
from memtrain.objectives.base import Objective


class Curriculum:
    """The sequence lengths of a stage in order, the whole length last.

    Args:
        objective: the stage's; on a stream its `rollout_length` changes with the length.
        stage: has the shorter lengths.
        task: makes sequences of the whole length.
    """

    def __init__(self, objective: Objective, stage: StageConfig, task: Task) -> None:
        self.objective, self.stage, self.task = objective, stage, task
        whole = objective.rollout_length if task.stream else task.sequence_length
        self.lengths = (*(length for length, _ in stage.curriculum), whole)

    def use(self, index: int) -> Task:
        """The task at one of the lengths, as the objective needs it."""
        task, length = self.task, self.lengths[index]
        if task.stream:
            self.objective.rollout_length = length
        elif index < len(self.stage.curriculum):
            task = task.of_length(length)
            task.to(self.task.device)
        empty_starts = self.objective.empty_start_rows(self.stage.batch_size)
        return task.windows(self.objective.tokens_needed(), empty_starts)

    def check(self, name: str) -> None:
        """Refuse lengths that the stage cannot train on, before any stage starts.

        Args:
            name: the stage's.
        """
        whole, shorter = self.lengths[-1], self.lengths[:-1]
        if shorter and not whole:
            raise MemtrainError(
                f"{name}.curriculum={shorter[0]}: {name} draws windows of context and future from "
                "a stream, which do not grow; leave it out (those of dmt and bptt can)"
            )
        if shorter and shorter[-1] >= whole:
            raise MemtrainError(
                f"{name}.curriculum={shorter[-1]}: must be below {whole}, the length that {name} "
                "ends with; leave that pair out"
            )
        least = self.objective.shortest_length()
        shortest = self.objective.tokens_needed() if self.task.stream else self.lengths[0]
        if shortest < least:
            raise MemtrainError(
                f"{name}: sequences of {shortest} tokens are too short, "
                f"{name}.dynamics_steps needs at least {least}; lower it"
            )
        for length in () if self.task.stream else shorter:
            try:
                task = check_task(self.task.of_length(length))
            except MemtrainError as error:
                raise MemtrainError(f"{name}.curriculum={length}: {error}") from None
            if (task.sequence_length, task.space) != (length, self.task.space):
                raise MemtrainError(
                    f"{name}.curriculum={length}: {type(task).__name__}.of_length({length}) gives "
                    f"sequences of {task.sequence_length} tokens of {task.space}, must be "
                    f"{length} tokens of {self.task.space}"
                )
