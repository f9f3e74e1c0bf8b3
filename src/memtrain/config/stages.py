"""The stages, in order: pretraining of the teacher, SMT, DMT and BPTT."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

from memtrain.config.validation import (
    CUSTOM_PATH,
    Bounds,
    Checked,
    Fraction,
    Length,
    Options,
    Weight,
)
from memtrain.errors import MemtrainError

OPTIMIZERS = ("adamw", "muon")
"""Optimizers by name; any other is a class, package.module:Class."""
Schedule = Literal["constant", "cosine", "linear", "wsd"]
BETAS, DECAY = (0.9, 0.95), 0.2

FutureLength = Annotated[int, Bounds(1, 2**20, hint="the paper uses 64")]
UniformitySamples = Annotated[int, Bounds(2, hint="the loss compares pairs")]
Rollout = Literal["unrolled", "carried", "picard"]
SWEEPS = 8
STREAM_ROLLOUT = 256
"""Steps per rollout on a stream unless the config sets it; other sequences have an end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig(Checked):
    """Options of every stage: steps, batch, optimizer, schedule and early stopping."""

    steps: Annotated[int, Bounds(0, 10**12)] = 0
    """Optimizer steps; 0 skips the stage."""
    seconds: Annotated[float, Bounds(0, 10**9)] = 0.0
    """Time limit of the stage, to which its schedule is shortened; compilation counts, evaluation
    and saving do not (0: no limit)."""
    batch_size: Annotated[int, Bounds(1, 2**20)] = 32
    """Sequences per step."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup: Fraction = 0.01
    """Fraction of the steps over which the learning rate rises linearly from 0."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: constant, cosine or linear to the floor, or wsd, which stays
    at the peak and falls linearly at the end."""
    floor: Fraction = 0.0
    """Last learning rate of cosine, linear and wsd, as a fraction of the peak."""
    decay: Fraction = DECAY
    """Fraction of the steps over which the learning rate of wsd falls."""
    optimizer: str = "adamw"
    """adamw; muon, for matrices of hidden layers, with AdamW for the rest; or a class of torch or
    yours, such as torch.optim:NAdam."""
    optimizer_options: Options = field(default_factory=dict)
    """Arguments of the optimizer's class, such as momentum 0.9; its rate, its weight decay and
    AdamW's betas have fields of their own."""
    weight_decay: Weight = 0.01
    """Decoupled weight decay, on matrices and embeddings only."""
    betas: tuple[float, float] = BETAS
    """AdamW's decay rates."""
    clip_norm: float = 1.0
    """Largest gradient norm; teacher and RNN are clipped separately."""
    accumulate: Annotated[int, Bounds(1)] = 1
    """Micro-batches per step: less device memory, about a third more time, the same step."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: stop, or skip the update."""
    skip_limit: Annotated[int, Bounds(1)] = 3
    """With skip: stop after this many such steps in a row."""
    patience: Annotated[int, Bounds(0)] = 0
    """End the stage after this many evaluations in a row without a lower held-out loss of what it
    trains, the RNN or in pretraining the teacher (0: never). With a curriculum, those after it."""
    curriculum: tuple[tuple[int, int], ...] = ()
    """Train on shorter sequences first: pairs of a length and its steps, in rising order. 32 1000
    64 500: 1,000 steps at 32 tokens, 500 at 64, and the rest of `steps` at the length of the data
    (of a stream: at `sequence_length` of BPTT or `rollout_length` of DMT)."""

    def check(self) -> None:
        if self.seconds and not self.steps:
            raise MemtrainError(
                f"seconds={self.seconds} with steps=0: the stage is skipped; set steps too"
            )
        if self.batch_size % self.accumulate:
            raise MemtrainError(
                f"accumulate={self.accumulate}: must divide batch_size={self.batch_size}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise MemtrainError(f"learning_rate={self.learning_rate}: must be above 0 and finite")
        if not self.clip_norm > 0:
            raise MemtrainError(f"clip_norm={self.clip_norm}: must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise MemtrainError(f"betas={self.betas}: each must be at least 0 and below 1")
        self._check_optimizer()
        self._check_schedule()
        self._check_curriculum()

    def _check_optimizer(self) -> None:
        named = self.optimizer in OPTIMIZERS
        if not named and not CUSTOM_PATH.fullmatch(self.optimizer):
            raise MemtrainError(
                f"optimizer={self.optimizer!r}: must be {' or '.join(OPTIMIZERS)}, or a class as "
                "module:Class, such as torch.optim:NAdam"
            )
        if not named and self.betas != BETAS:
            raise MemtrainError(
                f"betas={self.betas}: are AdamW's, and optimizer={self.optimizer}; its own are "
                "optimizer_options"
            )
        for name, instead in (
            ("lr", "learning_rate"),
            ("weight_decay", "weight_decay"),
            *([("betas", "betas")] if named else []),
        ):
            if name in self.optimizer_options:
                raise MemtrainError(
                    f"optimizer_options: {name} has its own field; set {instead} instead"
                )

    def _check_schedule(self) -> None:
        if self.floor and self.schedule == "constant":
            raise MemtrainError(
                f"floor={self.floor}: a constant schedule does not fall; set schedule to cosine, "
                "linear or wsd"
            )
        if self.decay != DECAY and self.schedule != "wsd":
            raise MemtrainError(
                f"decay={self.decay}: belongs to schedule=wsd, and this one is {self.schedule}; "
                "set schedule to wsd"
            )
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise MemtrainError(
                f"warmup={self.warmup} with decay={self.decay}: are fractions of the same steps, "
                "so their sum must be at most 1"
            )

    def _check_curriculum(self) -> None:
        shown = f"curriculum={' '.join(str(one) for pair in self.curriculum for one in pair)}"
        for length, steps in self.curriculum:
            if not (1 <= length <= 2**24 and steps >= 1):
                raise MemtrainError(
                    f"{shown}: {length} tokens for {steps} steps; both must be at least 1, and a "
                    "length at most 16,777,216"
                )
        lengths = [length for length, _ in self.curriculum]
        if any(one >= other for one, other in pairwise(lengths)):
            raise MemtrainError(f"{shown}: its lengths must rise; give pairs of a length and steps")
        taken = sum(steps for _, steps in self.curriculum)
        if self.curriculum and taken >= self.steps:
            raise MemtrainError(
                f"{shown}: takes {taken} steps of steps={self.steps}, which leaves none for the "
                "whole length; raise steps"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig(StageConfig):
    """The teacher alone, before SMT: SMT's losses without the dynamics loss. Timesteps, future
    length and weights are those of `smt`. With `smt.train_teacher` off, the paper's theory: first
    the teacher, then the cell from its labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SMTConfig(StageConfig):
    """Supervised Memory Training: teacher and cell together, without unrolling."""

    timesteps: Annotated[int, Bounds(0)] = 1
    """Consecutive timesteps of a sequence to train, at a random place (0: all)."""
    decode_timesteps: Annotated[int, Bounds(0)] = 0
    """Random timesteps among them at which the decoder is trained (0: all)."""
    future_length: FutureLength = 64
    """Targets that a memory has to predict, T_f."""
    train_teacher: bool = True
    """Train the teacher; off: it stays as `pretrain` made it, and only the cell learns."""
    joint: bool = True
    """Let the dynamics loss train the teacher too; off: it trains only the cell."""
    decode_weight: Weight = 1.0
    """Weight of the decoding loss."""
    next_weight: Weight = 0.0
    """Additional weight of the next target alone, the one that the RNN predicts (the paper: 0)."""
    token_weight: Weight = 0.0
    """Weight of an auxiliary next-token loss on the causal encoder's hidden states before its last
    block. It trains the encoder on every token (the paper: 0)."""
    dynamics_weight: Weight = 0.1
    """Weight of the dynamics loss."""
    dynamics_steps: Annotated[int, Bounds(1)] = 1
    """Divide the timesteps into segments of this length: from the teacher's memory at the start of
    each, the cell takes as many steps, each compared with the teacher's memory; gradients pass
    through all of them (the paper: 1)."""
    dynamics_labels: Literal["all", "last"] = "all"
    """Which memories of a segment are compared with the teacher's: all of them, or the last alone,
    so that the teacher encodes and decodes only where segments begin and end."""
    own_starts: Fraction = 0.0
    """Fraction of the sequences in which a segment starts where the cell itself ended the segment
    before, without gradients, and not at the teacher's memory (the paper: 0)."""
    own_sweeps: Annotated[int, Bounds(1)] = 1
    """Passes over all segments that these starts come from: with n, the cell has taken up to n
    segments from a memory of the teacher before."""
    normalize_dynamics: bool = False
    """Divide the dynamics loss by the mean squared distance between successive memories, so that
    constant memories do not reduce it (the paper: off)."""
    memory_noise: Weight = 0.0
    """Noise on the memories that the cell steps from, so that it learns to correct errors: normal,
    with a standard deviation drawn per memory between 0 and this (the paper: 0)."""
    cell_decode_weight: Weight = 0.0
    """Weight of the decoding losses, that of the next target included, on the memories after the
    cell's own steps, of as many as are decoded of the teacher's (the paper: 0)."""
    uniformity_weight: Weight = 0.001
    """Weight of the uniformity loss."""
    uniformity_samples: UniformitySamples = 512
    """Largest number of memory tokens in the uniformity loss."""
    learn_start: bool = True
    """Train the first step too, from the empty memory to the memory of the first token."""
    start_weight: Weight = 1.0
    """Weight of steps from the empty memory in the dynamics loss, relative to other steps. Raise
    it if the first token is rare and decisive."""
    short_contexts: Fraction = 0.25
    """Fraction of a stream's windows whose context is cut to a random length."""

    def check(self) -> None:
        StageConfig.check(self)
        if 0 < self.timesteps < self.dynamics_steps and self.timesteps != 1:
            raise MemtrainError(
                f"dynamics_steps={self.dynamics_steps}: must be at most timesteps={self.timesteps}"
            )
        if self.own_starts and self.dynamics_steps == 1:
            raise MemtrainError(
                f"own_starts={self.own_starts:g} with dynamics_steps=1: needs segments of several "
                "steps; set dynamics_steps, for example to 16"
            )
        if self.own_sweeps > 1 and not self.own_starts:
            raise MemtrainError(
                f"own_sweeps={self.own_sweeps} with own_starts=0: no segment starts at the cell's "
                "own memory; set own_starts above 0"
            )
        if self.dynamics_labels == "last" and self.normalize_dynamics:
            raise MemtrainError(
                "normalize_dynamics=True with dynamics_labels=last: needs the teacher's memory at "
                "every timestep; set dynamics_labels to all"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DMTConfig(StageConfig):
    """DAgger Memory Training: the cell runs on its own memories, the teacher labels them."""

    learning_rate: float = 3e-5
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: constant, cosine or linear to the floor, or wsd, which stays
    at the peak and falls linearly at the end."""
    rollout: Rollout = "unrolled"
    """Where the memories to train on come from: unrolled, one step after another (the paper);
    carried, each row's memory is kept from one training step to the next, which takes `segment`
    steps; picard, `sweeps` steps from all of the teacher's memories at once."""
    rollout_length: Annotated[int, Bounds(0)] = 0
    """Steps per rollout (0: the whole sequence; on a stream 256)."""
    sweeps: Annotated[int, Bounds(1)] = SWEEPS
    """Steps of the cell from each of the teacher's memories, with rollout=picard."""
    empty_start: Fraction = 1.0
    """Fraction of the rollouts that start from the empty memory; the others start from the
    teacher's."""
    start_weight: Weight = 1.0
    """Weight of steps from the empty memory in the dynamics loss, relative to other steps."""
    label_stride: Annotated[int, Bounds(1)] = 1
    """Steps per teacher label, at a random offset."""
    through_time: bool = False
    """Backpropagate through the whole rollout; off: through `segment` steps, all in parallel."""
    segment: Annotated[int, Bounds(1)] = 1
    """Steps before each label that gradients pass through (the paper: 1)."""
    dynamics_weight: Weight = 10.0
    """Weight of the distance to the teacher's memories."""
    readout_weight: Weight = 1.0
    """Weight of the readout's loss on the rolled-out memories."""
    readout_stride: Annotated[int, Bounds(1)] = 1
    """Steps per memory that trains the readout, at a random offset."""
    decode_weight: Weight = 0.0
    """Weight of the teacher's decoding loss on the cell's memories (the paper: 0)."""
    future_length: FutureLength = 64
    """Targets per memory in that loss, and in the teacher's own."""
    train_teacher: bool = False
    """Train the teacher too, by its own decoding and uniformity loss on its own memories; the
    distance to the cell's memories does not train it (the paper: off, a frozen teacher)."""
    teacher_decode_weight: Weight = 1.0
    """Weight of the teacher's own decoding loss, if it is trained."""
    uniformity_weight: Weight = 0.01
    """Weight of the teacher's uniformity loss, if it is trained."""
    uniformity_samples: UniformitySamples = 512
    """Largest number of memory tokens in the uniformity loss."""

    def check(self) -> None:
        StageConfig.check(self)
        if self.rollout != "unrolled" and self.through_time:
            raise MemtrainError(
                f"through_time=True with rollout={self.rollout}: no rollout to pass gradients "
                "through; set segment to the number of steps that they pass through"
            )
        if self.rollout == "carried" and self.accumulate > 1:
            raise MemtrainError(
                f"accumulate={self.accumulate} with rollout=carried: each row's memory is kept, so "
                "a batch cannot be split; set accumulate=1 and a smaller batch_size"
            )
        if self.rollout != "picard" and self.sweeps != SWEEPS:
            raise MemtrainError(
                f"sweeps={self.sweeps}: belongs to rollout=picard, and rollout={self.rollout}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BPTTConfig(StageConfig):
    """Backpropagation through time from the empty memory: the baseline, or a last stage."""

    truncate: Annotated[int, Bounds(0)] = 0
    """Cut the gradient every n steps; the memory is carried on (0: never)."""
    sequence_length: Length = 256
    """Tokens per sequence drawn from a stream; other data have a length of their own."""
    recompute: Annotated[int, Bounds(0)] = 0
    """Keep only every n-th memory and recompute the steps between in the backward pass: less
    memory (least near the square root of the length) for a third more time (0: keep all)."""
    sweeps: Annotated[int, Bounds(0)] = 0
    """Train the pieces that `truncate` makes all at once, which needs few sequential steps: each
    starts from the memory that the cell has when it reads as many pieces before it, from the empty
    memory and without gradients (0: one piece after another, the memory is carried on)."""

    def check(self) -> None:
        StageConfig.check(self)
        if self.sweeps and not self.truncate:
            raise MemtrainError(
                f"sweeps={self.sweeps} with truncate=0: the sequence is one piece; set truncate to "
                "the steps of a piece, for example 16"
            )
        if self.sweeps and self.recompute:
            raise MemtrainError(
                f"recompute={self.recompute} with sweeps={self.sweeps}: pieces that are trained at "
                "once are kept; set recompute=0"
            )
