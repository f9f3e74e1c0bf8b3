"""The future of a timestep, and the losses of models that predict it."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.losses import decode_loss, value_loss
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.objectives.large_vocabulary import LargeLogits, has_many_logits
from memtrain.shapes import (
    IGNORE_INDEX,
    WHOLE_BATCH,
    Batch,
    BatchShard,
    Space,
    Targets,
    Values,
    Window,
    at_steps,
    free_to_read,
    has_target,
    keep_targets,
)


def gather_window(batch: Batch, steps: Int[Tensor, "B S"], future_length: int) -> Window:
    """The futures that the memories after `steps` have to predict.

    Beyond either end of a sequence there are no targets. Inputs there are arbitrary: the
    decoder is causal, so no target depends on them.
    """
    length = batch.inputs.shape[1]
    future_length = min(future_length, length)
    due = steps[..., None] + torch.arange(future_length, device=steps.device)  # (B, S, F)
    rows = torch.arange(len(steps), device=steps.device)[:, None, None]
    inside = (due >= 0) & (due < length)
    due = due.clamp(0, length - 1)
    targets = keep_targets(batch.targets[rows, due], inside)
    return Window(batch.inputs[rows, due[..., 1:]], targets)


def target_positions(
    targets: Int[Tensor, "N F"] | Float[Tensor, "N F Y"],
) -> tuple[Int[Tensor, "N A"], Int[Tensor, "N A"] | Float[Tensor, "N A Y"]]:
    """The positions of each row's targets, and these targets; shorter rows are padded.

    A is the largest number of targets per row. Reading it would stall a GPU: for the CPU only.
    """
    there = has_target(targets)
    most = max(1, int(there.sum(dim=1).max()))
    positions = there.int().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return positions, at_steps(targets, positions)


def prediction_loss(
    outputs: Float[Tensor, "*rows V"] | LargeLogits,
    targets: Tensor,
    space: Space,
    shard: BatchShard = WHOLE_BATCH,
) -> Float[Tensor, ""]:
    """L^dec of tokens or of numbers."""
    if isinstance(outputs, LargeLogits):
        total = shard.sum(outputs.cross_entropy(targets))
        return total / shard.sum((targets != IGNORE_INDEX).sum()).clamp(min=1)
    if isinstance(space, Values):
        return value_loss(outputs, targets, space.likelihood, shard)
    return decode_loss(outputs, targets, shard)


def readout_loss(
    rnn: RNN,
    memories: Float[Tensor, "B T M D"],
    targets: Targets,
    shard: BatchShard = WHOLE_BATCH,
) -> Float[Tensor, ""]:
    """L^dec of the RNN's readout.

    On the CPU, only memories that have a target are read out; finding them would stall a GPU, which
    reads out all.
    """
    if free_to_read(targets):
        there = has_target(targets)
        memories, targets = memories[there], targets[there]
    many = has_many_logits(targets.numel(), rnn.space, targets.device)
    outputs = rnn.predict(memories, hidden=many)
    if many:
        outputs = LargeLogits(outputs, rnn.readout)
    return prediction_loss(outputs, targets, rnn.space, shard)


def encode_and_predict(
    teacher: Teacher, batch: Batch, steps: Int[Tensor, "B S"]
) -> tuple[Float[Tensor, "B S M D"], Float[Tensor, "B T V"] | LargeLogits]:
    """The memories after `steps`, and the predictions of every token's target by the encoder."""
    many = has_many_logits(batch.targets.numel(), teacher.space, batch.targets.device)
    memory, outputs = teacher.encode_with_logits(batch.inputs, steps, hidden=many)
    return memory, LargeLogits(outputs, teacher.decoder) if many else outputs


class DecodedFutures(NamedTuple):
    """The teacher's predictions of the futures of N memories, and the targets."""

    outputs: Float[Tensor, "N A V"] | LargeLogits
    targets: Int[Tensor, "N A"] | Float[Tensor, "N A Y"]
    first: Int[Tensor, "N _"] | Float[Tensor, "N _ Y"]
    """Only each memory's first target, which is predicted from the memory alone."""
    space: Space

    def loss(self, shard: BatchShard = WHOLE_BATCH) -> Float[Tensor, ""]:
        """L^dec of all targets."""
        return prediction_loss(self.outputs, self.targets, self.space, shard)

    def next_loss(self, shard: BatchShard = WHOLE_BATCH) -> Float[Tensor, ""]:
        """L^dec of the first targets."""
        outputs = self.outputs[:, : self.first.shape[1]]
        return prediction_loss(outputs, self.first, self.space, shard)


def decode_futures(
    teacher: Teacher,
    batch: Batch,
    memory: Float[Tensor, "B S M D"],
    steps: Int[Tensor, "B S"],
    future_length: int,
) -> DecodedFutures:
    """Decode the futures of memories that were made after `steps`."""
    window = gather_window(batch, steps, future_length)
    inputs, targets = window.future_inputs.flatten(0, 1), window.future_targets.flatten(0, 1)
    positions, first = None, targets[:, :1]
    if free_to_read(targets):
        positions, targets = target_positions(targets)
        first = keep_targets(targets, positions == 0)
    many = has_many_logits(targets.numel(), teacher.space, targets.device)
    outputs = teacher.decode(memory.flatten(0, 1), inputs, positions, hidden=many)
    if many:
        outputs = LargeLogits(outputs, teacher.decoder)
    return DecodedFutures(outputs, targets, first, teacher.space)
