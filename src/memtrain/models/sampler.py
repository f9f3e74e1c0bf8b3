"""Sampling of the next token from logits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.errors import MemtrainError, check_whole

LEAST_TEMPERATURE = 0.01
"""Dividing logits by far less would overflow."""
Choose = Callable[[Tensor, Tensor], Tensor]
"""From logits (B, V) and one uniform random number per row (B,) to one token per row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Sample the next token from logits, given a uniform random number per row.

    No branch depends on a value on the device, so a call can be captured in a CUDA graph.
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
        for name in ("temperature", "top_p"):
            number = getattr(self, name)
            if not isinstance(number, Real):
                raise MemtrainError(f"{name}={number!r}: must be a number")
        if self.temperature and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise MemtrainError(
                f"temperature={self.temperature}: must be at least {LEAST_TEMPERATURE} and finite, "
                "or 0 for the likeliest token"
            )
        if not 0 < self.top_p <= 1:
            raise MemtrainError(f"top_p={self.top_p}: must be above 0 and at most 1")
        check_whole("top_k", self.top_k, 0)
        check_whole("allowed", self.allowed, 0)

    @property
    def is_plain(self) -> bool:
        """Whether tokens are sampled from the full distribution, without top-k or top-p."""
        return self.temperature > 0 and not self.top_k and self.top_p == 1

    def __call__(
        self, logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]
    ) -> Int[Tensor, " B"]:
        """One token per row; `uniform` is in [0, 1)."""
        if self.allowed:
            logits = logits[:, : self.allowed]
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits = logits.float()
        if self.temperature != 1:  # with few rows, every operation costs time
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            best = logits.topk(self.top_k)
            logits = torch.full_like(logits, float("-inf")).scatter(-1, best.indices, best.values)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            probability = ordered.softmax(dim=-1)
            # The first token always stays: the probability before it is 0.
            dropped = probability.cumsum(dim=-1) - probability >= self.top_p
            logits = logits.scatter(-1, order, ordered.masked_fill(dropped, float("-inf")))
        total = logits.softmax(dim=-1).cumsum(dim=-1)
        # Rounding must not move the threshold past the last token that has a probability.
        threshold = uniform.clamp(max=1 - 1e-6)[:, None] * total[:, -1:]
        return (total <= threshold).sum(dim=-1)
