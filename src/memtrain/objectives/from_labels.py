"""SMT and DMT from memories that come with the data, without a teacher.

The memories were written to a file by a teacher (`memtrain label`), or are the states of an oracle,
for example the true state of a simulated system.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.config import DMTConfig, SMTConfig
from memtrain.losses import total_loss
from memtrain.models.rnn import RNN
from memtrain.objectives.base import Objective
from memtrain.objectives.dmt import DMT
from memtrain.objectives.futures import gather_window, readout_loss
from memtrain.objectives.rollouts import ROLLOUTS
from memtrain.objectives.smt import SMT
from memtrain.shapes import Batch, Losses


def memories_at(batch: Batch, steps: Int[Tensor, "B S"]) -> Float[Tensor, "B S M D"]:
    """The memories of a batch after the given steps; step -1 is the empty memory."""
    assert batch.memories is not None, "this task has no memories"
    rows = torch.arange(len(steps), device=steps.device)[:, None]
    memory = batch.memories[rows, steps.clamp(min=0)]
    return memory.where((steps >= 0)[..., None, None], 0)


class SMTFromLabels(SMT):
    """dynamics_weight · L^dyn of the batch's memories, all steps at once, and
    decode_weight · next-target loss of the readout on the same memories.

    The dynamics loss equals that of SMT with a frozen teacher which makes these memories. The
    readout's loss does not reach the cell.
    """

    def __init__(self, rnn: RNN, config: SMTConfig) -> None:
        Objective.__init__(self)
        self.config, self.rnn = config, rnn
        self.stream = self.trains_teacher = False

    def trained(self) -> dict[str, nn.Module]:
        trained: dict[str, nn.Module] = {"cell": self.rnn.cell}
        return trained | {"readout": self.rnn.readout} if self.config.decode_weight else trained

    def tokens_needed(self) -> int:
        return 0  # sequences have the length of their labels

    def sync_readout(self, gather=dict) -> None:
        """Nothing: the readout is trained itself."""

    def compute(self, batch: Batch, generator: torch.Generator) -> Losses:
        config = self.config
        (steps, _, decoded), segments = self._chosen(batch, generator)
        memory = memories_at(batch, steps)
        with self.overlap(urgent=True):
            stepped = self._step(batch, memory, segments, generator)
            dynamics = self._dynamics(stepped, memory, segments)
        parts = {"dynamics": (config.dynamics_weight, dynamics)}
        if config.decode_weight:
            rows = torch.arange(len(steps), device=steps.device)[:, None]
            targets = gather_window(batch, steps.gather(1, decoded), 1).future_targets[..., 0]
            loss = readout_loss(self.rnn, memory[rows, decoded], targets, self.shard)
            parts["readout"] = (config.decode_weight, loss)
        self.overlap.join()
        return total_loss(parts)


class DMTFromLabels(DMT):
    """DMT whose labels are the batch's memories."""

    def __init__(self, rnn: RNN, config: DMTConfig) -> None:
        Objective.__init__(self)
        self.config, self.rnn = config, rnn
        self.rollout_length = config.rollout_length
        self.rollouts = ROLLOUTS[config.rollout](rnn, config)

    def trained(self) -> dict[str, nn.Module]:
        trained: dict[str, nn.Module] = {"cell": self.rnn.cell}
        return trained | {"readout": self.rnn.readout} if self.config.readout_weight else trained

    def tokens_needed(self) -> int:
        return 0

    def _memories(self, batch: Batch, steps: Int[Tensor, "B S"]) -> Float[Tensor, "B S M D"]:
        return memories_at(batch, steps)
