"""The task contract: anything that makes batches of sequences can be learned."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from memtrain.data.spelling import Spelling
from memtrain.errors import MemtrainError
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
    spelling: Spelling | None = None
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

    def windows(self, length: int, from_nothing: int = 0) -> "Task":
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
    """Return the task if it keeps the contract; say in words which rule it breaks if not."""
    name = type(task).__name__
    if not isinstance(task, Task):
        raise MemtrainError(f"{name}: a task must be a subclass of memtrain.Task")
    for attribute in ("vocab_size", "sequence_length"):
        value = getattr(task, attribute, None)
        if not isinstance(value, int) or value < 1:
            raise MemtrainError(f"{name}.{attribute}={value!r}: must be a whole number above 0")
    few = _checked_sample(task, 3)
    again = _checked_sample(task, 3)
    if not few.inputs.equal(again.inputs) or not few.targets.equal(again.targets):
        raise MemtrainError(
            f"{name}.sample(3, generator): equal generators gave other sequences; draw from the "
            "generator alone, or a resumed run would differ"
        )
    # Where targets are rare, three sequences may have none.
    if not _asks(few) and not _asks(_checked_sample(task, MANY)):
        raise MemtrainError(
            f"{name}.sample({MANY}): all targets are IGNORE_INDEX ({IGNORE_INDEX}), so nothing is "
            f"asked; at least one must be in 0..{task.vocab_size - 1}"
        )
    return task


def _asks(batch: Batch) -> bool:
    return bool((batch.targets != IGNORE_INDEX).any())


def _checked_sample(task: Task, count: int) -> Batch:
    """So many sequences of the task's, if they keep the contract."""
    name = type(task).__name__
    try:
        batch = task.sample(count, torch.Generator(task.device).manual_seed(0))
    except MemtrainError:
        raise
    except Exception as error:  # the user's code: any error is a broken contract
        said = str(error).strip().partition("\n")[0]
        raise MemtrainError(
            f"{name}.sample({count}, generator) raised {type(error).__name__}{said and ': ' + said}"
        ) from error
    if not isinstance(batch, Batch):
        raise MemtrainError(f"{name}.sample: must return a memtrain.Batch, not {type(batch)}")
    shape = (count, task.sequence_length)
    for role, tokens in (("inputs", batch.inputs), ("targets", batch.targets)):
        if not isinstance(tokens, Tensor):
            raise MemtrainError(
                f"{name}.sample({count}): {role} must be a torch.Tensor, "
                f"not {type(tokens).__name__}; torch.tensor(...) makes one"
            )
        if tuple(tokens.shape) != shape or tokens.dtype != torch.long:
            raise MemtrainError(
                f"{name}.sample({count}): {role} must be int64 of shape {shape}, "
                f"not {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        allowed = (tokens >= 0) & (tokens < task.vocab_size)
        if role == "targets":
            allowed |= tokens == IGNORE_INDEX
        if not bool(allowed.all()):
            bad = int(tokens[~allowed][0])
            raise MemtrainError(
                f"{name}.sample: {role} contain {bad}, outside 0..{task.vocab_size - 1}"
                + (f" and not IGNORE_INDEX ({IGNORE_INDEX})" if role == "targets" else "")
            )
    return batch
