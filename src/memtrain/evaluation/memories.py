"""How much of their space memories fill: uniformity and effective rank, which show a collapse."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.losses import uniformity_loss

SAMPLED = 512
"""Memories that are compared."""
SAMPLED_TOKENS = 2048
"""Memory tokens that are compared pairwise."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far memories of held-out sequences are spread out."""

    uniformity: float
    """L_unif of their tokens: 0 if all are alike, about -4 if they fill the sphere."""
    effective_rank: float
    """Directions that they use: 1 if all are alike, at most M·D and `SAMPLED`."""


def effective_rank(rows: Float[Tensor, "N D"]) -> float:
    """exp of the entropy of the singular values, scaled to sum to 1 (Roy and Vetterli 2007).

    Rows are not centred: equal rows have rank 1, rows of zeros rank 0.

    Example: `effective_rank(torch.eye(5))` is 5.
    """
    if not rows.isfinite().all():
        return math.nan
    values = torch.linalg.svdvals(rows.double())
    if not values.any():
        return 0.0
    return float(torch.special.entr(values / values.sum()).sum().exp())


class SpreadAccumulator:
    """Collects a sample of the memories of `rows` sequences, which are added a few at a time."""

    def __init__(self, rows: int) -> None:
        self.rows, self.sampled = rows, []
        self.generator = torch.Generator().manual_seed(0)

    def add(self, memories: Float[Tensor, "B T M D"]) -> None:
        count = math.ceil(SAMPLED * len(memories) / self.rows)
        flat = memories.flatten(0, 1)
        chosen = torch.randperm(len(flat), generator=self.generator)[:count]
        self.sampled.append(flat[chosen.to(flat.device)].float().cpu())

    def spread(self) -> Spread:
        memories = torch.cat(self.sampled)[:SAMPLED]  # (N, M, D)
        uniformity = uniformity_loss(memories, SAMPLED_TOKENS, self.generator)
        return Spread(float(uniformity), effective_rank(memories.flatten(1)))
