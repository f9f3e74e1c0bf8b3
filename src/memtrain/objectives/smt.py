"""Supervised Memory Training: the teacher learns memories, the cell learns to update them.

Nothing is unrolled. The cell is applied once to every pair (m_t, x_{t+1}), all pairs at once, so
no gradient passes through more than one application of it. With `dynamics_steps` K it takes K
steps from every K-th memory, all segments at once (segments.py). The paper's theory has two stages:
`Pretrain` trains the teacher alone, then SMT with `train_teacher` off trains the cell alone.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

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
from memtrain.objectives.segments import Segments
from memtrain.shapes import Batch, Losses, at_steps


class States(NamedTuple):
    """Timesteps of each sequence, and the indices of two kinds among them."""

    steps: Int[Tensor, "B S"]
    """-1 is the empty memory, before the first token."""
    compared: Int[Tensor, "B A"]
    """In the uniformity loss."""
    decoded: Int[Tensor, "B A"]


class CellSteps(NamedTuple):
    """P segments of K steps of the cell, each from a memory of the teacher; L = K of these steps,
    or the last alone, are compared with the teacher."""

    memory: Float[Tensor, "B P K M D"]
    after: Int[Tensor, "B P K"]
    """The timestep of each memory; beyond the end, where nothing is to be predicted, if it is none
    of the sequence."""
    compared: Float[Tensor, "B P L M D"]
    label: Float[Tensor, "B P L M D"]
    """The teacher's memory after each of these steps."""
    weight: Float[Tensor, "B P L"]
    """In the dynamics loss."""


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
        after = config.dynamics_steps - 1 if config.timesteps == 1 else 0  # a segment at its end
        return self.teacher.config.context_length + config.future_length + after

    def check_batch(self, tokens: object, targets: object) -> Batch:
        batch, needed = super().check_batch(tokens, targets), self.tokens_needed()
        if self.stream and self.config.timesteps == 1 and batch.inputs.shape[1] < needed:
            raise MemtrainError(
                f"tokens={tuple(batch.inputs.shape)}: windows of a stream must have at least "
                f"{needed} tokens, context and future; or leave out stream=True"
            )
        steps, least = self.config.dynamics_steps, self.shortest_length()
        if steps > 1 and batch.inputs.shape[1] < least:
            raise MemtrainError(
                f"dynamics_steps={steps}: sequences must have at least {least} tokens, and tokens "
                f"are {tuple(batch.inputs.shape)}; lower it, or take longer sequences"
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
        (steps, compared, decoded), segments = self._chosen(batch, generator)
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
                stepped = self._step(batch, labels, segments, generator)
                parts["dynamics"] = self._dynamics(stepped, labels, segments)
                if config.cell_decode_weight:
                    reached = self._decode_cell(batch, stepped, generator)
                    parts["cell_decode"] = reached.loss(self.shard)
                    if config.next_weight:
                        parts["cell_next"] = reached.next_loss(self.shard)
        if self.trains_teacher:
            rows = torch.arange(len(steps), device=steps.device)[:, None]
            with self.overlap():
                every = compared.shape == steps.shape
                spread = self.shard.gather(memory if every else memory[rows, compared])
                samples = config.uniformity_samples
                parts["uniformity"] = uniformity_loss(spread, samples, generator)
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

    def _chosen(self, batch: Batch, generator: torch.Generator) -> tuple[States, Segments]:
        """The states that the teacher encodes, and the segments of the cell's steps."""
        states = self._states(batch, generator)
        segments = Segments(states.steps, self.config.dynamics_steps)
        states = self._encoded(states, segments)
        return states._replace(decoded=self._some(states.decoded, generator)), segments

    def _states(self, batch: Batch, generator: torch.Generator) -> States:
        """Consecutive timesteps. Those to compare are all m_t, without an m_{t+1} that is a label
        only.

        Step -1 is the empty memory, which adds the pair of a sequence's first step.
        """
        rows, length = self.shard.whole(len(batch.inputs)), batch.inputs.shape[1]
        device = batch.inputs.device
        if self.stream and self.config.timesteps == 1:
            steps, decoded = self._stream_pair(rows, generator, device)
            decoded = self.shard.rows(decoded)
            return States(self.shard.rows(steps), decoded, decoded)
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
        return States(*(self.shard.rows(one) for one in (steps, current, decoded)))

    def _encoded(self, states: States, segments: Segments) -> States:
        """The states that the teacher encodes: all, or where segments begin and end."""
        if not self.sparse:
            return states
        found = segments.count
        kept = torch.cat([segments.first, segments.last], dim=1)
        ends = torch.arange(found, 2 * found, device=kept.device).expand(len(kept), -1)
        return States(states.steps.gather(1, kept), ends, ends)

    @property
    def sparse(self) -> bool:
        """Whether the teacher encodes only where segments begin and end."""
        return self.config.dynamics_labels == "last" and self.config.dynamics_steps > 1

    def _some(self, steps: Int[Tensor, "B A"], generator: torch.Generator) -> Int[Tensor, "B _"]:
        """`decode_timesteps` of each row, at random; all of them if there are not more."""
        count, found = self.config.decode_timesteps, steps.shape[1]
        if not 0 < count < found:
            return steps
        rows = self.shard.whole(len(steps))
        chosen = sample_steps(rows, count, found, generator, steps.device)
        return steps.gather(1, self.shard.rows(chosen))

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
        if self.config.learn_start and rows > 1:
            some = max(1, rows // 32)
            first[:some], decoded[:some] = -1, 1
        elif self.config.learn_start:  # the only row: some of the time, to train other steps too
            drawn = torch.rand(1, 1, generator=generator, device=generator.device).to(device)
            decoded = (drawn < 1 / 32).long()
            first = first.where(decoded == 0, -1)
        return first + torch.arange(self.config.dynamics_steps + 1, device=device), decoded

    def _step(
        self,
        batch: Batch,
        memory: Float[Tensor, "B S M D"],
        segments: Segments,
        generator: torch.Generator,
    ) -> CellSteps:
        """Segments of steps of the cell from the memories of the teacher, all at once."""
        count, rows = segments.count, len(memory)
        before, after = segments.pairs(segments.before), segments.pairs(segments.after)
        weight = torch.where(before >= 0, 1.0, self.config.start_weight) * segments.inside
        start = memory[:, :count] if self.sparse else segments.starts(memory)
        start = self._noisy(start.flatten(0, 1), generator)
        tokens = at_steps(batch.inputs, after.flatten(1).clamp(min=0))
        tokens = tokens.unflatten(1, after.shape[1:]).flatten(0, 1)  # (B·P, K)
        if self.config.own_starts:
            start = self._own_starts(start, tokens, segments, generator)
        if segments.length == 1:
            reached = self.rnn.unroll_last(tokens, start)[:, None]
        else:
            reached = self.rnn.unroll(tokens, start)
        reached = compared = reached.unflatten(0, (rows, count))
        if self.sparse:
            label = memory[:, count:, None]
            compared = segments.at_last(reached)[:, :, None]
            weight = segments.at_last(weight)[:, :, None]
        else:
            label = segments.pairs(memory[:, 1:])
        after = after.where(segments.inside, batch.inputs.shape[1])
        return CellSteps(reached, after, compared, label, weight)

    def _dynamics(
        self, stepped: CellSteps, memory: Float[Tensor, "B S M D"], segments: Segments
    ) -> Float[Tensor, ""]:
        """L^dyn of the cell's steps and the teacher's memories."""
        loss = dynamics_loss(stepped.compared, stepped.label, stepped.weight, self.shard)
        if self.config.normalize_dynamics:
            still, real = memory.detach(), segments.real.float()
            distance = dynamics_loss(still[:, :-1], still[:, 1:], real, self.shard)
            loss = loss / distance.clamp(min=1e-6)
        return loss

    def _decode_cell(
        self, batch: Batch, stepped: CellSteps, generator: torch.Generator
    ) -> DecodedFutures:
        """The decoded futures of the cell's memories, of as many as of the teacher's."""
        memory, after = stepped.memory.flatten(1, 2), stepped.after.flatten(1, 2)
        every = torch.arange(after.shape[1], device=after.device).expand(len(after), -1)
        chosen = self._some(every, generator)
        if chosen is not every:
            memory, after = at_steps(memory, chosen), after.gather(1, chosen)
        return decode_futures(self.teacher, batch, memory, after, self.config.future_length)

    def _own_starts(
        self,
        start: Float[Tensor, "N M D"],
        tokens: Int[Tensor, "N K"] | Float[Tensor, "N K X"],
        segments: Segments,
        generator: torch.Generator,
    ) -> Float[Tensor, "N M D"]:
        """Where segments start: in some sequences where the cell ended the segment before."""
        rows = self.shard.whole(len(segments.first))
        drawn = torch.rand(rows, 1, generator=generator, device=generator.device)
        own = self.shard.rows(drawn).to(start.device) < self.config.own_starts
        # The first segment has none before it; the last may overlap the one before.
        follows = segments.last[:, :-1] == segments.first[:, 1:]
        own = F.pad(own & follows, (1, 0))[..., None, None]
        taught = start.unflatten(0, own.shape[:2])
        for _ in range(self.config.own_sweeps):
            with torch.no_grad():
                ended = self.rnn.unroll(tokens, start)[:, -1]
            before = ended.to(taught).unflatten(0, own.shape[:2]).roll(1, dims=1)
            start = before.where(own, taught).flatten(0, 1)
        return start

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

    def _encoded(self, states: States, segments: Segments) -> States:
        """Those of SMT without the memories that are starts or labels only."""
        if self.sparse:
            ends = torch.arange(segments.count, device=segments.last.device)
            ends = ends.expand(len(segments.last), -1)
            return States(states.steps.gather(1, segments.last), ends, ends)
        steps, compared, decoded = states
        first = compared[:, :1]  # the m_t are consecutive
        return States(steps.gather(1, compared), compared - first, decoded - first)
