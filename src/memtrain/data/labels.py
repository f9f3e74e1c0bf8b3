"""Sequences with the memories that a cell has to learn, as an object, a file and a task."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.config import LabelFile, RunConfig
from memtrain.data.label_file import LabelCard, LabelReader, label_writer
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.recipes import recipe
from memtrain.shapes import IGNORE_INDEX, Batch

RESIDENT_BYTES = 2**31
"""Memories of at most this size are kept in memory, larger ones stay in the file."""
WRITTEN_BYTES = 2**26
"""Memories are written this many bytes at a time."""
RMS_TOLERANCE = 0.05


class Labels:
    """Sequences with a memory for every step, from which a cell learns without a teacher.

    Args:
        inputs: tokens, (N, T).
        memories: the memory after each input, (N, T, M, D): the states of an oracle, or the
            memories of a teacher. Before the first input the memory is 0.
        targets: the target of each input, (N, T); IGNORE_INDEX where there is none.
        vocab_size: inputs and targets are 0..vocab_size-1; by default as large as they need.
        held_out: fraction of the sequences, the last ones, for evaluation.
        normalize: scale every memory token to RMS 1, which the Transformer and MLP cells do.

    Example, a counter modulo 5:

        inputs = torch.randint(2, (1000, 32))
        state = inputs.cumsum(1) % 5
        memories = torch.nn.functional.one_hot(state, 5).float()[:, :, None]  # (N, T, 1, 5)
        labels = Labels(inputs, memories, state, normalize=True)
        labels.save("counter.safetensors")
        run = memtrain.Run.create(labels.config(), "runs/counter")
    """

    def __init__(
        self,
        inputs: Tensor,  # checked below, with a message for users
        memories: Tensor,
        targets: Tensor | None = None,
        *,
        vocab_size: int | None = None,
        held_out: float = 0.1,
        normalize: bool = False,
    ) -> None:
        _check_tensors(inputs, memories, targets)
        if not 0 < held_out < 1:
            raise MemtrainError(f"held_out={held_out}: must lie between 0 and 1, both excluded")
        if len(inputs) < 2:
            raise MemtrainError("inputs: at least 2 sequences, one of which is held out")
        found = max(int(one.max()) for one in (inputs, targets) if one is not None)
        vocab_size = found + 1 if vocab_size is None else vocab_size
        if found >= vocab_size:
            raise MemtrainError(
                f"vocab_size={vocab_size}: must be above {found}, the largest input or target"
            )
        kept = min(len(inputs) - 1, max(1, round(held_out * len(inputs))))
        memories = memories.detach().cpu().float()
        if normalize:
            memories = torch.nn.functional.rms_norm(memories, memories.shape[-1:])
        self.card = LabelCard(vocab_size=vocab_size, held_out=kept)
        self.path: Path | None = None
        self.decoder: Mapping[str, Tensor] = {}
        """Weights of the teacher's decoder; empty for an oracle's labels."""
        self.inputs = inputs.detach().cpu().long()
        self.targets = targets.detach().cpu().long() if targets is not None else None
        self.shape = tuple(memories.shape)
        """Of the memories: sequences, steps, memory tokens and their width."""
        self.dtype = memories.dtype
        self._memories: Tensor | None = memories
        self._reader: LabelReader | None = None

    @classmethod
    def open(cls, path: Path | str) -> "Labels":
        """Open a label file; memories of more than 2 GiB stay in it.

        Raises:
            MemtrainError: it is not one, or it is damaged.
        """
        reader = LabelReader(Path(path))
        self = cls.__new__(cls)
        self.card, self.path, self._reader = reader.card, Path(path), reader
        entry = reader.entries["memories"]
        self.shape, self.dtype, self.decoder = entry.shape, entry.dtype, reader.decoder()
        self.inputs = reader.whole("inputs").long()
        has_targets = "targets" in reader.entries
        self.targets = reader.whole("targets").long() if has_targets else None
        last = self.card.vocab_size - 1
        for name, tokens in (("inputs", self.inputs), ("targets", self.targets)):
            if tokens is not None:
                ignored = tokens == IGNORE_INDEX if name == "targets" else False
                if bool((((tokens < 0) | (tokens > last)) & ~torch.as_tensor(ignored)).any()):
                    raise reader.damaged(f"{name} are outside the vocabulary 0..{last}")
        small = entry.shape[0] * entry.row_bytes <= RESIDENT_BYTES
        self._memories = reader.whole("memories") if small else None
        return self

    def save(self, path: Path | str) -> "Labels":
        """Write the labels to a safetensors file, replacing it completely or not at all."""
        tokens = torch.uint8 if self.card.vocab_size <= 256 else torch.int32
        shapes = {
            "inputs": (tuple(self.inputs.shape), tokens),
            "memories": (self.shape, self.dtype),
        }
        if self.targets is not None:
            shapes["targets"] = (tuple(self.targets.shape), torch.int32)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        with label_writer(Path(path), self.card, shapes, self.decoder) as writer:
            for rows in torch.arange(len(self)).split(max(1, WRITTEN_BYTES // row)):
                parts = {"inputs": self.inputs[rows], "memories": self.memories(rows)}
                if self.targets is not None:
                    parts["targets"] = self.targets[rows]
                writer.add(**parts)
        self.card = LabelReader(Path(path)).card
        self.path = Path(path)
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        count, length, tokens, width = self.shape
        return (
            f"<Labels of {count:,} sequences of {length}, memories {tokens} x {width}, "
            f"{self.card.held_out:,} held out>"
        )

    def memories(self, rows: Int[Tensor, " B"]) -> Float[Tensor, "B T M D"]:
        """The memories of some sequences, as they are stored."""
        if self._memories is not None:
            return self._memories[rows]
        assert self._reader is not None
        return torch.cat([self._reader.rows("memories", int(row), 1) for row in rows.tolist()])

    def batch(self, rows: Int[Tensor, " B"]) -> Batch:
        """Some sequences with their memories."""
        inputs = self.inputs[rows]
        none = torch.full_like(inputs, IGNORE_INDEX)
        targets = none if self.targets is None else self.targets[rows]
        return Batch(inputs, targets, self.memories(rows).float())

    def config(self, default: RunConfig | None = None) -> RunConfig:
        """The config of a run that learns these labels: the recipe `labels` with their shapes.

        Args:
            default: the config to start from; by default the recipe `labels`.
        """
        if self.path is None:
            raise MemtrainError("labels: are not in a file yet; save(path) first")
        default = default or recipe("labels")
        _, _, tokens, width = self.shape
        cell = replace(default.cell, memory_tokens=tokens, memory_dim=width)
        data = LabelFile(path=str(self.path))
        config = replace(
            default, data=data, cell=cell, teacher=self.card.teacher or default.teacher
        )
        if self.targets is not None:
            return config
        # The readout is the teacher's decoder, and there is nothing to train it on.
        smt, dmt = config.smt, config.dmt
        return replace(
            config, smt=replace(smt, decode_weight=0.0), dmt=replace(dmt, readout_weight=0.0)
        )

    def check_cell(self, kind: str, memory: tuple[int, int]) -> None:
        """Refuse a cell that cannot hold or reach these memories.

        Args:
            kind: transformer, mlp, gru or a class path.
            memory: the shape of its memory.
        """
        where = self.path or "labels"
        if memory != self.shape[2:]:
            raise MemtrainError(
                f"{where}: has memories of {self.shape[2]} x {self.shape[3]}, the cell's are "
                f"{memory[0]} x {memory[1]}; set cell.memory_tokens and cell.memory_dim to the "
                "file's, or take labels of the cell's shape"
            )
        few = self.memories(torch.arange(min(64, len(self)))).float()
        if not bool(few.isfinite().all()):
            raise MemtrainError(f"{where}: has memories that are not finite")
        rms = few.square().mean(dim=-1).sqrt()
        if kind in ("transformer", "mlp") and bool(((rms - 1).abs() > RMS_TOLERANCE).any()):
            worst = float(rms.flatten()[(rms - 1).abs().argmax()])
            raise MemtrainError(
                f"cell.kind={kind}: scales memory tokens to RMS 1, those of {where} have "
                f"{worst:.3g}; save them with Labels(..., normalize=True), or take a GRU or a cell "
                "of your own"
            )
        if kind == "gru" and (largest := float(few.abs().max())) > 1:
            raise MemtrainError(
                f"cell.kind=gru: has memories within -1..1, {where} has {largest:.3g}; scale them, "
                "label a run of a GRU (teacher.normalize_memory off), or take another cell"
            )

    def to(self, device: torch.device) -> None:
        """Move everything to a device, if it is not left in the file."""
        if self._memories is not None:
            self._memories, self.inputs = self._memories.to(device), self.inputs.to(device)
            self.targets = self.targets.to(device) if self.targets is not None else None

    @property
    def identity(self) -> str:
        """A checksum of inputs, targets and memories; empty before they are saved."""
        sums = " ".join(f"{name} {one}" for name, one in sorted(self.card.sha256.items()))
        return hashlib.sha256(sums.encode()).hexdigest()[:32] if sums else ""


def _check_tensors(inputs: Any, memories: Any, targets: Any) -> None:
    for name, value in (("inputs", inputs), ("memories", memories), ("targets", targets)):
        if not isinstance(value, Tensor) and not (name == "targets" and value is None):
            raise MemtrainError(f"{name}: must be a tensor, not {type(value).__name__}")
    if inputs.dim() != 2 or not inputs.numel() or inputs.is_floating_point():
        raise MemtrainError(
            f"inputs: must be whole numbers of shape (N, T), not {inputs.dtype} of shape "
            f"{tuple(inputs.shape)}"
        )
    if memories.dim() != 4 or memories.shape[:2] != inputs.shape or not memories.numel():
        count, length = inputs.shape
        raise MemtrainError(
            f"memories: must have shape ({count}, {length}, M, D), as inputs have "
            f"({count}, {length}), not {tuple(memories.shape)}"
        )
    if not memories.is_floating_point() or not bool(memories.isfinite().all()):
        raise MemtrainError("memories: must be finite floats; memories.float() converts")
    if targets is not None and (targets.shape != inputs.shape or targets.is_floating_point()):
        raise MemtrainError(
            f"targets: must be whole numbers of the shape of inputs, {tuple(inputs.shape)}, not "
            f"{targets.dtype} of shape {tuple(targets.shape)}"
        )
    given = inputs if targets is None else targets.where(targets != IGNORE_INDEX, 0)
    if (lowest := min(int(inputs.min()), int(given.min()))) < 0:
        raise MemtrainError(f"inputs, targets: contain {lowest}; tokens are at least 0")


class LabelsTask(Task):
    """Batches of labelled sequences; held-out sequences are the last ones of the file."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.vocab_size = labels.card.vocab_size
        self.sequence_length = labels.shape[1]
        self.unit, self.spelling = labels.card.unit, labels.card.spelling
        self.identity = labels.identity
        self.train_sequences = len(labels) - labels.card.held_out

    @classmethod
    def from_config(cls, config: LabelFile) -> "LabelsTask":
        if not config.path:
            raise MemtrainError(
                "data.path: name a label file (memtrain train labels --data FILE), which "
                "memtrain label RUN --out FILE writes"
            )
        return cls(Labels.open(config.path))

    @property
    def device(self) -> torch.device:
        return self.labels.inputs.device

    def to(self, device: torch.device) -> "LabelsTask":
        self.labels.to(device)
        return self

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        size, device = (count,), generator.device
        rows = torch.randint(self.train_sequences, size, generator=generator, device=device)
        return self.labels.batch(rows.to(self.device))

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        """Distinct held-out sequences, at most all of them."""
        return self.labels.batch(self._held_out_rows(count, generator))

    def _held_out_rows(self, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
        order = torch.randperm(self.labels.card.held_out, generator=generator)[:count]
        return (self.train_sequences + order).to(self.device)

    def held_out_images(self, count: int, generator: torch.Generator) -> Int[Tensor, "B L"] | None:
        codec, targets = self.spelling, self.labels.targets
        if codec is None or codec.picture is None:
            return None
        tokens = self.labels.inputs if codec.start_written else targets
        if tokens is not None and codec.classes and tokens.shape[1] >= codec.picture.length:
            rows = self._held_out_rows(count, generator)
            first = self.labels.inputs[rows, :1].to(tokens.dtype)
            return torch.cat([first, tokens[rows, : codec.picture.length]], dim=1)
        if tokens is None or tokens.shape[1] < codec.picture.length:
            return None
        return tokens[self._held_out_rows(count, generator), : codec.picture.length]
