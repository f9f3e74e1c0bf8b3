"""From a data config to its task."""

from memtrain.config import Custom, DataConfig, Digits, Stream
from memtrain.config.user_code import load_class
from memtrain.data.digits import DigitsTask
from memtrain.data.stream import StreamTask
from memtrain.data.synthetic import TASKS
from memtrain.data.task import Task, check_task
from memtrain.errors import MemtrainError


def build_task(config: DataConfig) -> Task:
    """The task a config names; a task of the user's is checked against the contract."""
    if isinstance(config, Digits):
        return DigitsTask(config)
    if isinstance(config, Stream):
        return StreamTask.from_config(config)
    if isinstance(config, Custom):
        task_class = load_class(config.path, "data.path")
        try:
            task = task_class(**config.options)
        except MemtrainError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise MemtrainError(f"data.path={config.path}: its making fails: {said}") from error
        return check_task(task)
    return TASKS[type(config)](config)
