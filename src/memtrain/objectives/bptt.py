"""Backpropagation through time: the baseline, and a last stage that can surpass the teacher."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memtrain.config import BPTTConfig
from memtrain.models.cells import Cell
from memtrain.models.rnn import RNN
from memtrain.objectives.arguments import check_models, stage_settings
from memtrain.objectives.base import Objective
from memtrain.objectives.futures import readout_loss
from memtrain.shapes import Batch, Losses, count_targets


class BPTT(Objective):
    """Next-target loss of the RNN unrolled from the empty memory.

    With `truncate` K and `sweeps` a sequence is not unrolled: its pieces of K steps are trained all
    at once, from memories that passes without gradients over the pieces before them leave.

    Example: `BPTT(rnn)(tokens).total.backward()`.
    """

    def __init__(self, rnn: RNN, config: BPTTConfig | None = None, **settings: Any) -> None:
        """
        Args:
            rnn: the network.
            config: the settings, or give them by name, as in `truncate=64`.
            settings: fields of BPTTConfig.
        """
        super().__init__()
        check_models(self, None, rnn)
        config = stage_settings(BPTTConfig, config, settings)
        self.config = config
        self.rollout_length = config.sequence_length
        self.rnn = rnn

    def trained(self) -> dict[str, nn.Module]:
        return {"rnn": self.rnn}

    def tokens_needed(self) -> int:
        return self.rollout_length

    def empty_start_rows(self, rows: int) -> int:
        return rows

    @property
    def capturable(self) -> bool:
        return super().capturable and (not self.config.recompute or self._repeatable)

    @property
    def short_step(self) -> bool:
        return False

    @property
    def _repeatable(self) -> bool:
        """Whether recomputing a step gives the same result. A user's cell may have dropout, and
        restoring its random numbers would stall a GPU."""
        return isinstance(self.rnn.cell, Cell)

    def compute(self, batch: Batch, generator: torch.Generator) -> Losses:
        if self.config.recompute:
            loss = self._recomputed(batch)
        else:
            unroll = self._at_once if self.config.sweeps else self._in_order
            loss = readout_loss(self.rnn, unroll(batch.inputs), batch.targets, self.shard)
        return Losses(loss, {"readout": loss.detach()})

    def _in_order(
        self, inputs: Int[Tensor, "B T"] | Float[Tensor, "B T X"]
    ) -> Float[Tensor, "B T M D"]:
        """All memories, one piece of the sequence after another."""
        memory, memories = None, []
        for chunk in inputs.split(self.config.truncate or inputs.shape[1], dim=1):
            # Truncated: the memory is carried into the next chunk, the gradient is not.
            unrolled = self.rnn.unroll(chunk, None if memory is None else memory.detach())
            memory = unrolled[:, -1]
            memories.append(unrolled)
        return torch.cat(memories, dim=1)

    def _at_once(
        self, inputs: Int[Tensor, "B T"] | Float[Tensor, "B T X"]
    ) -> Float[Tensor, "B T M D"]:
        """All memories, all pieces of the sequence in parallel.

        Each of `sweeps` passes starts a piece from where the pass before ended the piece before it;
        the first starts all of them from the empty memory.
        """
        rows, length = inputs.shape[:2]
        piece = min(self.config.truncate, length)
        count = -(-length // piece)
        filling = inputs.new_zeros(rows, count * piece - length, *inputs.shape[2:])
        pieces = torch.cat([inputs, filling], dim=1).unflatten(1, (count, piece)).flatten(0, 1)
        empty = self.rnn.empty_memory(rows)[:, None]
        start = self.rnn.empty_memory(rows * count)
        for _ in range(min(self.config.sweeps, count - 1)):
            with torch.no_grad():
                ended = self.rnn.unroll(pieces, start)[:, -1].unflatten(0, (rows, count))
            start = torch.cat([empty, ended[:, :-1]], dim=1).flatten(0, 1)
        memories = self.rnn.unroll(pieces, start).unflatten(0, (rows, count))
        return memories.flatten(1, 2)[:, :length]

    def _recomputed(self, batch: Batch) -> Float[Tensor, ""]:
        """Unroll in pieces and keep only the last memory of each; the rest is recomputed."""
        memory = self.rnn.empty_memory(len(batch.inputs))
        losses, counts = [], count_targets(batch.targets)
        for start, stop in self._pieces(batch.inputs.shape[1]):
            if self.config.truncate and start % self.config.truncate == 0:
                memory = memory.detach()
            memory, loss = checkpoint(
                self._piece,
                memory,
                batch.inputs[:, start:stop],
                batch.targets[:, start:stop],
                use_reentrant=False,
                preserve_rng_state=not self._repeatable,
            )
            losses.append(loss * counts[start:stop].sum())
        total, count = torch.stack(losses).sum(), counts.sum()
        return self.shard.sum(total) / self.shard.sum(count).clamp(min=1)

    def _pieces(self, length: int) -> list[tuple[int, int]]:
        """The bounds of pieces: every `recompute` steps, and where the gradient is cut."""
        cut = self.config.truncate or length
        starts = [
            start
            for chunk in range(0, length, cut)
            for start in range(chunk, min(chunk + cut, length), self.config.recompute)
        ]
        return list(zip(starts, [*starts[1:], length], strict=True))

    def _piece(
        self,
        memory: Float[Tensor, "B M D"],
        inputs: Int[Tensor, "B P"] | Float[Tensor, "B P X"],
        targets: Int[Tensor, "B P"] | Float[Tensor, "B P Y"],
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, ""]]:
        """The memory after some steps, and the mean loss over their targets."""
        memories = self.rnn.unroll(inputs, memory)
        return memories[:, -1], readout_loss(self.rnn, memories, targets)
