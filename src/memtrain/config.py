"""Every knob of a run, on one page.

A `RunConfig` is data + teacher + cell + up to three stages. All of it is frozen, validated when
made, and goes to JSON and back without loss. This module imports no torch, so that `--help` and
recipes are quick.
"""

import math
import re
from dataclasses import dataclass, field, fields
from typing import Literal

from memtrain.errors import MemtrainError, nearest

CUSTOM_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _at_least(config: object, minimum: int | float, *names: str, hint: str = "") -> None:
    for name in names:
        value = getattr(config, name)
        if not value >= minimum:  # nan is not either
            raise MemtrainError(f"{name}={value}: must be at least {minimum}{hint and '; ' + hint}")


def _fraction(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise MemtrainError(f"{name}={value}: must be between 0 and 1")


def _at_most(config: object, name: str, limit: int, why: str) -> None:
    if getattr(config, name) > limit:
        raise MemtrainError(f"{name}={getattr(config, name)}: must be at most {limit}, {why}")


MOST = {
    "sequence_length": 2**24,
    "vocab_size": 2**20,
    "depth": 2**20,
    "pairs": 2**20,
    "key_length": 4096,
    "value_length": 2**20,
    "key_symbols": 2**16,
    "value_symbols": 2**16,
    "examples": 2**20,
    "evaluate_length": 2**24,
    "context_length": 2**20,
    "future_length": 2**20,
    "encoder_layers": 256,
    "decoder_layers": 256,
    "layers": 256,
    "width": 2**16,
    "memory_tokens": 2**16,
    "memory_dim": 2**16,
    "heads": 1024,
    "head_dim": 2**14,
    "batch_size": 2**20,
    "steps": 10**12,
    "seconds": 10**9,
    "threads": 4096,
    "keep": 10**6,
    "evaluate_sequences": 2**24,
}
"""Far beyond any use: a config that says more is damaged or hostile."""


def _within(config: object) -> None:
    """Every size of a config is below its limit."""
    for one in fields(config):  # type: ignore[arg-type]
        value, limit = getattr(config, one.name), MOST.get(one.name)
        if limit is not None and value > limit:
            shown = value if value < 10**15 else "a number of that length"
            raise MemtrainError(f"{one.name}={shown}: must be at most {limit:,}")


# ----------------------------------------------------------------------------------------- data


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrieval:
    """Remember the token that follows the marker 0 and say it when the last 0 asks (gradients)."""

    kind: Literal["retrieval"] = "retrieval"
    sequence_length: int = 32
    """Tokens in a sequence."""
    vocab_size: int = 9
    """Symbols, the marker 0 among them."""
    noise: float = 0.0
    """Probability that the label is replaced by a random symbol."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 3, "sequence_length", hint="a marker, its token and the query")
        _at_least(self, 3, "vocab_size", hint="the marker and two symbols to tell apart")
        _fraction(self, "noise")


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Read a string, then say it backwards while reading zeros (memory capacity)."""

    kind: Literal["copy"] = "copy"
    sequence_length: int = 16
    """Tokens in a sequence: half of them are the string."""
    vocab_size: int = 8
    """Symbols, the delimiter 0 among them."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 2, "sequence_length", hint="one token and its answer")
        if self.sequence_length % 2:
            raise MemtrainError(
                f"sequence_length={self.sequence_length}: must be even, half of it is the string"
            )
        _at_least(self, 3, "vocab_size", hint="the delimiter and two symbols to tell apart")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Push what is read; 0 pops, and the popped symbol is the target (state tracking)."""

    kind: Literal["stack"] = "stack"
    sequence_length: int = 16
    """Operations in a sequence."""
    vocab_size: int = 8
    """Symbols, the pop 0 among them."""
    depth: int = 4
    """The stack never grows beyond this depth."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 2, "sequence_length", hint="a push and a pop")
        _at_least(self, 3, "vocab_size", hint="the pop and two symbols to tell apart")
        _at_least(self, 1, "depth")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall:
    """Read key-value pairs, then a key, and say its value (associative recall).

    Keys and values are strings over alphabets of their own; 0 is the blank that is read while a
    value of several symbols is said. Keys of one sequence are distinct.
    """

    kind: Literal["recall"] = "recall"
    pairs: int = 4
    """Associations in a sequence."""
    key_length: int = 1
    """Symbols in a key."""
    value_length: int = 1
    """Symbols in a value."""
    key_symbols: int = 8
    """Size of the keys' alphabet."""
    value_symbols: int = 8
    """Size of the values' alphabet."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 1, "pairs", "key_length", "value_length")
        _at_least(self, 2, "key_symbols", "value_symbols", hint="something to tell apart")
        keys = self.key_symbols**self.key_length
        _at_most(self, "pairs", keys, f"that is how many keys {self.key_symbols} symbols can spell")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Infer y = (a x + b) mod V from examples and say y for the next x (in-context learning)."""

    kind: Literal["arithmetic"] = "arithmetic"
    vocab_size: int = 11
    """The modulus V; inputs and answers are 0..V-1."""
    examples: int = 8
    """Pairs (x, y) in a sequence."""
    difficulty: int = 11
    """a and b are drawn from 0..difficulty-1, once a sequence."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 2, "vocab_size")
        _at_least(self, 1, "examples", "difficulty")
        _at_most(self, "difficulty", self.vocab_size, "larger rules repeat smaller ones modulo V")


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, 8x8 pixels of 17 grey levels in raster order.

    A sequence is a start token followed by the first 63 pixels; its targets are the 64 pixels.
    """

    kind: Literal["digits"] = "digits"
    held_out: float = 0.15
    """Share of the images kept for evaluation."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise MemtrainError(
                f"held_out={self.held_out}: must lie between 0 and 1, both excluded"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Custom:
    """A task of yours: a class with `vocab_size`, `sequence_length` and `sample`."""

    kind: Literal["custom"] = "custom"
    path: str = "my_task:MyTask"
    """Where the class is, as package.module:Class. The current folder is searched too."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Keyword arguments of the class."""

    def __post_init__(self) -> None:
        if not CUSTOM_PATH.fullmatch(self.path):
            raise MemtrainError(f"path={self.path!r}: must look like package.module:Class")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A prepared data set: one long sequence of tokens, of which windows are drawn."""

    kind: Literal["stream"] = "stream"
    path: str = ""
    """Folder that `memtrain data NAME` prepared."""
    evaluate_length: int = 1024
    """Tokens in a held-out sequence. Those of documents start where a document starts."""
    cross_documents: bool = True
    """Training windows may reach from one document into the next, as in the paper; off: only
    documents that hold a whole window are trained on."""
    document_starts: float = 0.5
    """Of the training windows that are read from nothing, the share that begins where a document
    does. Evaluation and generation begin there."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 2, "evaluate_length")
        _fraction(self, "document_starts")


DataConfig = Retrieval | Copy | Stack | Recall | Arithmetic | Digits | Stream | Custom

# --------------------------------------------------------------------------------------- models


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The Transformer pair that makes the memory labels: encoder and decoder."""

    encoder: Literal["bidirectional", "causal"] = "bidirectional"
    """The paper's encoder reads a window for every memory; ours makes all memories in one pass."""
    context_length: int = 256
    """How many tokens back the encoder looks, T_c."""
    padding: Literal["mask", "void"] = "mask"
    """What stands for the past before a sequence began (bidirectional encoder): nothing, masked
    out; or a token of its own, which needs no mask and so runs faster on a GPU."""
    width: int = 256
    """Inner width of encoder, decoder and readout."""
    encoder_layers: int = 8
    """Transformer blocks of the encoder."""
    decoder_layers: int = 4
    """Transformer blocks of the decoder, and of the RNN's readout."""
    heads: int = 8
    """Attention heads."""
    head_dim: int = 64
    """Width of one head; it need not divide the inner width."""
    normalize_memory: bool = True
    """Scale every memory token to RMS 1. A cell that cannot reach RMS 1 may want this off."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 1, "context_length", hint="the paper uses 256")
        _at_least(self, 1, "width", "encoder_layers", "decoder_layers", "heads")
        _at_least(self, 2, "head_dim")
        if self.head_dim % 2:
            raise MemtrainError(f"head_dim={self.head_dim}: must be even, RoPE turns pairs")


CELLS = ("transformer", "mlp", "gru")


@dataclass(frozen=True, kw_only=True, slots=True)
class CellConfig:
    """The recurrent cell, one step (memory, token) -> memory, and the shape of its memory."""

    kind: str = "transformer"
    """transformer, mlp, gru, or a class of yours as package.module:Class."""
    memory_tokens: int = 16
    """Tokens in a memory (the layers of a GRU). A class of yours states its own."""
    memory_dim: int = 256
    """Width of a memory token. A class of yours states its own."""
    width: int = 256
    """Inner width (Transformer) or hidden width (MLP); a GRU has none."""
    layers: int = 8
    """Blocks (Transformer) or hidden layers (MLP); a GRU has one layer a memory token."""
    heads: int = 8
    """Attention heads (Transformer)."""
    head_dim: int = 64
    """Width of one head (Transformer)."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Keyword arguments for a class of yours, beside vocab_size."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 1, "memory_tokens", hint="the paper uses 16")
        _at_least(self, 1, "memory_dim", "width", "layers", "heads")
        _at_least(self, 2, "head_dim")
        if self.head_dim % 2:
            raise MemtrainError(f"head_dim={self.head_dim}: must be even, RoPE turns pairs")
        if self.kind not in CELLS and not CUSTOM_PATH.fullmatch(self.kind):
            raise MemtrainError(
                f"kind={self.kind!r}: {nearest(self.kind, CELLS)}, or package.module:Class"
            )


# --------------------------------------------------------------------------------------- stages


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
        _within(self)
        _at_least(self, 0, "steps", "seconds", "weight_decay")
        if self.seconds and not self.steps:
            raise MemtrainError(
                f"seconds={self.seconds} with steps=0: the stage is left out; set steps, the most "
                "there may be"
            )
        _at_least(self, 1, "batch_size", "accumulate", "skip_limit")
        if self.batch_size % self.accumulate:
            raise MemtrainError(
                f"accumulate={self.accumulate}: must divide batch_size={self.batch_size}"
            )
        _fraction(self, "warmup")
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
    dynamics_weight: float = 0.1
    """Weight of the dynamics loss."""
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
        _at_least(self, 1, "future_length", hint="the paper uses 64")
        _at_least(self, 0, "timesteps", "decode_timesteps", "decode_weight", "next_weight")
        _at_least(self, 0, "dynamics_weight", "uniformity_weight")
        _at_least(self, 2, "uniformity_samples", hint="the loss compares pairs")
        _fraction(self, "short_contexts")
        _at_least(self, 0, "start_weight")


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
        _at_least(self, 0, "rollout_length", "start_weight")
        _at_least(self, 0, "dynamics_weight", "readout_weight", "decode_weight")
        _at_least(self, 1, "future_length")
        _at_least(self, 1, "label_stride", "readout_stride", "segment")
        _fraction(self, "empty_start")


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
        _at_least(self, 0, "truncate", "recompute")
        _at_least(self, 1, "sequence_length")


# ------------------------------------------------------------------------------------------ run


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a step runs."""

    device: str = "auto"
    """auto takes a GPU if there is one; else cpu, cuda, cuda:1, ..."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 computes in bfloat16 where that is safe; auto: bf16 on a GPU, fp32 on a CPU."""
    compile: bool = False
    """torch.compile the Transformer blocks (half a minute at the start)."""
    fast: bool = True
    """On a GPU, use captured graphs and kernels of our own; on a CPU, written-out gradients in
    fewer operations; off: plain PyTorch, as a reference."""
    threads: int = 0
    """CPU threads, at most one a core (0: as many as torch takes)."""
    deterministic: bool = False
    """The same run twice gives the same bits on a GPU too; somewhat slower. A CPU always does."""
    shard_teacher: bool = False
    """With several processes: spread the teacher's weights, gradients and optimizer state over
    them (FSDP2), for teachers that are too large for one device."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 0, "threads")
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise MemtrainError(f"device={self.device!r}: must be auto, cpu, mps, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """How often a run writes, looks at itself and saves itself, in steps."""

    every: int = 10
    """A line of metrics every n steps."""
    evaluate_every: int = 100
    """Held-out loss and accuracy every n steps (0: at the end of a stage only)."""
    evaluate_sequences: int = 256
    """Sequences in such an evaluation."""
    checkpoint_every: int = 200
    """A checkpoint every n steps; one more at the end of each stage."""
    keep: int = 2
    """How many checkpoints stay on disk, beside the best one."""

    def __post_init__(self) -> None:
        _within(self)
        _at_least(self, 1, "every", "evaluate_sequences", "checkpoint_every")
        _at_least(self, 0, "evaluate_every")
        _at_least(self, 2, "keep", hint="the one before is the way back from a broken one")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run: what to learn, with which models, through which stages."""

    name: str = "run"
    """What the run is called: its folder, unless you name another, is runs/NAME."""
    seed: int = 0
    """Everything random in the run follows from this."""
    data: DataConfig = field(default_factory=Retrieval)
    """What is learned."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher; its decoder's shape is the readout's too."""
    cell: CellConfig = field(default_factory=CellConfig)
    """The recurrent cell."""
    readout_attention: Literal["causal", "bidirectional"] = "causal"
    """Causal makes the copy of the decoder exact; the paper's text says bidirectional."""
    smt: SMTConfig = field(default_factory=SMTConfig)
    """First stage."""
    dmt: DMTConfig = field(default_factory=DMTConfig)
    """Second stage."""
    bptt: BPTTConfig = field(default_factory=BPTTConfig)
    """Last stage, or the only one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How a step runs."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is written, and when."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise MemtrainError(
                f"name={self.name!r}: must begin with a letter or digit, then letters, digits, "
                "'.', '_' and '-'"
            )
        if not 0 <= self.seed < 2**31:
            raise MemtrainError(f"seed={self.seed}: must be at least 0 and below 2**31")
        if not any(stage.steps for stage in self.stages().values()):
            raise MemtrainError("steps=0 in every stage: set smt.steps, dmt.steps or bptt.steps")
        if self.dmt.steps and not self.smt.steps:
            raise MemtrainError(
                f"dmt.steps={self.dmt.steps} with smt.steps=0: DMT needs the teacher that SMT "
                "trains; set smt.steps too"
            )

    def stages(self) -> dict[str, StageConfig]:
        """The three stages by name, in the order in which they run."""
        return {"smt": self.smt, "dmt": self.dmt, "bptt": self.bptt}

    @property
    def has_teacher(self) -> bool:
        return self.smt.steps > 0
