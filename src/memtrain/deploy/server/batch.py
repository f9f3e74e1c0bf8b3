"""Advance many sequences at once, each with the same result as alone.

A matrix product may add in another order for another number of rows. So rows are computed in
groups of a few fixed widths, filled up with rows that nobody reads, and only of widths whose
results were the same to the bit when the batch was made.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.models.rnn import RNN

READ = 4
"""Tokens that the trial rows have read, so that their memories are those of a model at work."""


class Batch:
    """The memories of the sequences in progress, in rows 0 to `count` - 1."""

    def __init__(self, rnn: RNN, rows: int) -> None:
        """
        Args:
            rnn: the network, in evaluation mode.
            rows: sequences at most.
        """
        self.rnn, self.rows, self.count = rnn, rows, 0
        self.widths = independent_widths(rnn, rows)
        """Rows computed together; ascending."""
        # The last group may reach beyond the last row.
        self._memory = rnn.empty_memory(rows + self.widths[-1])

    def join(self, memory: Float[Tensor, "M D"] | None) -> None:
        """Add a sequence after the last row, with a memory or the empty one (None)."""
        self._memory[self.count] = 0 if memory is None else memory
        self.count += 1

    def leave(self, row: int) -> Float[Tensor, "M D"]:
        """Remove a sequence; the last row takes its place. Returns its memory."""
        memory = self._memory[row].clone()
        self.count -= 1
        self._memory[row] = self._memory[self.count]
        self._memory[self.count] = 0
        return memory

    def clear(self) -> None:
        """Remove all sequences."""
        self._memory.zero_()
        self.count = 0

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Float[Tensor, "B V"]:
        """Read one token per row; returns the logits of the next."""
        first, logits = 0, []
        padded = [*tokens, *[0] * self.widths[-1]]
        while first < self.count:
            left = self.count - first
            width = next((one for one in self.widths if one >= left), self.widths[-1])
            group = slice(first, first + width)
            token = torch.tensor(padded[group], device=self._memory.device)
            # A copy begins at an aligned address, upon which sums may depend, too.
            found, self._memory[group] = self.rnn.step(self._memory[group].clone(), token)
            logits.append(found)
            first += width
        return torch.cat(logits)[: self.count]


@torch.no_grad()
def independent_widths(rnn: RNN, rows: int) -> list[int]:
    """Widths up to `rows` at which a row's result depends on nothing but the row, to the bit.

    It is tried out: the order in which a product is added depends on its shape and the machine, not
    on the numbers. Width 1 is always right alone.
    """
    widths = [2**power for power in range(rows.bit_length()) if 2**power < rows] + [rows]
    generator = torch.Generator().manual_seed(0)
    device, space = rnn.readout.head.weight.device, rnn.vocab_size
    read = torch.randint(space, (READ, rows), generator=generator).to(device)
    memory = rnn.empty_memory(rows)
    for token in read[:-1]:
        memory = rnn.step(memory, token)[1]
    for widest in reversed(widths[1:]):
        states, token = memory[:widest], read[-1, :widest]
        expected = _in_groups(rnn, states, token, widest)
        order = torch.randperm(widest, generator=generator).to(device)
        moved = _in_groups(rnn, states[order], token[order], widest)
        others = torch.where(torch.arange(widest, device=device)[:, None, None] < 1, states, 0.0)
        alone = _in_groups(rnn, others, token, widest)
        if torch.equal(moved, expected[order]) and torch.equal(alone[0], expected[0]):
            return [
                width
                for width in widths
                if width <= widest and torch.equal(_in_groups(rnn, states, token, width), expected)
            ]
    return [1]


def _in_groups(
    rnn: RNN, memory: Float[Tensor, "B M D"], token: Int[Tensor, " B"], width: int
) -> Float[Tensor, "B R"]:
    """The logits and the new memory of each row, computed `width` rows at a time."""
    fill = -len(token) % width
    memory = torch.cat([memory, memory.new_zeros(fill, *memory.shape[1:])])
    token = torch.cat([token, token.new_zeros(fill)])
    pairs = zip(memory.split(width), token.split(width), strict=True)
    found = [rnn.step(states.clone(), read) for states, read in pairs]
    return torch.cat([torch.cat([one, new.flatten(1)], dim=1) for one, new in found])[
        : len(token) - fill
    ]
