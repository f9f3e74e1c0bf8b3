"""The paper's losses, one pure function per equation."""

import operator
from collections.abc import Mapping
from functools import reduce

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.objectives.base import WHOLE_BATCH, BatchShard
from memtrain.shapes import IGNORE_INDEX, Losses


def decode_loss(
    logits: Float[Tensor, "*rows V"], targets: Int[Tensor, "*rows"], shard: BatchShard = WHOLE_BATCH
) -> Float[Tensor, ""]:
    """L^dec: cross-entropy in nats, the mean over all positions that carry a target."""
    logits, targets = logits.flatten(0, -2).float(), targets.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return shard.sum(total) / shard.sum((targets != IGNORE_INDEX).sum()).clamp(min=1)


def dynamics_loss(
    predicted: Float[Tensor, "*rows M D"],
    memory: Float[Tensor, "*rows M D"],
    weight: Float[Tensor, "*rows"] | None = None,
    shard: BatchShard = WHOLE_BATCH,
) -> Float[Tensor, ""]:
    """L^dyn: mean squared error over every dimension of the memory.

    `weight` weighs the rows.
    """
    squared = (predicted.float() - memory.float()).square().mean(dim=(-1, -2))
    if weight is None:
        weight = torch.ones_like(squared)
    return shard.sum((squared * weight).sum()) / shard.sum(weight.sum()).clamp(min=1)


def uniformity_loss(
    memory: Float[Tensor, "*rows M D"], samples: int, generator: torch.Generator
) -> Float[Tensor, ""]:
    """L^unif: log of the mean Gaussian potential between memory tokens of unit length.

    0 when all memories are equal, about -4 when they cover the sphere evenly. Pairs of a token with
    itself and the empty memory are excluded; the paper's equation keeps the former and omits the
    scaling.
    """
    # Small distances vanish in bf16.
    with torch.autocast(memory.device.type, enabled=False):
        return _uniformity(memory.flatten(0, -2).float(), samples, generator)


def total_loss(parts: Mapping[str, tuple[float, Float[Tensor, ""]]]) -> Losses:
    """The sum of named parts, each with its weight."""
    weighted = [weight * loss for weight, loss in parts.values()]
    return Losses(
        reduce(operator.add, weighted), {name: loss.detach() for name, (_, loss) in parts.items()}
    )


def _uniformity(
    tokens: Float[Tensor, "N D"], samples: int, generator: torch.Generator
) -> Float[Tensor, ""]:
    if len(tokens) > samples:
        uniform = torch.rand(len(tokens), generator=generator, device=generator.device)
        tokens = tokens[uniform.topk(samples).indices.to(tokens.device)]
    there = tokens.any(dim=-1)  # the empty memory has no direction
    pairs = there[:, None] & there & ~torch.eye(len(tokens), dtype=torch.bool, device=there.device)
    tokens = F.normalize(tokens, dim=-1)
    squared_distance = 2 - 2 * tokens @ tokens.T
    potential = (-2 * squared_distance).exp().where(pairs, 0).sum() / pairs.sum().clamp(min=1)
    return potential.clamp(min=1e-12).log().where(pairs.any(), 0)
