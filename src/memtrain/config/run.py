"""The whole run: data, models and stages, where a step runs and what is written when."""

import re
from dataclasses import dataclass, field
from typing import Literal

from memtrain.config.data import DataConfig, Retrieval
from memtrain.config.model import CellConfig, TeacherConfig
from memtrain.config.stages import BPTTConfig, DMTConfig, SMTConfig, StageConfig
from memtrain.config.validation import at_least, check_bounds, check_device
from memtrain.errors import MemtrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a step runs."""

    device: str = "auto"
    """auto takes a CUDA GPU if there is one; else cpu, cuda, cuda:1, ..., or mps (Apple's GPU)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 computes in bfloat16 where that is safe; auto: bf16 on a GPU, fp32 on a CPU."""
    compile: bool = False
    """torch.compile the Transformer blocks (half a minute at the start); on a GPU that our kernels
    serve, only attention that is too long for them."""
    fast: bool = True
    """On a GPU, use captured graphs and kernels of our own; on a CPU, written-out gradients in
    fewer operations; off: plain PyTorch, as a reference."""
    threads: int = 0
    """CPU threads, at most one a core (0: one per core)."""
    deterministic: bool = False
    """The same run twice gives the same bits on a GPU too; somewhat slower. A CPU always does."""
    shard_teacher: bool = False
    """With several processes: spread the teacher's weights, gradients and optimizer state over
    them (FSDP2), for teachers that are too large for one device."""

    def __post_init__(self) -> None:
        check_bounds(self)
        at_least(self, 0, "threads")
        check_device(self.device)


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
        check_bounds(self)
        at_least(self, 1, "every", "evaluate_sequences", "checkpoint_every")
        at_least(self, 0, "evaluate_every")
        at_least(self, 2, "keep", hint="the one before is the way back from a broken one")


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
        check_bounds(self)
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
        if self.smt.token_weight and self.teacher.encoder != "causal":
            raise MemtrainError(
                f"smt.token_weight={self.smt.token_weight:g}: must be 0 with teacher.encoder="
                f"{self.teacher.encoder}, whose tokens see what they would have to tell"
            )

    def stages(self) -> dict[str, StageConfig]:
        """The three stages by name, in the order in which they run."""
        return {"smt": self.smt, "dmt": self.dmt, "bptt": self.bptt}

    @property
    def has_teacher(self) -> bool:
        return self.smt.steps > 0
