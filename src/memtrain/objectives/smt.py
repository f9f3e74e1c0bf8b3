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
        memory, steps = self._memories(batch, generator)
        decode = self._decode(batch, memory, steps, generator)
        dynamics = self._dynamics(batch, memory, steps)
        uniformity = uniformity_loss(memory, config.uniformity_samples, generator)
        total = (
            config.decode_weight * decode
            + config.dynamics_weight * dynamics
            + config.uniformity_weight * uniformity
        )
        parts = {"decode": decode, "dynamics": dynamics, "uniformity": uniformity}
        return Losses(total, {name: part.detach() for name, part in parts.items()})

    def _memories(
        self, batch: Batch, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B S M D"], Int[Tensor, "B S"]]:
        """The teacher's memories after consecutive steps: all, or one sampled pair (t, t+1)."""
        rows, length = batch.inputs.shape
        device = batch.inputs.device
        if self.config.timesteps == "all":
            steps = torch.arange(length, device=device).expand(rows, length)
        else:
            pair = torch.arange(min(2, length), device=device)
            steps = draw_steps(rows, 1, max(1, length - 1), generator, device) + pair
        return self.teacher.encode(batch.inputs, steps), steps

    def _decode(
        self,
        batch: Batch,
        memory: Float[Tensor, "B S M D"],
        steps: Int[Tensor, "B S"],
        generator: torch.Generator,
    ) -> Float[Tensor, ""]:
        """The futures of all steps, of some random ones, or of the sampled one."""
        if self.config.timesteps == "one":
            memory, steps = memory[:, :1], steps[:, :1]
        elif 0 < self.config.decode_timesteps < steps.shape[1]:
            count = self.config.decode_timesteps
            steps = draw_steps(len(steps), count, steps.shape[1], generator, steps.device)
            rows = torch.arange(len(steps), device=steps.device)[:, None]
            memory = memory[rows, steps]
        window = gather_window(batch, steps, self.config.future_length)
        inputs, targets = window.future_inputs.flatten(0, 1), window.future_targets.flatten(0, 1)
        asked = None
        if targets.device.type == "cpu":
            asked, targets = asked_positions(targets)
        return decode_loss(self.teacher.decode(memory.flatten(0, 1), inputs, asked), targets)

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
