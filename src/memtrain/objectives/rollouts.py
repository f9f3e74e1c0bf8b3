"""The rollouts of DMT: where the memories come from on which the cell is trained.

`Unrolled` rolls out whole sequences. The other two need a number of sequential steps that does not
depend on their length: `Carried` keeps memories from one training step to the next, `Picard` starts
from the teacher's memories and applies the cell to all of them at once, several times.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.config import DMTConfig
from memtrain.errors import MemtrainError
from memtrain.models.rnn import RNN
from memtrain.shapes import WHOLE_BATCH, Batch, BatchShard, at_steps


class Begun(NamedTuple):
    """Sequences, the memory that each rollout starts from, and the steps that it takes."""

    batch: Batch
    memory: Float[Tensor, "B M D"]
    steps: Int[Tensor, "B R"]


class Rolled(NamedTuple):
    """The memories after each step of the rollouts, and those to compare with labels."""

    memories: Float[Tensor, "B R M D"]
    predicted: Float[Tensor, "B S M D"]
    """After the labelled steps, with gradients."""


Teach = Callable[[Int[Tensor, "B S"]], Float[Tensor, "B S M D"]]
"""The memory labels after the given steps."""


class Rollouts(ABC):
    """A kind of rollout. The memories' gradients pass through `config.segment` steps, if any."""

    def __init__(self, rnn: RNN, config: DMTConfig) -> None:
        self.rnn, self.config = rnn, config
        self.state: dict[str, Tensor] = {}
        """What is kept between training steps."""

    def begin(self, begun: Begun, shard: BatchShard) -> Begun:
        """The rollouts of this training step, given those that a new batch would begin."""
        return begun

    def first_label(self, length: int) -> int:
        """The first step of a rollout of this length that can have a label."""
        return min(self.config.segment, length) - 1

    @abstractmethod
    def roll(self, begun: Begun, labelled: Int[Tensor, " S"], teach: Teach) -> Rolled:
        """Roll out; `labelled` are indices of the steps whose memories have labels."""

    def segments(
        self,
        before: Float[Tensor, "B R M D"],
        inputs: Int[Tensor, "B R"] | Float[Tensor, "B R X"],
        labelled: Int[Tensor, " S"],
    ) -> Float[Tensor, "B S M D"]:
        """Repeat the last steps before each label with autograd, all segments in parallel.

        `before` holds the input memory of each step of the rollout.
        """
        length = min(self.config.segment, inputs.shape[1])
        first = labelled - (length - 1)
        steps = first + torch.arange(length, device=first.device)[:, None]  # (K, S)
        read = inputs[:, steps].transpose(1, 2).flatten(0, 1)  # (B·S, K)
        memory = self.rnn.unroll_last(read, before[:, first].flatten(0, 1))
        return memory.unflatten(0, (len(inputs), len(labelled)))


class Unrolled(Rollouts):
    """One step after another, over the whole sequence (the paper)."""

    def roll(self, begun: Begun, labelled: Int[Tensor, " S"], teach: Teach) -> Rolled:
        inputs = at_steps(begun.batch.inputs, begun.steps)
        with torch.set_grad_enabled(self.config.through_time):
            memories = self.rnn.unroll(inputs, begun.memory)  # (B, R, M, D)
        if self.config.through_time:
            return Rolled(memories, memories[:, labelled])
        before = torch.cat([begun.memory[:, None], memories[:, :-1]], dim=1)
        return Rolled(memories, self.segments(before, inputs, labelled))


class Picard(Rollouts):
    """Sweeps of one step from all memories at once, beginning with the teacher's memories.

    After K sweeps, each memory is the result of K steps of the cell from a memory of the teacher,
    and the first K of them are those of an unrolled rollout.
    """

    def roll(self, begun: Begun, labelled: Int[Tensor, " S"], teach: Teach) -> Rolled:
        inputs = at_steps(begun.batch.inputs, begun.steps)
        first = begun.memory[:, None]
        with torch.no_grad():
            memories = teach(begun.steps)
            for _ in range(self.config.sweeps):
                before = torch.cat([first, memories[:, :-1]], dim=1)
                memories = self.rnn.unroll_last(inputs.flatten(0, 1)[:, None], before.flatten(0, 1))
                memories = memories.unflatten(0, inputs.shape[:2])
        before = torch.cat([first, memories[:, :-1]], dim=1)
        return Rolled(memories, self.segments(before, inputs, labelled))


class Carried(Rollouts):
    """`segment` steps per training step; each row's memory is kept for the next one.

    A row reads one sequence from its start to its end, then one of the newest batch. The first
    sequences end early, each after another number of steps, so that later ones do not begin
    together. Gradients pass through the steps of one training step.
    """

    def begin(self, begun: Begun, shard: BatchShard) -> Begun:
        if shard is not WHOLE_BATCH:
            raise MemtrainError(
                "rollout=carried: keeps the memories of one process; train in one, with "
                "accumulate=1, or with rollout=unrolled"
            )
        batch, memory, steps = begun
        taken, total = min(self.config.segment, steps.shape[1]), steps.shape[1]
        stretch = torch.arange(taken, device=steps.device)
        if not self.state:
            rows = torch.arange(len(memory), device=steps.device)
            parts = -(-total // taken)  # training steps that a sequence takes
            self.state = {
                "inputs": batch.inputs.clone(),
                "targets": batch.targets.clone(),
                "memory": memory.clone(),
                "next": steps[:, 0].clone(),
                "left": 1 + rows % parts,
            }
            if batch.memories is not None:
                self.state["memories"] = batch.memories.clone()
        else:
            self._replace_ended(begun, -(-total // taken))
        state = self.state
        carried = Batch(state["inputs"], state["targets"], state.get("memories"))
        return Begun(carried, state["memory"], state["next"][:, None] + stretch)

    def _replace_ended(self, begun: Begun, parts: int) -> None:
        """Begin a new sequence in the rows whose sequence has ended or is not finite."""
        state, new = self.state, begun.batch
        if state["inputs"].shape != new.inputs.shape:
            raise MemtrainError(
                f"tokens={tuple(new.inputs.shape)}: must have the shape of the batch before, "
                f"{tuple(state['inputs'].shape)}; rollout=carried keeps a memory for each row"
            )
        broken = ~state["memory"].isfinite().flatten(1).all(1)
        ended = broken | (state["left"] == 0)
        fresh = {
            "inputs": new.inputs,
            "targets": new.targets,
            "memory": begun.memory,
            "next": begun.steps[:, 0],
            "left": torch.full_like(state["left"], parts),
        }
        if new.memories is not None:
            fresh["memories"] = new.memories
        for name, kept in state.items():
            where = ended.view(-1, *[1] * (kept.dim() - 1))
            kept.copy_(torch.where(where, fresh[name].to(kept.dtype), kept))

    def first_label(self, length: int) -> int:
        return 0  # gradients pass through the steps of this training step, however few

    def roll(self, begun: Begun, labelled: Int[Tensor, " S"], teach: Teach) -> Rolled:
        state, steps = self.state, begun.steps
        last = begun.batch.inputs.shape[1] - 1
        inputs = at_steps(begun.batch.inputs, steps.clamp(max=last))
        memories = self.rnn.unroll(inputs, begun.memory.clone())
        with torch.no_grad():
            state["memory"].copy_(memories[:, -1])
            state["next"] += steps.shape[1]
            state["left"] -= 1
        return Rolled(memories, memories[:, labelled])


ROLLOUTS: Mapping[str, type[Rollouts]] = {
    "unrolled": Unrolled,
    "picard": Picard,
    "carried": Carried,
}
