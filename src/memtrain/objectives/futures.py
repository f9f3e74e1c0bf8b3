"""From sequences to windows: the timesteps to train, and the future of each."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.objectives.base import WHOLE_BATCH, BatchShard
from memtrain.objectives.losses import decode_loss
from memtrain.shapes import IGNORE_INDEX, Batch, Window


def gather_window(batch: Batch, steps: Int[Tensor, "B S"], future_length: int) -> Window:
    """What the memories made after `steps` have to predict.

    A future that reaches beyond its sequence, at either end, has IGNORE_INDEX there.
    The inputs there are arbitrary, since the decoder is causal and nothing reads them.
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
    """Where each row has targets, and these targets; rows with fewer are filled up with others.

    A is the largest number of targets in a row. Reading it stalls a GPU, so this is for the CPU.
    """
    asked = targets != IGNORE_INDEX
    most = max(1, int(asked.sum(dim=1).max()))
    positions = asked.int().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return positions, targets.gather(1, positions)


def readout_loss(
    rnn: RNN,
    memories: Float[Tensor, "B T M D"],
    targets: Int[Tensor, "B T"],
    shard: BatchShard = WHOLE_BATCH,
) -> Float[Tensor, ""]:
    """L^dec of the RNN's readout.

    On the CPU only memories at which a target is due are read out; to find these would stall a
    GPU, which reads out all of them.
    """
    if targets.device.type == "cpu":
        asked = targets != IGNORE_INDEX
        memories, targets = memories[asked], targets[asked]
    return decode_loss(rnn.predict(memories), targets, shard)


class DecodedFutures(NamedTuple):
    """What the teacher's decoder tells of the futures of N memories, and what they were."""

    logits: Float[Tensor, "N A V"]
    targets: Int[Tensor, "N A"]
    first: Int[Tensor, "N _"]
    """The targets again, but only each memory's first: it has to tell that unaided."""

    def loss(self, shard: BatchShard = WHOLE_BATCH) -> Float[Tensor, ""]:
        """L^dec of all of them."""
        return decode_loss(self.logits, self.targets, shard)

    def next_loss(self, shard: BatchShard = WHOLE_BATCH) -> Float[Tensor, ""]:
        """L^dec of the first ones."""
        return decode_loss(self.logits[:, : self.first.shape[1]], self.first, shard)


def decode_futures(
    teacher: Teacher,
    batch: Batch,
    memory: Float[Tensor, "B S M D"],
    steps: Int[Tensor, "B S"],
    future_length: int,
) -> DecodedFutures:
    """Ask the teacher's decoder for the futures of memories that were made after `steps`."""
    window = gather_window(batch, steps, future_length)
    inputs, targets = window.future_inputs.flatten(0, 1), window.future_targets.flatten(0, 1)
    positions, first = None, targets[:, :1]
    if targets.device.type == "cpu":
        positions, targets = target_positions(targets)
        first = targets.where(positions == 0, IGNORE_INDEX)
    return DecodedFutures(teacher.decode(memory.flatten(0, 1), inputs, positions), targets, first)
