"""One pure function an equation of the paper."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.objectives.futures import gather_window, target_positions
from memtrain.objectives.sharding import WHOLE, BatchShard
from memtrain.shapes import IGNORE_INDEX, Batch


def decode_loss(
    logits: Float[Tensor, "*rows V"], targets: Int[Tensor, "*rows"], part: BatchShard = WHOLE
) -> Float[Tensor, ""]:
    """L^dec: cross-entropy in nats, the mean over all positions that carry a target."""
    logits, targets = logits.flatten(0, -2).float(), targets.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return part.sum(total) / part.sum((targets != IGNORE_INDEX).sum()).clamp(min=1)


def readout_loss(
    rnn: RNN,
    memories: Float[Tensor, "B T M D"],
    targets: Int[Tensor, "B T"],
    part: BatchShard = WHOLE,
) -> Float[Tensor, ""]:
    """L^dec of the RNN's readout.

    On the CPU only memories at which a target is due are read out; to find these would stall a
    GPU, which reads out all of them.
    """
    if targets.device.type == "cpu":
        asked = targets != IGNORE_INDEX
        memories, targets = memories[asked], targets[asked]
    return decode_loss(rnn.predict(memories), targets, part)


class DecodedFutures(NamedTuple):
    """What the teacher's decoder tells of the futures of N memories, and what they were."""

    logits: Float[Tensor, "N A V"]
    targets: Int[Tensor, "N A"]
    first: Int[Tensor, "N _"]
    """The targets again, but only each memory's first: it has to tell that unaided."""

    def loss(self, part: BatchShard = WHOLE) -> Float[Tensor, ""]:
        """L^dec of all of them."""
        return decode_loss(self.logits, self.targets, part)

    def next_loss(self, part: BatchShard = WHOLE) -> Float[Tensor, ""]:
        """L^dec of the first ones."""
        return decode_loss(self.logits[:, : self.first.shape[1]], self.first, part)


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


def dynamics_loss(
    predicted: Float[Tensor, "*rows M D"],
    memory: Float[Tensor, "*rows M D"],
    weight: Float[Tensor, "*rows"] | None = None,
    part: BatchShard = WHOLE,
) -> Float[Tensor, ""]:
    """L^dyn: mean squared error over every dimension of the memory.

    With `weight`, rows count by it.
    """
    squared = (predicted.float() - memory.float()).square().mean(dim=(-1, -2))
    if weight is None:
        weight = torch.ones_like(squared)
    return part.sum((squared * weight).sum()) / part.sum(weight.sum()).clamp(min=1)


def uniformity_loss(
    memory: Float[Tensor, "*rows M D"], samples: int, generator: torch.Generator
) -> Float[Tensor, ""]:
    """L^unif: log of the mean Gaussian potential between memory tokens of unit length.

    0 when all memories are one point, about -4 when they cover the sphere evenly. Pairs of a
    token with itself are left out, and so is the empty memory; the paper's equation keeps the
    former and omits the scaling.
    """
    # Distances of near tokens vanish in bf16, whatever the precision around this.
    with torch.autocast(memory.device.type, enabled=False):
        return _uniformity(memory.flatten(0, -2).float(), samples, generator)


def _uniformity(
    tokens: Float[Tensor, "N D"], samples: int, generator: torch.Generator
) -> Float[Tensor, ""]:
    if len(tokens) > samples:
        chance = torch.rand(len(tokens), generator=generator, device=generator.device)
        tokens = tokens[chance.topk(samples).indices.to(tokens.device)]
    there = tokens.any(dim=-1)  # the empty memory has no direction
    pairs = there[:, None] & there & ~torch.eye(len(tokens), dtype=torch.bool, device=there.device)
    tokens = F.normalize(tokens, dim=-1)
    squared_distance = 2 - 2 * tokens @ tokens.T
    potential = (-2 * squared_distance).exp().where(pairs, 0).sum() / pairs.sum().clamp(min=1)
    return potential.clamp(min=1e-12).log().where(pairs.any(), 0)
