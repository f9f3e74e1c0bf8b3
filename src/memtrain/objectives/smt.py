"""Supervised Memory Training: the teacher learns memories, the cell learns to update them.

Nothing is unrolled. The cell is applied once to every pair (m_t, x_{t+1}), all pairs at once, so
no gradient passes through more than one application of it. The paper's theory has two stages:
`Pretrain` trains the teacher alone, then SMT with `train_teacher` off trains the cell alone.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memtrain.config import SMTConfig
from memtrain.errors import MemtrainError
from memtrain.losses import dynamics_loss, total_loss, uniformity_loss
from memtrain.models.cells import CELL_CLASSES
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.objectives.arguments import check_models, check_readout, stage_settings
from memtrain.objectives.base import Objective, sample_steps
from memtrain.objectives.futures import (
    DecodedFutures,
    decode_futures,
    encode_and_predict,
    prediction_loss,
)
from memtrain.shapes import Batch, Losses, at_steps


class CellSteps(NamedTuple):
    """P segments of K steps of the cell, each from a memory of the teacher."""

    memory: Float[Tensor, "B P K M D"]
    label: Float[Tensor, "B P K M D"]
    """The teacher's memory after each step."""
    weight: Float[Tensor, "B P K"]
    """In the dynamics loss."""
    real: Float[Tensor, "B A"]
    """1 for each pair of successive memories, and 0 for the end of a sequence and its start."""
    after: Int[Tensor, "B P K"]
    """The timestep of each memory; beyond the end, where nothing is to be predicted, if it is none
    of the sequence."""


class SMT(Objective):
    """decode_weight · L^dec + dynamics_weight · L^dyn + uniformity_weight · L^unif, and
    next_weight · L^dec of the next target, token_weight · that of the encoder's tokens,
    cell_decode_weight · (L^dec + next_weight · that of the next target) of the cell's memories.

    With a frozen teacher, dynamics_weight · L^dyn and the cell's L^dec alone.

    Example:
        smt = SMT(teacher, rnn, future_length=16, timesteps=0)
        smt(tokens).total.backward()  # in a loop with your optimizer
        smt.sync_readout()  # at the end: the readout of the RNN becomes the teacher's decoder
    """

    trains_cell = True

    def __init__(
        self,
        teacher: Teacher,
        rnn: RNN,
        config: SMTConfig | None = None,
        *,
        stream: bool = False,
        **settings: Any,
    ) -> None:
        """
        Args:
            teacher: makes the memory labels.
            rnn: its cell learns them; its readout has the shape of the teacher's decoder.
            config: the settings, or give them by name, as in `future_length=16`.
            stream: whether sequences are windows of one long stream; see `tokens_needed`.
            settings: fields of SMTConfig.
        """
        super().__init__()
        check_models(self, teacher, rnn)
        check_readout(teacher, rnn)
        config = stage_settings(SMTConfig, config, settings)
        if config.token_weight and teacher.config.encoder != "causal":
            raise MemtrainError(
                f"token_weight={config.token_weight:g}: must be 0 with a bidirectional encoder, "
                'whose tokens see their targets; Teacher(encoder="causal", ...)'
            )
        self.stream = stream
        self.config = config
        self.teacher = teacher
        self.rnn = rnn
        self.trains_teacher = config.train_teacher

    def trained(self) -> dict[str, nn.Module]:
        trained: dict[str, nn.Module] = {}
        if self.trains_teacher:
            trained["teacher"] = self.teacher
        if self.trains_cell:
            trained["cell"] = self.rnn.cell
        return trained

    def tokens_needed(self) -> int:
        config = self.config
        return self.teacher.config.context_length + config.future_length + config.dynamics_steps - 1

    def check_batch(self, tokens: object, targets: object) -> Batch:
        batch, needed = super().check_batch(tokens, targets), self.tokens_needed()
        if self.stream and self.config.timesteps == 1 and batch.inputs.shape[1] < needed:
            raise MemtrainError(
                f"tokens={tuple(batch.inputs.shape)}: windows of a stream must have at least "
                f"{needed} tokens, context and future; or leave out stream=True"
            )
        return batch

    def shortest_length(self) -> int:
        return self.config.dynamics_steps + (not self.config.learn_start) if self.trains_cell else 1

    def empty_start_rows(self, rows: int) -> int:
        return round(self.config.short_contexts * rows)

    @property
    def applies_once(self) -> bool:
        """A user's cell may use a matrix several times."""
        built_in = type(self.rnn.cell) in CELL_CLASSES.values()
        config = self.config
        decoded_twice = config.token_weight or config.cell_decode_weight  # the head, the decoder
        return built_in and config.dynamics_steps == 1 and not decoded_twice

    def sync_readout(
        self, gather: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    ) -> None:
        """Copy the teacher's decoder into the readout."""
        self.rnn.readout.load_state_dict(gather(self.teacher.decoder.state_dict()))

    def compute(self, batch: Batch, generator: torch.Generator) -> Losses:
        config = self.config
        steps, current, decoded = self._timesteps(batch, generator)
        predicted = None
        with nullcontext() if self.trains_teacher else torch.no_grad():
            if config.token_weight and self.trains_teacher:
                memory, predicted = encode_and_predict(self.teacher, batch, steps)
            else:
                memory = self.teacher.encode(batch.inputs, steps)
        parts: dict[str, Tensor] = {}
        if self.trains_cell:
            with self.overlap(urgent=True):
                labels = memory if config.joint else memory.detach()
                stepped = self._step(batch, labels, steps, generator)
                parts["dynamics"] = self._dynamics(stepped, labels)
                if config.cell_decode_weight:
                    reached = self._decode_cell(batch, stepped, generator)
                    parts["cell_decode"] = reached.loss(self.shard)
                    if config.next_weight:
                        parts["cell_next"] = reached.next_loss(self.shard)
        if self.trains_teacher:
            rows = torch.arange(len(steps), device=steps.device)[:, None]
            with self.overlap():
                every = current.shape == steps.shape
                compared = self.shard.gather(memory if every else memory[rows, current])
                samples = config.uniformity_samples
                parts["uniformity"] = uniformity_loss(compared, samples, generator)
            futures = decode_futures(
                self.teacher,
                batch,
                memory[rows, decoded],
                steps.gather(1, decoded),
                config.future_length,
            )
            parts["decode"] = futures.loss(self.shard)
            if config.next_weight:
                parts["next"] = futures.next_loss(self.shard)
            if predicted is not None:
                space = self.teacher.space
                parts["token"] = prediction_loss(predicted, batch.targets, space, self.shard)
        self.overlap.join()
        weights = {
            "decode": config.decode_weight,
            "dynamics": config.dynamics_weight,
            "uniformity": config.uniformity_weight,
            "next": config.next_weight,
            "token": config.token_weight,
            "cell_decode": config.cell_decode_weight,
            "cell_next": config.cell_decode_weight * config.next_weight,
        }
        return total_loss(
            {name: (weight, parts[name]) for name, weight in weights.items() if name in parts}
        )

    def _timesteps(
        self, batch: Batch, generator: torch.Generator
    ) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B P"], Int[Tensor, "B A"]]:
        """Consecutive steps to encode, and the indices of two kinds among them: all m_t,
        without an m_{t+1} that is a label only, and the m_t to decode.

        Step -1 is the empty memory, which adds the pair of a sequence's first step.
        """
        rows, length = self.shard.whole(len(batch.inputs)), batch.inputs.shape[1]
        device = batch.inputs.device
        if self.stream and self.config.timesteps == 1:
            steps, decoded = self._stream_pair(rows, generator, device)
            return self.shard.rows(steps), self.shard.rows(decoded), self.shard.rows(decoded)
        before = int(self.config.learn_start)
        states = length + before
        steps = torch.arange(-before, length, device=device).expand(rows, states)
        current = steps + before
        decoded = current[:, before:]
        if 0 < self.config.timesteps < states - 1:
            # A run of steps on the ring of all states, so that all states are equally likely.
            begin = sample_steps(rows, 1, states, generator, device)
            pairs = max(self.config.timesteps, self.config.dynamics_steps)
            run = torch.arange(pairs + 1, device=device)
            steps = (begin + run) % states - before
            current = decoded = run[:-1].expand(rows, -1)
        count = self.config.decode_timesteps
        if 0 < count < decoded.shape[1]:
            decoded = decoded.gather(
                1, sample_steps(rows, count, decoded.shape[1], generator, device)
            )
        return self.shard.rows(steps), self.shard.rows(current), self.shard.rows(decoded)

    def _stream_pair(
        self, rows: int, generator: torch.Generator, device: torch.device
    ) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B 1"]]:
        """Two successive steps of each window of a stream (more with `dynamics_steps`).

        Most rows have a whole context, some one of random length, and a few start from the empty
        memory.
        """
        context = self.teacher.config.context_length
        first = torch.full((rows, 1), context - 1, device=device)
        short = self.empty_start_rows(rows)
        first[:short] = sample_steps(short, 1, context, generator, device)
        decoded = torch.zeros_like(first)
        if self.config.learn_start:
            some = max(1, rows // 32)
            first[:some], decoded[:some] = -1, 1
        return first + torch.arange(self.config.dynamics_steps + 1, device=device), decoded

    def _step(
        self,
        batch: Batch,
        memory: Float[Tensor, "B S M D"],
        steps: Int[Tensor, "B S"],
        generator: torch.Generator,
    ) -> CellSteps:
        """Segments of steps of the cell from the memories of the teacher, all at once."""
        before, after = steps[:, :-1], steps[:, 1:]
        token = at_steps(batch.inputs, after.clamp(min=0))
        real = after == before + 1  # from the end of a sequence to its start there is no step
        weight = torch.where(before >= 0, 1.0, self.config.start_weight)
        segments = _Segments(real, self.config.dynamics_steps)
        start = self._noisy(segments.starts(memory).flatten(0, 1), generator)
        tokens = segments.pairs(token).flatten(0, 1)  # (B·P, K)
        if segments.length == 1:
            predicted = self.rnn.unroll_last(tokens, start)[:, None]
        else:
            predicted = self.rnn.unroll(tokens, start)
        return CellSteps(
            predicted.unflatten(0, segments.inside.shape[:2]),
            segments.pairs(memory[:, 1:]),
            segments.pairs(weight) * segments.inside,
            real.float(),
            segments.pairs(after).where(segments.inside, batch.inputs.shape[1]),
        )

    def _dynamics(self, stepped: CellSteps, memory: Float[Tensor, "B S M D"]) -> Float[Tensor, ""]:
        """L^dyn of the cell's steps and the teacher's memories."""
        loss = dynamics_loss(stepped.memory, stepped.label, stepped.weight, self.shard)
        if self.config.normalize_dynamics:
            still = memory.detach()
            distance = dynamics_loss(still[:, :-1], still[:, 1:], stepped.real, self.shard)
            loss = loss / distance.clamp(min=1e-6)
        return loss

    def _decode_cell(
        self, batch: Batch, stepped: CellSteps, generator: torch.Generator
    ) -> DecodedFutures:
        """The decoded futures of the cell's memories, of as many as of the teacher's."""
        memory, after = stepped.memory.flatten(1, 2), stepped.after.flatten(1, 2)
        count, found = self.config.decode_timesteps, after.shape[1]
        if 0 < count < found:
            rows = self.shard.whole(len(after))
            chosen = sample_steps(rows, count, found, generator, after.device)
            chosen = self.shard.rows(chosen)
            memory, after = at_steps(memory, chosen), after.gather(1, chosen)
        return decode_futures(self.teacher, batch, memory, after, self.config.future_length)

    def _noisy(
        self, memory: Float[Tensor, "N M D"], generator: torch.Generator
    ) -> Float[Tensor, "N M D"]:
        """The memories with normal noise, whose deviation is uniform in 0..`memory_noise`."""
        largest = self.config.memory_noise
        if not largest:
            return memory
        rows = self.shard.whole(len(memory))  # every shard draws for the whole batch
        drawn = {"generator": generator, "device": generator.device}
        deviation = largest * torch.rand(rows, 1, 1, **drawn)
        noise = deviation * torch.randn(rows, *memory.shape[1:], **drawn)
        return memory + self.shard.rows(noise).to(memory)


class _Segments:
    """A pairs of successive memories, divided into P segments of K.

    The last segment overlaps the one before if they do not divide evenly. One that holds the end of
    a sequence begins at the start that follows it, so that the steps from the empty memory are
    trained as often as others.
    """

    def __init__(self, real: Bool[Tensor, "B A"], length: int) -> None:
        self.length = length
        if length == 1:
            self.inside = real[..., None]
            """Whether each pair of each segment is a step of one sequence."""
            return
        pairs, step = real.shape[1], torch.arange(length, device=real.device)
        place = torch.arange(-(-pairs // length), device=real.device) * length
        place = place.clamp(max=pairs - length)
        left_out = torch.where(real[:, place[:, None] + step], 0, step + 1).amax(-1)
        self.inside = step < length - left_out[..., None]
        self._first = place + left_out
        self._pairs = (self._first[..., None] + step).clamp(max=pairs - 1)

    def starts(self, states: Float[Tensor, "B S M D"]) -> Float[Tensor, "B P M D"]:
        """The memory that each segment starts from."""
        return states[:, :-1] if self.length == 1 else at_steps(states, self._first)

    def pairs(self, each: Tensor) -> Tensor:
        """What belongs to the pairs, (B, A, ...), by segment: (B, P, K, ...)."""
        if self.length == 1:
            return each[:, :, None]
        return at_steps(each, self._pairs.flatten(1)).unflatten(1, self._pairs.shape[1:])


class Pretrain(SMT):
    """SMT's losses of the teacher alone, decode_weight · L^dec + uniformity_weight · L^unif (and
    next_weight, token_weight), at the same timesteps."""

    trains_cell = False

    def __init__(
        self,
        teacher: Teacher,
        rnn: RNN,
        config: SMTConfig | None = None,
        *,
        stream: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(teacher, rnn, config, stream=stream, **settings)
        self.trains_teacher = True

    def _timesteps(
        self, batch: Batch, generator: torch.Generator
    ) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B P"], Int[Tensor, "B A"]]:
        """Those of SMT without the m_{t+1} that are labels only."""
        steps, current, decoded = super()._timesteps(batch, generator)
        first = current[:, :1]  # the m_t are consecutive
        return steps.gather(1, current), current - first, decoded - first
