"""The 8x8 digits of scikit-learn, as sequences of pixels."""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from memtrain.config import Digits
from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.data.task import Corpus, Task
from memtrain.shapes import Batch

SIDE, LEVELS = 8, 17


class DigitsTask(Task):
    """Digits in a fixed shuffled order, because the original one is grouped by writer."""

    vocab_size = LEVELS + 1
    sequence_length = SIDE * SIDE
    unit = "pixel"
    spelling: TokenCodec = TokenCodec(
        vocab_size=LEVELS + 1,
        start_token=LEVELS,
        start_written=False,
        picture=ImageFormat(height=SIDE, width=SIDE, levels=LEVELS),
        dark_ink=True,
    )

    def __init__(self, config: Digits) -> None:
        from sklearn.datasets import load_digits

        pixels, _ = load_digits(return_X_y=True)
        images = torch.from_numpy(np.asarray(pixels, dtype=np.int64))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        kept = max(1, round(config.held_out * len(images)))
        self.test_images = images[order[:kept]]
        self.train_images = images[order[kept:]]

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(self.train_images), (count,), generator=generator)
        return self._batch(self.train_images[chosen])

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        """Distinct test images, at most all of them."""
        return self._batch(self.held_out_images(count, generator))

    def held_out_images(self, count: int, generator: torch.Generator) -> Int[Tensor, "B 64"]:
        order = torch.randperm(len(self.test_images), generator=generator)
        return self.test_images[order[:count]]

    def corpus(self) -> Corpus:
        return Corpus(self.train_images.flatten(), LEVELS, self.unit, SIDE, SIDE * SIDE)

    def _batch(self, images: Int[Tensor, "B 64"]) -> Batch:
        start = torch.full((len(images), 1), LEVELS)  # the start token
        return Batch(torch.cat([start, images[:, :-1]], dim=1), images)

    def describe(self, inputs: list[int], targets: list[int]) -> str:
        shades = " .:-=+*#%@"
        ink = [shades[level * (len(shades) - 1) // (LEVELS - 1)] * 2 for level in targets]
        return "\n".join("".join(ink[row : row + SIDE]) for row in range(0, len(ink), SIDE))
