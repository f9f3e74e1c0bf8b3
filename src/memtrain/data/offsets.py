"""Where windows of a token stream may begin, drawn on the device that holds the stream."""

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from memtrain.errors import MemtrainError


class Offsets:
    """Begins of windows of `size` tokens.

    Windows that may not cross documents lie inside those that are long enough for one.
    """

    def __init__(
        self,
        starts: Int64[np.ndarray, " K"],
        tokens: int,
        size: int,
        cross_documents: bool,
        device: torch.device,
    ) -> None:
        starts = np.asarray(starts)
        if cross_documents:
            fitting = starts[starts <= tokens - size]
            room = np.array([tokens - size + 1])
            self._begins = torch.zeros(1, dtype=torch.long, device=device)
        else:
            lengths = np.diff(starts, append=tokens)
            fitting, room = starts[lengths >= size], lengths[lengths >= size] - size + 1
            if not len(fitting):
                raise MemtrainError(
                    f"cross_documents=False: no document holds a window of {size:,} tokens, the "
                    f"longest has {int(lengths.max()):,}; shorten the windows (context_length, "
                    "future_length, rollout_length, sequence_length) or let them cross"
                )
            self._begins = torch.from_numpy(fitting).to(device)
        self._starts = torch.from_numpy(fitting).to(device)
        self._total = int(room.sum())
        self._ends = torch.from_numpy(room.cumsum()).to(device)
        self._before = self._ends - torch.from_numpy(room).to(device)

    def anywhere(self, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Every begin is as likely as any other."""
        place = self._draw(self._total, count, generator)
        document = torch.searchsorted(self._ends, place, right=True)
        return self._begins[document] + place - self._before[document]

    def at_starts(self, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Starts of documents; the first of all has always room for a window that may cross."""
        return self._starts[self._draw(len(self._starts), count, generator)]

    def _draw(self, below: int, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
        drawn = torch.randint(below, (count,), generator=generator, device=generator.device)
        return drawn.to(self._ends.device)
