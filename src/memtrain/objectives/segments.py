"""Segments of steps of the cell, each from a memory of the teacher: which steps are in which."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from memtrain.shapes import at_steps


class Segments:
    """The A pairs of successive states of each sequence, divided into P segments of K.

    The last segment overlaps the one before if they do not divide evenly. One that holds the end of
    a sequence begins at the start that follows it, so that the steps from the empty memory are
    trained as often as others.

    Args:
        steps: successive timesteps of each sequence, on the ring of its states.
        length: K, at most A.
    """

    def __init__(self, steps: Int[Tensor, "B S"], length: int) -> None:
        self.length = length
        self.before, self.after = steps[:, :-1], steps[:, 1:]
        self.real: Bool[Tensor, "B A"] = self.after == self.before + 1
        """Whether each pair is a step: from the end of a sequence to its start there is none."""
        pairs = steps.shape[1] - 1
        self.inside: Bool[Tensor, "B P K"] = self.real[..., None]
        """Whether each pair of each segment is a step of one sequence."""
        if length == 1:
            self.count = pairs
            return
        step = torch.arange(length, device=steps.device)
        place = torch.arange(-(-pairs // length), device=steps.device) * length
        place = place.clamp(max=pairs - length)
        left_out = torch.where(self.real[:, place[:, None] + step], 0, step + 1).amax(-1)
        self.count = len(place)
        self.inside = step < length - left_out[..., None]
        self.first: Int[Tensor, "B P"] = place + left_out
        """The index of the state that each segment starts from."""
        self.last: Int[Tensor, "B P"] = (place + length).expand_as(left_out)
        """The index of the state that each segment ends with."""
        self._pairs = (self.first[..., None] + step).clamp(max=pairs - 1)

    def starts(self, states: Tensor) -> Tensor:
        """What belongs to the state that each segment starts from, of (B, S, ...)."""
        return states[:, :-1] if self.length == 1 else at_steps(states, self.first)

    def pairs(self, each: Tensor) -> Tensor:
        """What belongs to the pairs, (B, A, ...), by segment: (B, P, K, ...)."""
        if self.length == 1:
            return each[:, :, None]
        return at_steps(each, self._pairs.flatten(1)).unflatten(1, self._pairs.shape[1:])

    def at_last(self, each: Tensor) -> Tensor:
        """Of each segment's steps, (B, P, K, ...), its last one: (B, P, ...)."""
        last = (self.inside.sum(dim=-1) - 1).clamp(min=0)
        return at_steps(each.flatten(0, 1), last.flatten()[:, None])[:, 0].unflatten(0, last.shape)
