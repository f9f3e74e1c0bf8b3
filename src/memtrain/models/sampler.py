"""From logits to a token: temperature, top-k, top-p."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.errors import MemtrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """How the next token is chosen. Pure: the chance comes in as a number a row.

    No branch depends on a value on the device and nothing is read back, so a call can stand in a
    CUDA graph.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Keep only the k likeliest tokens (0: all)."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability."""
    allowed: int = 0
    """Only tokens below this number (0: all)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise MemtrainError(f"temperature={self.temperature}: must be at least 0 and finite")
        if not 0 < self.top_p <= 1:
            raise MemtrainError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k < 0:
            raise MemtrainError(f"top_k={self.top_k}: must be at least 0")
        if self.allowed < 0:
            raise MemtrainError(f"allowed={self.allowed}: must be at least 0")

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn by their probability, none of which is cut off."""
        return self.temperature > 0 and not self.top_k and self.top_p == 1

    def __call__(
        self, logits: Float[Tensor, "B V"], chance: Float[Tensor, " B"]
    ) -> Int[Tensor, " B"]:
        """One token a row; `chance` is uniform in [0, 1)."""
        if self.allowed:
            logits = logits[:, : self.allowed]
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits = logits.float()
        if self.temperature != 1:  # while rows are few, every operation costs the same
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            best = logits.topk(self.top_k)
            logits = torch.full_like(logits, float("-inf")).scatter(-1, best.indices, best.values)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            probability = ordered.softmax(dim=-1)
            # The first token always stays: what stands before it has probability 0.
            dropped = probability.cumsum(dim=-1) - probability >= self.top_p
            logits = logits.scatter(-1, order, ordered.masked_fill(dropped, float("-inf")))
        total = logits.softmax(dim=-1).cumsum(dim=-1)
        # Rounding must not carry the mark past the last token that has a probability.
        mark = chance.clamp(max=1 - 1e-6)[:, None] * total[:, -1:]
        return (total <= mark).sum(dim=-1)
