"""The task contract: anything that makes batches of sequences can be learned."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from memtrain.config import Custom, DataConfig, Digits, LabelFile, Series, Stream
from memtrain.config.validation import load_class, preserve_rng_state
from memtrain.data.codec import TokenCodec
from memtrain.data.token_file import TokenFile
from memtrain.errors import MemtrainError, describe_error
from memtrain.shapes import IGNORE_INDEX, Batch, Space, Values, has_target

CHECKED = 256
"""Of this many sequences at least one must have a target."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training data as one stream of tokens, for n-gram models."""

    tokens: Integer[Tensor, " N"] | TokenFile
    vocab_size: int
    unit: str
    width: int | None = None
    """Tokens in a row of an image, if documents are images."""
    document_length: int | None = None
    """Tokens in every document, if all have the same length."""

    @property
    def device(self) -> torch.device:
        """Where blocks of tokens are; those of a file are read into memory."""
        return self.tokens.device if isinstance(self.tokens, Tensor) else torch.device("cpu")

    def block(self, first: int, last: int) -> Int[Tensor, " N"]:
        """The tokens first..last-1."""
        return torch.as_tensor(self.tokens[first:last]).long()


class Task(ABC):
    """A source of sequences of one length.

    Your own task sets two numbers and implements `sample`:

        class Parity(Task):
            vocab_size, sequence_length = 2, 24

            def sample(self, count, generator):
                bits = torch.randint(2, (count, 24), generator=generator)
                return Batch(bits, bits.cumsum(1) % 2)
    """

    vocab_size: int = 0
    """Inputs and targets are 0..vocab_size-1; a target may also be IGNORE_INDEX."""
    values: Values | None = None
    """What sequences consist of, if that is numbers: inputs (count, T, X), targets (count, T, Y),
    float32, NaN where a number is missing. The default: tokens."""
    sequence_length: int
    """Tokens or steps in a sequence."""
    unit: str = "target"
    """The name of one target in results, as in "nats per pixel"."""
    stream: bool = False
    """Whether it is one long sequence, of which `windows` samples pieces of any length."""
    identity: str = ""
    """Identifies the data; empty if sequences are generated as they are sampled."""
    spelling: TokenCodec | None = None
    """The meaning of the tokens, if a model can generate them; None for question answering."""

    in_background: bool = False
    """Whether `sample` takes long and returns a batch in the CPU's memory, as when it reads files:
    then a background thread calls it while the step before is computed."""
    placement: str = ""
    """Where the data is during training, in words for the log."""

    @property
    def space(self) -> Space:
        """The size of the vocabulary, or the values."""
        return self.vocab_size if self.values is None else self.values

    @property
    def loss_name(self) -> str:
        """What losses are called in results: "nats", or "pinball loss" of predicted quantiles."""
        quantiles = self.values is not None and self.values.likelihood == "quantile"
        return "pinball loss" if quantiles else "nats"

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Sample training sequences; the generator is the only source of randomness."""

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        """Sample sequences for evaluation. Tasks with finite data must override this."""
        return self.sample(count, generator)

    def target_bytes(self, targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"] | None:
        """The bytes of text that each target stands for; None if the targets are no text."""
        return None

    def corpus(self) -> Corpus | None:
        """All training data as one stream; None if sequences are generated."""
        return None

    @property
    def device(self) -> torch.device:
        """Where batches are sampled; the generator must be on this device."""
        return torch.device("cpu")

    def to(self, device: torch.device) -> "Task":
        """Move the data to the model's device, if that saves copies later."""
        return self

    def windows(self, length: int, empty_start_rows: int = 0) -> "Task":
        """The same data in sequences of this length, if it is a stream.

        The first `empty_start_rows` sequences of a batch are read from the empty memory.
        """
        return self

    def of_length(self, length: int) -> "Task":
        """The same task in sequences of another length, for a curriculum (`smt.curriculum`).

        Raises:
            MemtrainError: it has no sequences of that length.
        """
        raise MemtrainError(
            f"all sequences of {type(self).__name__} have {self.sequence_length} tokens; leave the "
            "curriculum out, or define of_length(length) if the task is yours"
        )

    def describe(self, inputs: list[int], targets: list[int]) -> str:
        """One sequence as readable text."""
        answers = " ".join("·" if y == IGNORE_INDEX else str(y) for y in targets)
        return f"x  {' '.join(map(str, inputs))}\ny  {answers}"

    def held_out_images(self, count: int, generator: torch.Generator) -> Int[Tensor, "B L"] | None:
        """Complete images for evaluation, as tokens, after the token of their class if images
        have one; None if the task has none."""
        return None


def check_task(task: object) -> Task:
    """Return the task if it keeps the contract.

    Raises:
        MemtrainError: it breaks a rule; the message names the rule and the value found.
    """
    name = type(task).__name__
    if isinstance(task, type) and issubclass(task, Task):
        raise MemtrainError(f"{task.__name__}: is a class; pass an instance, {task.__name__}(...)")
    if not isinstance(task, Task):
        raise MemtrainError(f"{name}: a task must be a subclass of memtrain.Task")
    if not isinstance(task.values, Values | None):
        raise MemtrainError(f"{name}.values={task.values!r}: must be a memtrain.Values")
    if task.values is not None and task.vocab_size:
        raise MemtrainError(
            f"{name}.vocab_size={task.vocab_size}: must be left out, since values={task.values}"
        )
    for attribute in ("vocab_size", "sequence_length")[task.values is not None :]:
        value = getattr(task, attribute, None)
        if not isinstance(value, int) or value < 1:
            hint = "; or values=memtrain.Values(...)" if attribute == "vocab_size" else ""
            raise MemtrainError(
                f"{name}.{attribute}={value!r}: must be a whole number above 0{hint}"
            )
    if hasattr(task, "held_out_pictures"):
        message = f"{name}.held_out_pictures is called held_out_images now; rename it"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        task.held_out_images = task.held_out_pictures  # pyright: ignore
    with preserve_rng_state():
        few = _checked_batch(task, "sample", 3)
        # Where targets are rare, three sequences may have none.
        if not _has_target(few) and not _has_target(_checked_batch(task, "sample", CHECKED)):
            ignored, needed = f"IGNORE_INDEX ({IGNORE_INDEX})", f"in 0..{task.vocab_size - 1}"
            if task.values is not None:
                ignored, needed = "NaN", "a number"
            raise MemtrainError(
                f"{name}.sample({CHECKED}): all targets are {ignored}, so there is nothing to "
                f"learn; at least one must be {needed}"
            )
        _check_reproducible(task, "sample", few)
        if type(task).held_out is not Task.held_out:
            _check_reproducible(task, "held_out", _checked_batch(task, "held_out", 3))
    return task


def _has_target(batch: Batch) -> bool:
    return bool(has_target(batch.targets).any())


def _check_reproducible(task: Task, method: str, first: Batch) -> None:
    """Equal generators must give equal batches, or a resumed run would differ."""
    second = _checked_batch(task, method, len(first.inputs))
    pairs = (first.inputs, second.inputs), (first.targets, second.targets)
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        raise MemtrainError(
            f"{type(task).__name__}.{method}: two calls with equally seeded generators differ, so "
            "a resumed run would differ; sample with generator=generator only, and keep "
            "no state between calls"
        )


def _checked_batch(task: Task, method: str, count: int) -> Batch:
    """Sequences from `sample` or `held_out`, checked against the contract."""
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
        if task.values is not None:
            width = task.values.features if role == "inputs" else task.values.targets
            _check_values(f"{name}({count}): {role}", tokens, (*shape, width))
            continue
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


def _check_values(name: str, numbers: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(numbers.shape) != shape or numbers.dtype != torch.float32:
        raise MemtrainError(
            f"{name} must be float32 of shape {shape}, "
            f"not {numbers.dtype} of shape {tuple(numbers.shape)}"
        )
    if bool(numbers.isinf().any()):
        raise MemtrainError(f"{name} contain infinity; they must be finite, or NaN where missing")


def build_task(config: DataConfig) -> Task:
    """Build the task that a config names; the user's own task is checked against the contract."""
    # These modules import this one.
    from memtrain.data.digits import DigitsTask
    from memtrain.data.labels import LabelsTask
    from memtrain.data.series import SeriesTask
    from memtrain.data.stream import StreamTask
    from memtrain.data.synthetic import TASKS

    if isinstance(config, Digits):
        return DigitsTask(config)
    if isinstance(config, Stream):
        return StreamTask.from_config(config)
    if isinstance(config, LabelFile):
        return LabelsTask.from_config(config)
    if isinstance(config, Series):
        return SeriesTask.from_config(config)
    if isinstance(config, Custom):
        task_class = load_class(config.path, "data.path")
        try:
            task = task_class(**config.options)
        except MemtrainError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise MemtrainError(f"data.path={config.path}: cannot be built: {reason}") from error
        return check_task(task)
    return TASKS[type(config)](config)
