"""DAgger Memory Training: the cell trains on its own rollouts, with the teacher's labels.

The rollout runs without autograd. One step from each rolled-out memory is trained towards the
teacher's next memory, all steps at once; the teacher is frozen. The readout learns the targets from
the same memories, and its loss does not reach the cell. Beyond the paper, `decode_weight` adds the
teacher's decoding loss on the cell's memories, and with `train_teacher` the teacher keeps
learning by its own decoding and uniformity loss; rollouts.py has two kinds of rollout that need
few sequential steps.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memtrain.config import DMTConfig
from memtrain.config.stages import STREAM_ROLLOUT
from memtrain.losses import dynamics_loss, total_loss, uniformity_loss
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.objectives.arguments import check_models, stage_settings
from memtrain.objectives.base import Objective
from memtrain.objectives.futures import decode_futures, readout_loss
from memtrain.objectives.rollouts import ROLLOUTS, Begun
from memtrain.shapes import Batch, Losses, at_steps, keep_targets


class DMT(Objective):
    """dynamics_weight · MSE(rollout, teacher) + readout_weight · next-target loss, and
    decode_weight · L^dec of the cell's steps.

    With a teacher that trains, also teacher_decode_weight · L^dec + uniformity_weight · L^unif of
    the teacher's memories. Its labels are detached: the dynamics loss does not train it.

    Example: `DMT(teacher, rnn)(tokens).total.backward()`, in a loop after SMT.
    """

    def __init__(
        self,
        teacher: Teacher,
        rnn: RNN,
        config: DMTConfig | None = None,
        *,
        stream: bool = False,
        **settings: Any,
    ) -> None:
        """
        Args:
            teacher: trained by SMT; makes the memory labels.
            rnn: its cell is rolled out and trained, and its readout.
            config: the settings, or give them by name, as in `through_time=True`.
            stream: whether sequences are windows of one long stream.
            settings: fields of DMTConfig.
        """
        super().__init__()
        check_models(self, teacher, rnn)
        config = stage_settings(DMTConfig, config, settings)
        self.rollout_length = config.rollout_length or (STREAM_ROLLOUT if stream else 0)
        self.config = config
        self.teacher = teacher
        self.rnn = rnn
        self.rollouts = ROLLOUTS[config.rollout](rnn, config)

    def trained(self) -> dict[str, nn.Module]:
        trained: dict[str, nn.Module] = {"cell": self.rnn.cell, "readout": self.rnn.readout}
        return trained | {"teacher": self.teacher} if self.config.train_teacher else trained

    def tokens_needed(self) -> int:
        """A rollout, a context if the teacher's memory is its start, a future if it is decoded."""
        config = self.config
        context = self.teacher.config.context_length if config.empty_start < 1 else 0
        future = config.future_length if config.decode_weight or config.train_teacher else 0
        return context + (self.rollout_length or STREAM_ROLLOUT) + future

    def tokens_read(self, length: int) -> int:
        return min(self.config.segment, length) if self.config.rollout == "carried" else length

    def empty_start_rows(self, rows: int) -> int:
        return round(self.config.empty_start * rows)

    def kept_tensors(self) -> dict[str, Tensor]:
        return self.rollouts.state

    def keep_tensors(self, named: Mapping[str, Tensor]) -> None:
        self.rollouts.state = dict(named)

    def compute(self, batch: Batch, generator: torch.Generator) -> Losses:
        config = self.config
        begun = Begun(batch, *self._start(batch, generator))
        batch, memory, steps = self.rollouts.begin(begun, self.shard)
        # Steps of a rollout beyond the end of its sequence do not count.
        inside = steps < batch.inputs.shape[1]
        steps = steps.clamp(max=batch.inputs.shape[1] - 1)
        targets = keep_targets(at_steps(batch.targets, steps), inside)

        labelled, counts = self._labelled(steps.shape[1], generator, steps.device)
        with self.overlap(), nullcontext() if config.train_teacher else torch.no_grad():
            taught = self._memories(batch, steps[:, labelled])
            labels = taught.detach()
        rollout, predicted = self.rollouts.roll(
            Begun(batch, memory, steps), labelled, lambda every: self._memories(batch, every)
        )
        self.overlap.join()
        weight = (inside * torch.where(steps > 0, 1.0, config.start_weight))[:, labelled] * counts
        dynamics = dynamics_loss(predicted, labels, weight, self.shard)
        memories, targets = self._read_out(rollout.detach(), targets, generator)
        readout = readout_loss(self.rnn, memories, targets, self.shard)
        parts = {
            "dynamics": (config.dynamics_weight, dynamics),
            "readout": (config.readout_weight, readout),
        }
        if config.decode_weight or config.train_teacher:
            real = inside[:, labelled] & (counts > 0)
            parts |= self._future_losses(
                batch, predicted, taught, steps[:, labelled], real, generator
            )
        return total_loss(parts)

    def _future_losses(
        self,
        batch: Batch,
        predicted: Float[Tensor, "B S M D"],
        taught: Float[Tensor, "B S M D"],
        steps: Int[Tensor, "B S"],
        real: Bool[Tensor, "B S"],
        generator: torch.Generator,
    ) -> dict[str, tuple[float, Float[Tensor, ""]]]:
        """Losses of decoded futures with their weights: of the cell's memories, and of the
        teacher's with their uniformity. Steps that are not real do not count."""
        config, parts = self.config, {}
        # They are moved beyond the end, where there are no targets.
        steps = steps.where(real, batch.inputs.shape[1])
        if config.decode_weight:
            futures = decode_futures(self.teacher, batch, predicted, steps, config.future_length)
            parts["decode"] = config.decode_weight, futures.loss(self.shard)
        if config.train_teacher:
            futures = decode_futures(self.teacher, batch, taught, steps, config.future_length)
            parts["teacher_decode"] = config.teacher_decode_weight, futures.loss(self.shard)
            # The loss leaves out memories of 0.
            memories = self.shard.gather(taught.where(real[..., None, None], 0))
            uniformity = uniformity_loss(memories, config.uniformity_samples, generator)
            parts["uniformity"] = config.uniformity_weight, uniformity
        return parts

    def _memories(self, batch: Batch, steps: Int[Tensor, "B S"]) -> Float[Tensor, "B S M D"]:
        """The memories to learn, after the given steps."""
        return self.teacher.encode(batch.inputs, steps)

    def _start(
        self, batch: Batch, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B M D"], Int[Tensor, "B R"]]:
        """The initial memory and the steps of each rollout.

        A rollout from the empty memory starts at the first input, one from the teacher's memory
        after a random step, early enough for the whole rollout if the sequence is long enough.
        """
        rows, length = batch.inputs.shape[:2]
        device = batch.inputs.device
        rollout = min(self.rollout_length or length, length)
        memory = self.rnn.empty_memory(rows)
        first = torch.zeros(rows, dtype=torch.long, device=device)
        whole = self.shard.whole(rows)
        empty = self.empty_start_rows(whole)
        if empty < whole:
            latest = length - rollout if rollout < length else max(1, length - 1)
            drawn = torch.randint(
                latest, (whole - empty, 1), generator=generator, device=generator.device
            ).to(device)
            after = self.shard.rows(torch.cat([drawn.new_zeros(empty, 1), drawn]))
            # The last rows of the batch start from the teacher. Every shard encodes at least one
            # row, because all processes must take part when the teacher is sharded over them.
            taught = max(0, empty - self.shard.index * rows)
            encoded = min(taught, rows - 1)
            with torch.no_grad():
                rest = batch.map(lambda tensor: tensor[encoded:])
                memories = self._memories(rest, after[encoded:])[:, 0]
            memory[taught:] = memories[taught - encoded :]
            first[taught:] = after[taught:, 0] + 1
        return memory, first[:, None] + torch.arange(rollout, device=device)

    def _read_out(
        self, memories: Float[Tensor, "B R M D"], targets: Tensor, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B S M D"], Tensor]:
        """Every `readout_stride`-th memory from a random offset, and its targets."""
        rollout = memories.shape[1]
        stride = min(self.config.readout_stride, rollout)
        if stride == 1:
            return memories, targets
        read, there = self._every(stride, rollout, generator, targets.device)
        read = read.clamp(max=rollout - 1)
        return memories[:, read], keep_targets(targets[:, read], there)

    def _labelled(
        self, rollout: int, generator: torch.Generator, device: torch.device
    ) -> tuple[Int[Tensor, " S"], Float[Tensor, " S"]]:
        """Every `label_stride`-th step from a random offset, and whether it counts."""
        stride = min(self.config.label_stride, rollout)
        labelled, there = self._every(stride, rollout, generator, device)
        # A segment that would begin before the rollout is moved to its start.
        labelled = labelled.clamp(self.rollouts.first_label(rollout), rollout - 1)
        return labelled, there.float()

    def _every(
        self, stride: int, rollout: int, generator: torch.Generator, device: torch.device
    ) -> tuple[Int[Tensor, " S"], Bool[Tensor, " S"]]:
        """Every `stride`-th step from a random offset, and whether it is in the rollout.

        Their number is constant, so that the host need not know the offset.
        """
        offset = torch.randint(stride, (), generator=generator, device=generator.device)
        steps = offset.to(device) + torch.arange(0, rollout, stride, device=device)
        return steps, steps < rollout
