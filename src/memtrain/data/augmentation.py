"""A picture mirrored or moved a little is another picture: few become many."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from memtrain.errors import MemtrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """Which copies of a picture are learned beside it."""

    mirror: bool = False
    """Left and right exchanged."""
    shift: int = 0
    """Moved by so many pixels in each of eight directions; the border is repeated where it came
    from."""

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise MemtrainError(f"shift={self.shift}: must be at least 0 pixels; 1 or 2 are usual")

    @property
    def count(self) -> int:
        """Pictures made of one, itself included."""
        return (1 + self.mirror) * (9 if self.shift else 1)

    def of(self, gray: UInt8[np.ndarray, "N H W"]) -> Iterator[UInt8[np.ndarray, "N H W"]]:
        """The pictures as they are, then one copy of all after the other."""
        _, height, width = gray.shape
        if self.shift >= min(height, width):
            raise MemtrainError(
                f"shift={self.shift}: pictures have {height}x{width} pixels (height x width)"
            )
        steps = (0, -self.shift, self.shift) if self.shift else (0,)
        margin = ((0, 0), (self.shift, self.shift), (self.shift, self.shift))
        for side in (gray, gray[:, :, ::-1])[: 1 + self.mirror]:
            wide = np.pad(side, margin, mode="edge")
            for down in steps:
                for right in steps:
                    top, left = self.shift - down, self.shift - right
                    yield wide[:, top : top + height, left : left + width]
