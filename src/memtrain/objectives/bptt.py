"""Backpropagation through time: the baseline, and a last phase that can outgrow the teacher."""

import torch
from torch import nn

from memtrain.config import BPTTConfig
from memtrain.nn.rnn import RNN
from memtrain.objectives.losses import readout_loss
from memtrain.objectives.objective import Objective
from memtrain.shapes import Batch, Losses


class BPTT(Objective):
    """Next-target loss of the RNN unrolled from the empty memory."""

    def __init__(self, config: BPTTConfig, rnn: RNN) -> None:
        super().__init__()
        self.config = config
        self.rnn = rnn

    def trained(self) -> dict[str, nn.Module]:
        return {"rnn": self.rnn}

    def tokens_needed(self) -> int:
        return self.config.sequence_length

    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        memory = self.rnn.empty_memory(len(batch.inputs))
        memories = []
        for chunk in batch.inputs.split(self.config.truncate or batch.inputs.shape[1], dim=1):
            # Truncated: the memory is carried into the next chunk, the gradient is not.
            unrolled = self.rnn.unroll(chunk, memory.detach())
            memory = unrolled[:, -1]
            memories.append(unrolled)
        loss = readout_loss(self.rnn, torch.cat(memories, dim=1), batch.targets, self.part)
        return Losses(loss, {"readout": loss.detach()})
