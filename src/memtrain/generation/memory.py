"""The memory of a network as a value and as a file.

A memory file is safetensors with one tensor, `memory` (M, D) in float32, and a card in its
metadata: which weights wrote it, how many tokens they had read, and of what.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from memtrain.config.serialize import structure
from memtrain.errors import MemtrainError, describe_error
from memtrain.files import parse_json, read_bytes, write_output
from memtrain.models.check_cell import memory_shape
from memtrain.models.rnn import RNN
from memtrain.runs.fingerprint import tensors_checksum

FORMAT, MEMORY_VERSION = "memtrain-memory", "1"
MAX_MEMORY_BYTES = 2**28
LONGEST_SOURCE = 200
REMEDY = "memtrain remember RUN FILE -o OUT writes one"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCard:
    """The origin of a memory."""

    model: str
    """The checksum of the weights that wrote it."""
    name: str
    """Of the model."""
    tokens: int
    """How many were read."""
    kind: str
    """What was read: text, image or tokens."""
    source: str
    """The name of what was read."""
    left_out: int = 0
    """Characters that were left out, because the training text does not have them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a network has kept of what it has read, from which `memtrain.generate` continues.

    A network understands only memories that its own weights wrote; others are refused.

    Example:
        sea = memtrain.remember(model, Path("sea.txt"))
        land = memtrain.remember(model, Path("land.txt"))
        print(sea.distance(land))
        both = memtrain.Memory.average([sea, land])
        print(memtrain.generate(model, memory=both).texts()[0])
    """

    values: Float[Tensor, "M D"]
    card: MemoryCard

    def __repr__(self) -> str:
        tokens, dim = self.values.shape
        card = self.card
        return (
            f"<Memory {tokens} x {dim} of {card.name}: {card.tokens:,} tokens of {card.source!r}>"
        )

    # ------------------------------------------------------------------------------- files

    def save(self, path: Path | str) -> None:
        """Write it to a file, completely or not at all."""
        content = {
            "format": FORMAT,
            "version": MEMORY_VERSION,
            "card": json.dumps(asdict(self.card)),
        }
        values = self.values.detach().to("cpu", torch.float32).contiguous()
        write_output(Path(path), save({"memory": values}, content))

    @classmethod
    def load(cls, path: Path | str) -> "Memory":
        """Read a memory from a file.

        Raises:
            MemtrainError: it is not a memory file, or damaged.
        """
        path = Path(path)
        try:
            content = read_bytes(path, MAX_MEMORY_BYTES)
        except OSError as error:
            raise MemtrainError(f"memory={path}: {error.strerror}; {REMEDY}") from None
        card = _read_card(content, path)
        try:
            tensors = load(content)
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise _damaged(path, describe_error(error)) from None
        values = tensors.get("memory")
        if values is None or len(tensors) != 1 or values.dim() != 2 or not values.numel():
            raise _damaged(path, "must hold one tensor, memory (M, D)")
        if values.dtype != torch.float32 or not bool(values.isfinite().all()):
            raise _damaged(path, "its numbers must be finite and float32")
        return cls(values, card)

    # -------------------------------------------------------------------------- arithmetic

    @staticmethod
    def average(memories: Sequence["Memory"]) -> "Memory":
        """The mean of memories of one model."""
        if not memories:
            raise MemtrainError("memories=[]: must hold at least one Memory")
        first = _require_memory("memories", memories[0])
        for other in memories[1:]:
            first._require_same_model(other)
        names = ", ".join(one.card.source for one in memories)
        card = replace(
            first.card,
            tokens=sum(one.card.tokens for one in memories),
            left_out=sum(one.card.left_out for one in memories),
            source=shortened(f"the average of {names}"),
        )
        return Memory(torch.stack([one.values for one in memories]).mean(0), card)

    def difference(self, other: "Memory") -> Float[Tensor, "M D"]:
        """This memory minus another of the same model: a direction for `shifted`."""
        self._require_same_model(other)
        return self.values - other.values

    def distance(self, other: "Memory") -> float:
        """The root mean square of the difference; unrelated memories of RMS 1 are about 1.4
        apart."""
        return float(self.difference(other).square().mean().sqrt())

    def shifted(self, by: Float[Tensor, "M D"]) -> "Memory":
        """This memory plus a tensor of its shape, such as a multiple of a `difference`."""
        if not isinstance(by, Tensor) or by.shape != self.values.shape:
            found = tuple(by.shape) if isinstance(by, Tensor) else type(by).__name__
            raise MemtrainError(
                f"by={found}: must be a tensor of shape {tuple(self.values.shape)}, as "
                "memory.difference(other) returns"
            )
        return replace(self, values=self.values + by)

    def _require_same_model(self, other: "Memory") -> None:
        _require_memory("other", other)
        if self.card.model != other.card.model or self.values.shape != other.values.shape:
            raise MemtrainError(
                f"memories of two models: {_origin(self.card)} and {_origin(other.card)}; their "
                "numbers mean different things"
            )

    # ------------------------------------------------------------------------------ models

    def check_model(self, rnn: RNN) -> None:
        """Refuse a network whose weights did not write this memory."""
        found = tensors_checksum(rnn.state_dict())
        if found == self.card.model and tuple(self.values.shape) == memory_shape(rnn.cell):
            return
        raise MemtrainError(
            f"memory of {self.card.source}: was written by {_origin(self.card)}, and this model's "
            f"weights are {found[:8]}; a memory means something only to the weights that wrote "
            "it: write it again with memtrain remember"
        )


def _require_memory(name: str, found: object) -> Memory:
    if not isinstance(found, Memory):
        raise MemtrainError(
            f"{name}={type(found).__name__}: must be a memtrain.Memory; memtrain.Memory.load(path) "
            "reads a file"
        )
    return found


def shortened(source: str) -> str:
    """The name of a source, cut if it is long."""
    return source if len(source) <= LONGEST_SOURCE else f"{source[: LONGEST_SOURCE - 3]}..."


def _origin(card: MemoryCard) -> str:
    return f"{card.name} (weights {card.model[:8]})"


def _read_card(content: bytes, path: Path) -> MemoryCard:
    """The card in the header of a safetensors file, which the library does not return."""
    length = int.from_bytes(content[:8], "little")
    if not 2 <= length <= len(content) - 8:
        raise MemtrainError(f"memory={path}: is not a memory file; {REMEDY}")
    header = parse_json(content[8 : 8 + length], f"memory={path}: its header", strict=True)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise MemtrainError(f"memory={path}: is not a memory file; {REMEDY}")
    if metadata.get("version") != MEMORY_VERSION:
        raise MemtrainError(
            f"memory={path}: version {metadata.get('version')}, this memtrain reads version "
            f"{MEMORY_VERSION}; update memtrain"
        )
    where = f"memory={path}: its card"
    card = structure(parse_json(str(metadata.get("card")), where, strict=True), MemoryCard, where)
    if card.tokens < 1:
        raise _damaged(path, f"tokens={card.tokens}")
    return card


def _damaged(path: Path, what: str) -> MemtrainError:
    return MemtrainError(f"memory={path}: damaged ({what}); write it again with memtrain remember")
