"""Sampling from a trained RNN, and small pretrained models. This module does not import torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtrain.errors import MemtrainError, check_whole

if TYPE_CHECKING:
    from memtrain.models.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to sample, for `memtrain.generate` and `memtrain generate`."""

    count: int | None = None
    """Number of sequences (default: 1 text or 64 images), of each label if there are several, or
    of places where forecasts of a series start (default: 4)."""
    length: int | None = None
    """Tokens to generate, which are characters of an ASCII text, bytes of any other; images are
    always completed. Steps to forecast of a series (default: a season, else a quarter of the
    window)."""
    temperature: float = 1.0
    """Divides the logits: below 1 is safer, above 1 more varied, 0 is greedy."""
    top_k: int = 0
    """Sample from the k most likely tokens only (0: all)."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""
    seed: int = 0
    """The same seed gives the same samples, on the same kind of device."""
    label: tuple[str, ...] = ()
    """Classes of the images to draw, by name or number, `count` of each; of a model whose images
    have classes (default: classes at random, with the frequencies of the training images)."""

    def __post_init__(self) -> None:
        for name in ("count", "length"):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, 1)
        if isinstance(self.label, str) or not all(isinstance(one, str) for one in self.label):
            raise MemtrainError(f"label={self.label!r}: must be a tuple of strings, as ('7',)")
        check_whole("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise MemtrainError(f"seed={self.seed}: must be at least 0 and below 2**63")
        self.sampler()  # validates the others

    def sampler(self, allowed: int = 0) -> "Sampler":
        """A sampler with these options, of the tokens below `allowed` (0: all)."""
        from memtrain.models.sampler import Sampler

        return Sampler(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, allowed=allowed
        )
