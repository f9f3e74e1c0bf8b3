"""The task contract: anything that makes batches of sequences can be learned."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from memtrain.config import Custom, DataConfig, Digits, Stream
from memtrain.config.validation import load_class, preserve_rng_state
from memtrain.data.codec import TokenCodec
from memtrain.errors import MemtrainError, describe_error
from memtrain.shapes import IGNORE_INDEX, Batch

MANY = 256
"""Sequences of which at least one must have a target."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training data as one stream of tokens, for count models."""

    tokens: Integer[Tensor, " N"]
    vocab_size: int
    unit: str
    width: int | None = None
    """Tokens in a row of a picture, if documents are pictures."""
    document_length: int | None = None
    """Tokens in every document, if they all have as many."""


class Task(ABC):
    """A source of sequences, all of one length.

    A task of your own sets the two numbers and writes `sample`:

        class Parity(Task):
            vocab_size, sequence_length = 2, 24

            def sample(self, count, generator):
                bits = torch.randint(2, (count, 24), generator=generator)
                return Batch(bits, bits.cumsum(1) % 2)
    """

    vocab_size: int
    """Inputs and targets are 0..vocab_size-1; a target may also be IGNORE_INDEX."""
    sequence_length: int
    """Tokens in a sequence."""
    unit: str = "target"
    """What one target is called in results: nats a target, nats a pixel."""
    stream: bool = False
    """Whether it has no sequences of its own: `windows` draws some of any length."""
    identity: str = ""
    """By which data is told from other data; empty if sequences are made as they are drawn."""
    spelling: TokenCodec | None = None
    """What the tokens spell, if a model that learned them can write; None: it answers."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw training sequences; the generator is the only source of chance."""

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        """Draw sequences for evaluation. Fresh draws are held out; finite data must override."""
        return self.sample(count, generator)

    def corpus(self) -> Corpus | None:
        """All training data as one stream; None if sequences are made as they are drawn."""
        return None

    @property
    def device(self) -> torch.device:
        """Where batches are drawn, and so where the generator has to be."""
        return torch.device("cpu")

    def to(self, device: torch.device) -> "Task":
        """Put the data where the model is, if that spares work later."""
        return self

    def windows(self, length: int, empty_start_rows: int = 0) -> "Task":
        """The same data in sequences of this length, if it has no length of its own.

        The first `from_nothing` sequences of a batch are read from the empty memory.
        """
        return self

    def describe(self, inputs: list[int], targets: list[int]) -> str:
        """One sequence as text for a person."""
        asked = " ".join("·" if y == IGNORE_INDEX else str(y) for y in targets)
        return f"x  {' '.join(map(str, inputs))}\ny  {asked}"

    def held_out_pictures(
        self, count: int, generator: torch.Generator
    ) -> Int[Tensor, "B L"] | None:
        """Whole pictures for evaluation, as tokens; None if the task has none."""
        return None


def check_task(task: object) -> Task:
    """Return the task if it keeps the contract.

    Raises:
        MemtrainError: says in words which rule is broken, and what was seen.
    """
    name = type(task).__name__
    if isinstance(task, type) and issubclass(task, Task):
        raise MemtrainError(f"{task.__name__}: is a class; pass an instance, {task.__name__}(...)")
    if not isinstance(task, Task):
        raise MemtrainError(f"{name}: a task must be a subclass of memtrain.Task")
    for attribute in ("vocab_size", "sequence_length"):
        value = getattr(task, attribute, None)
        if not isinstance(value, int) or value < 1:
            raise MemtrainError(f"{name}.{attribute}={value!r}: must be a whole number above 0")
    with preserve_rng_state():
        few = _checked_batch(task, "sample", 3)
        # Where targets are rare, three sequences may have none.
        if not _asks(few) and not _asks(_checked_batch(task, "sample", MANY)):
            raise MemtrainError(
                f"{name}.sample({MANY}): all targets are IGNORE_INDEX ({IGNORE_INDEX}), so nothing "
                f"is asked; at least one must be in 0..{task.vocab_size - 1}"
            )
        _check_chance(task, "sample", few)
        if type(task).held_out is not Task.held_out:
            _check_chance(task, "held_out", _checked_batch(task, "held_out", 3))
    return task


def _asks(batch: Batch) -> bool:
    return bool((batch.targets != IGNORE_INDEX).any())


def _check_chance(task: Task, method: str, first: Batch) -> None:
    """The generator decides what is drawn: a resumed run has to draw what the whole one did."""
    second = _checked_batch(task, method, len(first.inputs))
    if not (
        torch.equal(first.inputs, second.inputs) and torch.equal(first.targets, second.targets)
    ):
        raise MemtrainError(
            f"{type(task).__name__}.{method}: two calls with equally seeded generators differ, so "
            "a resumed run would differ; draw with generator=generator alone, and keep nothing "
            "between calls"
        )


def _checked_batch(task: Task, method: str, count: int) -> Batch:
    """Some sequences of the task's, by `sample` or `held_out`, if they keep the contract."""
    name = f"{type(task).__name__}.{method}"
    generator = torch.Generator(task.device).manual_seed(0)
    try:
        batch = getattr(task, method)(count, generator)
    except MemtrainError:
        raise
    except Exception as error:  # the user's code: any error is a broken contract
        raise MemtrainError(f"{name}({count}, generator) raised {describe_error(error)}") from error
    if not isinstance(batch, Batch):
        raise MemtrainError(
            f"{name}: must return memtrain.Batch(inputs, targets), not {type(batch).__name__}"
        )
    shape = (count, task.sequence_length)
    for role, tokens in (("inputs", batch.inputs), ("targets", batch.targets)):
        if not isinstance(tokens, Tensor):
            raise MemtrainError(
                f"{name}({count}): {role} must be a torch.Tensor, "
                f"not {type(tokens).__name__}; torch.tensor(...) makes one"
            )
        if tuple(tokens.shape) != shape or tokens.dtype != torch.long:
            raise MemtrainError(
                f"{name}({count}): {role} must be int64 of shape {shape}, "
                f"not {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        allowed = (tokens >= 0) & (tokens < task.vocab_size)
        if role == "targets":
            allowed |= tokens == IGNORE_INDEX
        if not bool(allowed.all()):
            bad = int(tokens[~allowed][0])
            raise MemtrainError(
                f"{name}: {role} contain {bad}, outside 0..{task.vocab_size - 1}"
                + (f" and not IGNORE_INDEX ({IGNORE_INDEX})" if role == "targets" else "")
            )
    return batch


def build_task(config: DataConfig) -> Task:
    """The task a config names; a task of the user's is checked against the contract."""
    # These modules import this one.
    from memtrain.data.digits import DigitsTask
    from memtrain.data.stream import StreamTask
    from memtrain.data.synthetic import TASKS

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
