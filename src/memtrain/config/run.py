"""The whole run: data, models, stages, and how it runs and logs."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from memtrain.config.data import DataConfig, Retrieval
from memtrain.config.model import CellConfig, TeacherConfig
from memtrain.config.stages import BPTTConfig, DMTConfig, PretrainConfig, SMTConfig, StageConfig
from memtrain.config.validation import Bounds, Checked, Length, check_device
from memtrain.errors import MemtrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(Checked):
    """Where and how a step runs."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ..., or mps (Apple's GPU); auto: a CUDA GPU if there is one, else cpu."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 computes in bfloat16 where that is safe; auto: bf16 on a GPU, fp32 on a CPU."""
    compile: bool = False
    """torch.compile the Transformer blocks (half a minute at the start); on a GPU with our own
    kernels, only attention over sequences that are too long for them."""
    fast: bool = True
    """Use CUDA graphs and our own kernels on a GPU, hand-written gradients on a CPU; off: plain
    PyTorch, as a reference."""
    threads: Annotated[int, Bounds(0, 4096)] = 0
    """CPU threads, at most one per core (0: one per core)."""
    deterministic: bool = False
    """Make runs bit-exact on a GPU too, somewhat slower. On a CPU they always are."""
    shard_teacher: bool = False
    """With several processes: shard the teacher's weights, gradients and optimizer state over
    them (FSDP2), for teachers that are too large for one device."""

    def check(self) -> None:
        check_device(self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(Checked):
    """How often a run logs, evaluates and saves, in steps."""

    every: Annotated[int, Bounds(1)] = 10
    """Steps per line of metrics."""
    evaluate_every: Annotated[int, Bounds(0)] = 100
    """Steps between evaluations of held-out loss and accuracy (0: only at the end of a stage)."""
    evaluate_sequences: Length = 256
    """Sequences per evaluation."""
    checkpoint_every: Annotated[int, Bounds(1)] = 200
    """Steps between checkpoints; one more is saved at the end of each stage."""
    keep: Annotated[int, Bounds(2, 10**6, hint="the older one is the backup of the newer")] = 2
    """Checkpoints to keep on disk, besides the best one."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunConfig(Checked):
    """A whole run: data, models and stages."""

    name: str = "run"
    """Name of the run; its default folder is runs/NAME."""
    seed: int = 0
    """Seed of everything random in the run."""
    initial: str = ""
    """Where the weights start from: a run, one of its checkpoints, or a pretrained model (empty:
    they are random). The optimizer and the steps start from nothing."""
    data: DataConfig = field(default_factory=Retrieval)
    """The data."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher; the readout has the shape of its decoder."""
    cell: CellConfig = field(default_factory=CellConfig)
    """The recurrent cell."""
    readout_attention: Literal["causal", "bidirectional"] = "causal"
    """Causal makes the readout a copy of the decoder; the paper's text says bidirectional."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    """Optional first stage: the teacher alone."""
    smt: SMTConfig = field(default_factory=SMTConfig)
    """Teacher and cell, or the cell from the labels of a frozen teacher."""
    dmt: DMTConfig = field(default_factory=DMTConfig)
    """After SMT: the cell on its own memories."""
    bptt: BPTTConfig = field(default_factory=BPTTConfig)
    """Last stage, or the only one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Where and how a step runs."""
    log: LogConfig = field(default_factory=LogConfig)
    """How often the run logs, evaluates and saves."""

    def check(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise MemtrainError(
                f"name={self.name!r}: must begin with a letter or digit, then letters, digits, "
                "'.', '_' and '-'"
            )
        if not 0 <= self.seed < 2**31:
            raise MemtrainError(f"seed={self.seed}: must be at least 0 and below 2**31")
        if not any(stage.steps for stage in self.stages().values()):
            raise MemtrainError("steps=0 in every stage: set smt.steps, dmt.steps or bptt.steps")
        if self.cell.kind == "attention" and self.data.kind == "series":
            raise MemtrainError(
                "cell.kind=attention: reads tokens, and a series is numbers; use transformer, gru, "
                "lstm or mlp"
            )
        if self.cell.kind == "attention" and (self.has_labels or self.has_teacher):
            raise MemtrainError(
                "cell.kind=attention: has no memory that a teacher could make, it is trained by "
                "BPTT alone; take the method bptt of a recipe, or bptt.steps with steps=0 in the "
                "other stages"
            )
        for name, stage in self.stages().items():
            if self.engine.shard_teacher and stage.steps and stage.optimizer != "adamw":
                raise MemtrainError(
                    f"{name}.optimizer={stage.optimizer} with engine.shard_teacher: only adamw "
                    "updates sharded weights; use adamw, or leave shard_teacher out"
                )
        if self.has_labels:
            self._check_labels()
            return
        if self.dmt.steps and not self.has_teacher:
            problem = f"dmt.steps={self.dmt.steps} with smt.steps=0: DMT needs the teacher that SMT"
            raise MemtrainError(
                f"{problem} trains; set smt.steps too, or initial, to a run that has one",
                f"{problem} trains; set smt.steps too, or --from a run that has one",
            )
        taught = self.smt.train_teacher or self.pretrain.steps or self.initial
        if self.smt.steps and not taught:
            raise MemtrainError(
                "smt.train_teacher=False with pretrain.steps=0: the cell would learn the memories "
                "of an untrained teacher; set pretrain.steps"
            )
        if self.smt.token_weight and self.teacher.encoder != "causal":
            raise MemtrainError(
                f"smt.token_weight={self.smt.token_weight:g}: must be 0 with teacher.encoder="
                f"{self.teacher.encoder}, whose tokens see their targets"
            )

    def __repr__(self) -> str:
        steps = [f"{name} {one.steps}" for name, one in self.stages().items() if one.steps]
        cell = f"{self.cell.kind} cell, memory {self.cell.memory_tokens} x {self.cell.memory_dim}"
        return f"<RunConfig {self.name}: {self.data.kind}, {cell}; steps: {', '.join(steps)}>"

    def stages(self) -> dict[str, StageConfig]:
        """The stages by name, in order."""
        return {"pretrain": self.pretrain, "smt": self.smt, "dmt": self.dmt, "bptt": self.bptt}

    def _check_labels(self) -> None:
        """Refuse what needs a teacher, where the memories come from a file."""
        needs: dict[str, int | float] = {
            "pretrain.steps": self.pretrain.steps,
            "smt.train_teacher": bool(self.smt.steps and self.smt.train_teacher),
            "smt.next_weight": self.smt.next_weight,
            "smt.token_weight": self.smt.token_weight,
            "smt.cell_decode_weight": self.smt.cell_decode_weight,
            "dmt.train_teacher": self.dmt.train_teacher,
            "dmt.decode_weight": self.dmt.decode_weight,
        }
        for name, value in needs.items():
            if value:
                off = "False" if isinstance(value, bool) else "0"
                raise MemtrainError(
                    f"{name}={value}: must be {off} with data.kind=labels, which has no teacher"
                )

    @property
    def has_labels(self) -> bool:
        """Whether the memories to learn come with the data."""
        return self.data.kind == "labels"

    @property
    def has_teacher(self) -> bool:
        if self.has_labels:
            return False
        taught = self.pretrain.steps + self.smt.steps > 0
        return taught or bool(self.initial and self.dmt.steps)
