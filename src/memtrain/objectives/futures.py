"""The future of a timestep, and the losses of models that predict it."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.losses import decode_loss
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.objectives.base import WHOLE_BATCH, BatchShard
from memtrain.shapes import IGNORE_INDEX, Batch, Window


def gather_window(batch: Batch, steps: Int[Tensor, "B S"], future_length: int) -> Window:
    """The futures that the memories after `steps` have to predict.

    Targets beyond either end of a sequence are IGNORE_INDEX. Inputs there are arbitrary: the
    decoder is causal, so no target depends on them.
    """
    length = batch.inputs.shape[1]
    future_length = min(future_length, length)
    due = steps[..., None] + torch.arange(future_length, device=steps.device)  # (B, S, F)
    rows = torch.arange(len(steps), device=steps.device)[:, None, None]
    inside = (due >= 0) & (due < length)
    due = due.clamp(0, length - 1)
    targets = batch.targets[rows, due].where(inside, IGNORE_INDEX)
    return Window(batch.inputs[rows, due[..., 1:]], targets)


def target_positions(
    targets: Int[Tensor, "N F"],
) -> tuple[Int[Tensor, "N A"], Int[Tensor, "N A"]]:
    """The positions of each row's targets, and these targets; shorter rows are padded.

    A is the largest number of targets per row. Reading it would stall a GPU: for the CPU only.
    """
    has_target = targets != IGNORE_INDEX
    most = max(1, int(has_target.sum(dim=1).max()))
    positions = has_target.int().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return positions, targets.gather(1, positions)


def readout_loss(
    rnn: RNN,
    memories: Float[Tensor, "B T M D"],
    targets: Int[Tensor, "B T"],
    shard: BatchShard = WHOLE_BATCH,
) -> Float[Tensor, ""]:
    """L^dec of the RNN's readout.

    On the CPU, only memories that have a target are read out; finding them would stall a GPU, which
    reads out all.
    """
    if targets.device.type == "cpu":
        has_target = targets != IGNORE_INDEX
        memories, targets = memories[has_target], targets[has_target]
    return decode_loss(rnn.predict(memories), targets, shard)


class DecodedFutures(NamedTuple):
    """The teacher's predictions of the futures of N memories, and the targets."""

    logits: Float[Tensor, "N A V"]
    targets: Int[Tensor, "N A"]
    first: Int[Tensor, "N _"]
    """Only each memory's first target, which is predicted from the memory alone."""

    def loss(self, shard: BatchShard = WHOLE_BATCH) -> Float[Tensor, ""]:
        """L^dec of all targets."""
        return decode_loss(self.logits, self.targets, shard)

    def next_loss(self, shard: BatchShard = WHOLE_BATCH) -> Float[Tensor, ""]:
        """L^dec of the first targets."""
        return decode_loss(self.logits[:, : self.first.shape[1]], self.first, shard)


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
    if targets.device.type == "cpu":
        positions, targets = target_positions(targets)
        first = targets.where(positions == 0, IGNORE_INDEX)
    return DecodedFutures(teacher.decode(memory.flatten(0, 1), inputs, positions), targets, first)
