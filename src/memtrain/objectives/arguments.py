"""Checks of what a user's own loop passes to an objective."""

from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor, nn

from memtrain.config import StageConfig
from memtrain.config.validation import config_from
from memtrain.errors import MemtrainError
from memtrain.models.check_cell import memory_shape
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.shapes import IGNORE_INDEX, Batch, Space, Values, free_to_read, named

Stage = TypeVar("Stage", bound=StageConfig)


def stage_settings(kind: type[Stage], config: Stage | None, settings: dict) -> Stage:
    """The settings of an objective: a config, or fields of one by name.

    Raises:
        MemtrainError: there is no such field, or it is about the loop and the optimizer.
    """
    for name in (one.name for one in fields(StageConfig)):
        if name in settings:
            raise MemtrainError(
                f"{name}={settings[name]!r}: must be left out; in your own loop, steps, batches "
                "and the optimizer are yours"
            )
    return config_from(kind, config, settings)


def check_models(objective: nn.Module, teacher: object, rnn: object) -> None:
    """Refuse models that do not belong together; `teacher` is None where none is needed."""
    name = type(objective).__name__
    order = f"{name}(rnn)" if teacher is None else f"{name}(teacher, rnn)"
    wanted = {"rnn": (rnn, RNN)} if teacher is None else {"teacher": (teacher, Teacher)}
    for role, (model, kind) in (wanted | {"rnn": (rnn, RNN)}).items():
        if not isinstance(model, kind):
            raise MemtrainError(
                f"{role}={_type(model)}: must be a memtrain.{kind.__name__}; it is {order}"
            )
    if not isinstance(teacher, Teacher) or not isinstance(rnn, RNN):
        return
    shapes = (teacher.memory_tokens, teacher.memory_dim), memory_shape(rnn.cell)
    if shapes[0] != shapes[1]:
        tokens, dim = shapes[1]
        raise MemtrainError(
            f"teacher: its memory is {shapes[0]}, that of the cell {shapes[1]}; they must be "
            f"equal: Teacher(memory_tokens={tokens}, memory_dim={dim}, ...)"
        )
    if teacher.space != rnn.space:
        raise MemtrainError(
            f"teacher: its {_space(teacher.space)}, that of the rnn is {_space(rnn.space)}; "
            "they must be equal"
        )


def check_readout(teacher: Teacher, rnn: RNN) -> None:
    """Refuse a readout that the teacher's decoder cannot be copied into."""
    own, other = (
        {name: tuple(p.shape) for name, p in decoder.named_parameters()}
        for decoder in (rnn.readout, teacher.decoder)
    )
    if own != other:
        first = next(name for name in own | other if own.get(name) != other.get(name))
        raise MemtrainError(
            f"rnn: its readout differs from the teacher's decoder, {first} is {own.get(first)} and "
            f"{other.get(first)}; SMT copies the decoder into it: make the rnn as RNN(cell, "
            "teacher)"
        )


def checked_batch(rnn: RNN, tokens: object, targets: object = None) -> Batch:
    """Sequences and targets as a batch; targets are the next tokens unless given.

    Raises:
        MemtrainError: they are not what the model takes. On a GPU, values are not checked: reading
            them would make every step wait.
    """
    if isinstance(tokens, Batch):
        if targets is not None:
            raise MemtrainError("targets: must be left out; the Batch has its own")
        tokens, targets = tokens.inputs, tokens.targets
    rnn.check_tokens("tokens", tokens)
    assert isinstance(tokens, Tensor)
    if isinstance(rnn.space, Values):
        return _batch_of_values(tokens, targets, rnn.space)
    tokens = tokens.long()
    if targets is None:
        if tokens.shape[1] < 2:
            raise MemtrainError(
                f"tokens={tuple(tokens.shape)}: must have at least 2 tokens per sequence, to "
                "predict the next one; or pass targets=..."
            )
        end = tokens.new_full((len(tokens), 1), IGNORE_INDEX)
        return Batch(tokens, torch.cat([tokens[:, 1:], end], dim=1))
    return Batch(tokens, _check_targets(targets, tokens, rnn.vocab_size))


def _batch_of_values(inputs: Tensor, targets: object, values: Values) -> Batch:
    """Sequences of numbers and their targets, by default the first numbers of the next input."""
    if targets is None:
        if inputs.shape[1] < 2:
            raise MemtrainError(
                f"tokens={tuple(inputs.shape)}: must have at least 2 steps per sequence, to "
                "predict the next one; or pass targets=..."
            )
        end = inputs.new_full((len(inputs), 1, values.targets), torch.nan)
        return Batch(inputs, torch.cat([inputs[:, 1:, : values.targets], end], dim=1))
    needed = (*inputs.shape[:2], values.targets)
    if not isinstance(targets, Tensor) or tuple(targets.shape) != needed:
        found = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise MemtrainError(
            f"targets={found}: must be a tensor of shape {needed}, with NaN where there is no "
            "target"
        )
    if not targets.is_floating_point():
        raise MemtrainError(f"targets={targets.dtype}: must be floats; pass targets.float()")
    _check_device(targets, inputs)
    if free_to_read(targets):
        if bool(targets.isnan().all()):
            raise MemtrainError("targets=NaN everywhere: at least one must be a number")
        if bool(targets.isinf().any()):
            raise MemtrainError("targets: contain infinity; they must be finite, or NaN")
    return Batch(inputs, targets)


def _space(space: Space) -> str:
    name, value = next(iter(named(space).items()))
    return f"{name}={value}"


def _check_targets(targets: object, tokens: Tensor, vocab_size: int) -> Tensor:
    if not isinstance(targets, Tensor) or targets.shape != tokens.shape:
        found = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise MemtrainError(
            f"targets={found}: must be a tensor of the shape of tokens, {tuple(tokens.shape)}, "
            f"with {IGNORE_INDEX} where there is no target"
        )
    if targets.dtype not in (torch.long, torch.int32):
        raise MemtrainError(f"targets={targets.dtype}: must be int64; pass targets.long()")
    _check_device(targets, tokens)
    if free_to_read(targets):
        there = targets != IGNORE_INDEX
        if not bool(there.any()):
            raise MemtrainError(
                f"targets={IGNORE_INDEX} everywhere: at least one must be in 0..{vocab_size - 1}, "
                "or there is nothing to learn"
            )
        outside = there & ((targets < 0) | (targets >= vocab_size))
        if bool(outside.any()):
            raise MemtrainError(
                f"targets={int(targets[outside][0])}: must be in 0..{vocab_size - 1}, or "
                f"{IGNORE_INDEX} where there is no target"
            )
    return targets.long()


def _check_device(targets: Tensor, inputs: Tensor) -> None:
    if targets.device != inputs.device:
        raise MemtrainError(
            f"targets: must be on {inputs.device}, as tokens are, not on {targets.device}; "
            f"targets.to({str(inputs.device)!r})"
        )


def check_generator(generator: object) -> torch.Generator:
    """The generator, or torch's global one."""
    if generator is None:
        return torch.default_generator
    if not isinstance(generator, torch.Generator):
        hint = "; targets are passed by name, targets=..." if isinstance(generator, Tensor) else ""
        raise MemtrainError(
            f"generator={_type(generator)}: must be a torch.Generator, or left out{hint}"
        )
    return generator


def _type(thing: object) -> str:
    return f"{thing.__name__} (a class)" if isinstance(thing, type) else type(thing).__name__
