"""Supervised Memory Training: the teacher learns what to remember, the cell how to update it.

Nothing is unrolled. The cell is applied once to every pair (m_t, x_{t+1}), all pairs at once, so
no gradient passes through more than one application of it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.config import SMTConfig
from memtrain.nn.rnn import RNN
from memtrain.nn.teacher import Teacher
from memtrain.objectives.losses import decode_loss, dynamics_loss, uniformity_loss
from memtrain.objectives.objective import Objective, draw_steps
from memtrain.objectives.windows import asked_positions, gather_window
from memtrain.shapes import Batch, Losses


class SMT(Objective):
    """decode_weight · L^dec + dynamics_weight · L^dyn + uniformity_weight · L^unif."""

    def __init__(self, config: SMTConfig, teacher: Teacher, rnn: RNN) -> None:
        super().__init__()
        self.config = config
        self.teacher = teacher
        self.rnn = rnn

    def trained(self) -> dict[str, nn.Module]:
        return {"teacher": self.teacher, "cell": self.rnn.cell}

    def settle(self) -> None:
        """The readout is a copy of the decoder."""
        self.rnn.readout.load_state_dict(self.teacher.decoder.state_dict())

    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        config = self.config
        steps, asked = self._timesteps(batch, generator)
        memory = self.teacher.encode(batch.inputs, steps)
        decode = self._decode(batch, memory, steps, asked)
        dynamics = self._dynamics(batch, memory, steps)
        uniformity = uniformity_loss(memory, config.uniformity_samples, generator)
        total = (
            config.decode_weight * decode
            + config.dynamics_weight * dynamics
            + config.uniformity_weight * uniformity
        )
        parts = {"decode": decode, "dynamics": dynamics, "uniformity": uniformity}
        return Losses(total, {name: part.detach() for name, part in parts.items()})

    def _timesteps(
        self, batch: Batch, generator: torch.Generator
    ) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B A"]]:
        """Consecutive steps to encode, and which of them the decoder is asked at (indices).

        All: every step; the decoder at all of them or at some random ones. One: a uniform step t
        and a neighbour, the pair (t, t+1), or (t-1, t) at the end of the sequence.
        """
        rows, length = batch.inputs.shape
        device = batch.inputs.device
        if self.config.timesteps == "one":
            chosen = draw_steps(rows, 1, length, generator, device)
            first = chosen.clamp(max=max(0, length - 2))
            return first + torch.arange(min(2, length), device=device), chosen - first
        steps = torch.arange(length, device=device).expand(rows, length)
        if not 0 < self.config.decode_timesteps < length:
            return steps, steps
        return steps, draw_steps(rows, self.config.decode_timesteps, length, generator, device)

    def _decode(
        self,
        batch: Batch,
        memory: Float[Tensor, "B S M D"],
        steps: Int[Tensor, "B S"],
        asked: Int[Tensor, "B A"],
    ) -> Float[Tensor, ""]:
        """The futures of the steps at which the decoder is asked."""
        rows = torch.arange(len(steps), device=steps.device)[:, None]
        memory = memory[rows, asked].flatten(0, 1)
        window = gather_window(batch, steps.gather(1, asked), self.config.future_length)
        inputs, targets = window.future_inputs.flatten(0, 1), window.future_targets.flatten(0, 1)
        positions = None
        if targets.device.type == "cpu":
            positions, targets = asked_positions(targets)
        return decode_loss(self.teacher.decode(memory, inputs, positions), targets)

    def _dynamics(
        self, batch: Batch, memory: Float[Tensor, "B S M D"], steps: Int[Tensor, "B S"]
    ) -> Float[Tensor, ""]:
        """One step of the cell from every memory to the next, and from the empty memory."""
        if not self.config.joint:
            memory = memory.detach()
        rows = torch.arange(len(steps), device=steps.device)[:, None]
        token = batch.inputs[rows, steps[:, 1:]].flatten()
        before = memory[:, :-1].flatten(0, 1)
        after = memory[:, 1:].flatten(0, 1)
        if self.config.learn_start:
            first = self._first_memory(batch, memory)
            before = torch.cat([self.rnn.empty_memory(len(first)).to(before.dtype), before])
            token = torch.cat([batch.inputs[: len(first), 0], token])
            after = torch.cat([first, after])
        return dynamics_loss(self.rnn.cell(before, token), after)

    def _first_memory(
        self, batch: Batch, memory: Float[Tensor, "B S M D"]
    ) -> Float[Tensor, "N M D"]:
        """The memories of first tokens alone: of all rows, or of one row in 16 when sampling."""
        if self.config.timesteps == "all":
            return memory[:, 0]
        some = batch.inputs[: max(1, len(batch.inputs) // 16), :1]
        first = self.teacher.encode(some)[:, 0]
        return first if self.config.joint else first.detach()
