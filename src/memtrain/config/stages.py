"""How it learns: SMT, DMT and BPTT, with the optimizer and schedule that each stage has."""

import math
from dataclasses import dataclass
from typing import Literal

from memtrain.config.validation import at_least, check_bounds, check_fraction
from memtrain.errors import MemtrainError

STREAM_ROLLOUT = 256
"""Steps per rollout on a stream unless the config sets it; other sequences have an end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """What every stage of a run has: how long, how much at once, and the optimizer (AdamW)."""

    steps: int = 0
    """Optimizer steps; 0 leaves the stage out."""
    seconds: float = 0.0
    """End the stage after this many seconds of training, if its steps take longer, its schedule
    included; compilation counts, evaluation and saving do not (0: no limit)."""
    batch_size: int = 32
    """Sequences in a step."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup: float = 0.01
    """Share of the steps in which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after the warm-up; cosine ends at 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices and embeddings only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    clip_norm: float = 1.0
    """Largest gradient norm; teacher and RNN are clipped apart."""
    accumulate: int = 1
    """Take a step's sequences in this many parts, one after another: less device memory, about a
    third more time, the same step."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or gradient is not finite: stop, or leave that step's update out."""
    skip_limit: int = 3
    """With skip: stop all the same after this many such steps in a row."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 0, "steps", "seconds", "weight_decay")
        if self.seconds and not self.steps:
            raise MemtrainError(
                f"seconds={self.seconds} with steps=0: the stage is left out; set steps, the most "
                "there may be"
            )
        at_least(self, 1, "batch_size", "accumulate", "skip_limit")
        if self.batch_size % self.accumulate:
            raise MemtrainError(
                f"accumulate={self.accumulate}: must divide batch_size={self.batch_size}"
            )
        check_fraction(self, "warmup")
        if not 0 < self.learning_rate < math.inf:
            raise MemtrainError(f"learning_rate={self.learning_rate}: must be above 0 and finite")
        if not self.clip_norm > 0:
            raise MemtrainError(f"clip_norm={self.clip_norm}: must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise MemtrainError(f"betas={self.betas}: each must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SMTConfig(StageConfig):
    """Supervised Memory Training: teacher and cell together, nothing is unrolled."""

    timesteps: int = 1
    """Timesteps of a sequence that are trained, a random run of them (0: all)."""
    decode_timesteps: int = 0
    """The decoder is asked at this many of them, at random (0: at all)."""
    future_length: int = 64
    """How many targets a memory has to predict, T_f."""
    joint: bool = True
    """Let the dynamics loss shape the teacher's memories too; off: it trains the cell alone."""
    decode_weight: float = 1.0
    """Weight of the decoding loss."""
    next_weight: float = 0.0
    """Weight of the decoding loss of the next target alone, on top of its share in the whole: it
    is what the RNN will be asked (the paper: 0)."""
    token_weight: float = 0.0
    """Weight of the loss of the next target at every token of the causal encoder, which its blocks
    but the last have to tell: they learn from all tokens, not from the few timesteps that are asked
    (the paper: 0; its encoder's tokens see the future)."""
    dynamics_weight: float = 0.1
    """Weight of the dynamics loss."""
    dynamics_steps: int = 1
    """Steps of the cell from each memory, each compared with the teacher's memory; gradients pass
    through all of them (the paper: 1)."""
    normalize_dynamics: bool = False
    """Divide the dynamics loss by the mean squared distance between successive memories, so that
    memories that stand still gain nothing (the paper: off)."""
    memory_noise: float = 0.0
    """Noise on the memories that the cell steps from, so that it learns to correct errors: normal,
    with a standard deviation drawn per memory between 0 and this (the paper: 0)."""
    uniformity_weight: float = 0.001
    """Weight of the uniformity loss."""
    uniformity_samples: int = 512
    """At most this many memory tokens enter the uniformity loss."""
    learn_start: bool = True
    """Add the label of the first step, empty memory -> memory of the first token."""
    start_weight: float = 1.0
    """How much a step from the empty memory counts in the dynamics loss, others count 1. A first
    token that is rare and decisive wants more."""
    short_contexts: float = 0.25
    """Share of a stream's windows whose context is cut to a random length."""

    def __post_init__(self) -> None:
        StageConfig.__post_init__(self)
        at_least(self, 1, "future_length", hint="the paper uses 64")
        at_least(self, 0, "timesteps", "decode_timesteps", "decode_weight", "next_weight")
        at_least(self, 0, "token_weight", "dynamics_weight", "uniformity_weight")
        at_least(self, 0, "memory_noise")
        at_least(self, 1, "dynamics_steps")
        if 0 < self.timesteps < self.dynamics_steps and self.timesteps != 1:
            raise MemtrainError(
                f"dynamics_steps={self.dynamics_steps}: must be at most timesteps={self.timesteps}"
            )
        at_least(self, 2, "uniformity_samples", hint="the loss compares pairs")
        check_fraction(self, "short_contexts")
        at_least(self, 0, "start_weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class DMTConfig(StageConfig):
    """DAgger Memory Training: the cell follows its own rollout, the teacher says where to go."""

    learning_rate: float = 3e-5
    """Peak learning rate."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """What the learning rate does after the warm-up; cosine ends at 0."""
    rollout_length: int = 0
    """Steps of a rollout (0: as many as the sequence has; on a stream 256)."""
    empty_start: float = 1.0
    """Share of the rollouts that start from the empty memory; the others from the teacher's."""
    start_weight: float = 1.0
    """How much a step from the empty memory counts in the dynamics loss, others count 1."""
    label_stride: int = 1
    """A teacher label at every n-th step of the rollout, at a random offset."""
    through_time: bool = False
    """Backpropagate through the whole rollout; off: through `segment` steps, all in parallel."""
    segment: int = 1
    """Steps that end at each label and that gradients pass through (the paper: 1)."""
    dynamics_weight: float = 10.0
    """Weight of the distance to the teacher's memories."""
    readout_weight: float = 1.0
    """Weight of the readout's loss on the rolled-out memories."""
    readout_stride: int = 1
    """The readout learns from every n-th of them, at a random offset."""
    decode_weight: float = 0.0
    """Weight of the teacher's decoder, telling the future from the cell's steps (the paper: 0)."""
    future_length: int = 64
    """How many targets it tells (with decode_weight)."""

    def __post_init__(self) -> None:
        StageConfig.__post_init__(self)
        at_least(self, 0, "rollout_length", "start_weight")
        at_least(self, 0, "dynamics_weight", "readout_weight", "decode_weight")
        at_least(self, 1, "future_length")
        at_least(self, 1, "label_stride", "readout_stride", "segment")
        check_fraction(self, "empty_start")


@dataclass(frozen=True, kw_only=True, slots=True)
class BPTTConfig(StageConfig):
    """Backpropagation through time from the empty memory: the baseline, or a last phase."""

    truncate: int = 0
    """Cut the gradient every n steps, the memory is carried on (0: never cut)."""
    sequence_length: int = 256
    """Tokens in a sequence drawn from a stream; other data have a length of their own."""
    recompute: int = 0
    """Keep only every n-th memory and compute the steps between anew when the gradient comes by:
    a fraction of the memory for a third more time, least near the square root of the sequence's
    length (0: keep everything)."""

    def __post_init__(self) -> None:
        StageConfig.__post_init__(self)
        at_least(self, 0, "truncate", "recompute")
        at_least(self, 1, "sequence_length")
