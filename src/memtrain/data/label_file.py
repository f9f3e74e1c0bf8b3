"""Label files: sequences with a memory for every step, as one safetensors file.

Tensors, of which the last `held_out` sequences are for evaluation:

- `inputs` (N, T): tokens, as uint8 or int32;
- `targets` (N, T): int32, IGNORE_INDEX where there is none; absent if there are none at all;
- `memories` (N, T, M, D): float32, float16 or bfloat16, the memory after each input;
- `decoder.*`: the teacher's decoder, a readout of these memories; absent for an oracle's.

The header's metadata has the `LabelCard` as JSON. Any reader of safetensors reads the file. Here
memories are written and read a few sequences at a time, so they need not fit in memory.
"""

import hashlib
import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.config import TeacherConfig
from memtrain.config.serialize import structure
from memtrain.data.codec import TokenCodec
from memtrain.errors import MemtrainError
from memtrain.files import open_regular, parse_json, replacing

LABELS_VERSION = "1"
MAX_LABEL_HEADER = 2**25
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""Types in a label file, by their names in safetensors."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PARTS = ("inputs", "targets", "memories")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelCard:
    """The meaning and origin of a label file."""

    vocab_size: int
    held_out: int
    """Sequences for evaluation, the last ones."""
    source: dict[str, str] = field(default_factory=dict)
    """Origin of the memories: run, name, step and weights of a teacher, key of its data."""
    unit: str = "target"
    """The name of one target in results."""
    spelling: TokenCodec | None = None
    """The codec of the tokens, if a model can generate them."""
    teacher: TeacherConfig | None = None
    """The teacher, whose decoder is in the file."""
    sha256: dict[str, str] = field(default_factory=dict)
    """The checksum of each of inputs, targets and memories."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of one index of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.shape[0] * self.row_bytes


# ---------------------------------------------------------------------------------------- write


@contextmanager
def label_writer(
    path: Path,
    card: LabelCard,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    decoder: Mapping[str, Tensor] | None = None,
) -> Iterator["LabelWriter"]:
    """Write a label file; it appears at its path when all sequences are there, or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            writer = LabelWriter(file, card, shapes, decoder or {})
            yield writer
            writer.finish()
    except OSError as error:
        raise MemtrainError(f"{path}: not written: {error.strerror or error}") from error


class LabelWriter:
    """Writes rows of `inputs`, `targets` and `memories` to an open file, in order."""

    def __init__(
        self,
        file: Any,
        card: LabelCard,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        decoder: Mapping[str, Tensor],
    ) -> None:
        self.file, self.card = file, card
        weights = {f"decoder.{name}": value.float().cpu() for name, value in decoder.items()}
        every = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
        # Larger types first: each tensor then starts at a multiple of its item size.
        every |= dict(sorted(shapes.items(), key=lambda one: -one[1][1].itemsize))
        self.entries, begin = {}, 0
        for name, (shape, dtype) in every.items():
            self.entries[name] = entry = Entry(dtype, shape, begin)
            begin = entry.end
        self.digests = {name: hashlib.sha256() for name in shapes}
        self.rows = dict.fromkeys(shapes, 0)
        self.start = self._write_header()
        for name, value in weights.items():
            self._write(self.entries[name].begin, value)

    def add(self, **rows: Tensor) -> None:
        """Append rows of every tensor."""
        for name, value in rows.items():
            entry = self.entries[name]
            raw = self._write(
                entry.begin + self.rows[name] * entry.row_bytes, value.to("cpu", entry.dtype)
            )
            self.digests[name].update(raw)
            self.rows[name] += len(value)

    def finish(self) -> None:
        """Write the checksums into the header."""
        assert all(self.rows[name] == self.entries[name].shape[0] for name in self.rows)
        assert self._write_header() == self.start

    def _write(self, offset: int, value: Tensor) -> memoryview:
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
        self.file.seek(self.start + offset)
        self.file.write(raw)
        return raw

    def _write_header(self) -> int:
        """Write the header, whose length does not depend on the checksums; returns its end."""
        card = asdict(self.card) | {
            "sha256": {name: digest.hexdigest() for name, digest in self.digests.items()}
        }
        metadata = {
            "format": "memtrain-labels",
            "version": LABELS_VERSION,
            "card": json.dumps(card),
        }
        header: dict[str, Any] = {"__metadata__": metadata}
        for name, entry in self.entries.items():
            offsets = [entry.begin, entry.end]
            header[name] = {
                "dtype": NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.file.seek(0)
        self.file.write(len(text).to_bytes(8, "little") + text)
        return 8 + len(text)


# ----------------------------------------------------------------------------------------- read


class LabelReader:
    """An open label file: its card, and the rows of its tensors.

    Raises:
        MemtrainError: it is not a label file, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = open_regular(path)
            weakref.finalize(self, self.file.close)
            self.start, self.entries, self.card = self._read_header()
        except OSError as error:
            raise MemtrainError(
                f"{path}: {error.strerror}; memtrain label RUN --out FILE writes a label file"
            ) from None

    def _read_header(self) -> tuple[int, dict[str, Entry], LabelCard]:
        size = os.fstat(self.file.fileno()).st_size
        length = int.from_bytes(self.file.read(8), "little")
        if not 2 <= length <= min(MAX_LABEL_HEADER, size - 8):
            raise self.wrong("is not a label file; memtrain label RUN --out FILE writes one")
        header = parse_json(self.file.read(length), f"{self.path}: its header", strict=True)
        metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or metadata.get("format") != "memtrain-labels":
            raise self.wrong("is not a label file; memtrain label RUN --out FILE writes one")
        if metadata.get("version") != LABELS_VERSION:
            raise self.wrong(f"version {metadata.get('version')}, this memtrain reads version 1")
        entries = {name: self._entry(name, plain) for name, plain in header.items()}
        where = f"{self.path}: its card"
        card = structure(
            parse_json(str(metadata.get("card")), where, strict=True), LabelCard, where
        )
        end = 0
        for entry in sorted(entries.values(), key=lambda one: one.begin):
            if entry.begin != end:
                raise self.damaged("its tensors overlap")
            end = entry.end
        if size != 8 + length + end:
            raise self.damaged(f"{size:,} bytes, {8 + length + end:,} were written")
        self._check_shapes(entries, card)
        return 8 + length, entries, card

    def _entry(self, name: str, plain: Any) -> Entry:
        try:
            begin, end = plain["data_offsets"]
            entry = Entry(DTYPES[plain["dtype"]], tuple(plain["shape"]), begin)
            whole = all(type(n) is int and 0 <= n < 2**48 for n in (begin, end, *entry.shape))
            if not whole or not entry.shape or entry.end != end:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise self.damaged(f"the header of {name}") from None
        return entry

    def _check_shapes(self, entries: Mapping[str, Entry], card: LabelCard) -> None:
        shapes = {name: entry.shape for name, entry in entries.items()}
        inputs, memories = shapes.get("inputs", ()), shapes.get("memories", ())
        if len(memories) != 4 or len(inputs) < 2 or 0 in memories:
            raise self.damaged("it needs inputs (N, T) and memories (N, T, M, D)")
        for name in ("inputs", "targets"):
            if shapes.get(name, inputs)[:2] != memories[:2]:
                raise self.damaged(f"{name} {shapes[name]} do not fit memories {memories}")
            if name in entries and (entries[name].dtype.is_floating_point or len(inputs) != 2):
                raise self.wrong(f"its {name} are not tokens; cells here read tokens")
        if not entries["memories"].dtype.is_floating_point:
            raise self.damaged("memories are not floats")
        if not 0 <= card.held_out < memories[0] or card.vocab_size < 1:
            raise self.damaged(f"held_out={card.held_out}, vocab_size={card.vocab_size}")
        if card.sha256.keys() != entries.keys() & set(PARTS):
            raise self.damaged("checksums are missing")

    def wrong(self, reason: str) -> MemtrainError:
        return MemtrainError(f"{self.path}: {reason}")

    def damaged(self, what: str) -> MemtrainError:
        return self.wrong(f"damaged ({what}); write it again with memtrain label")

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Some rows of a tensor."""
        entry = self.entries[name]
        begin, size = self.start + entry.begin + first * entry.row_bytes, count * entry.row_bytes
        raw = bytearray(size)
        if os.preadv(self.file.fileno(), [raw], begin) != size:
            raise self.damaged(f"{name} is cut short")
        return torch.frombuffer(raw, dtype=entry.dtype).view(count, *entry.shape[1:])

    def whole(self, name: str, block: int = 2**24) -> Tensor:
        """A whole tensor; inputs, targets and memories are compared with their checksum."""
        entry = self.entries[name]
        step = max(1, block // max(1, entry.row_bytes))
        found = torch.empty(entry.shape, dtype=entry.dtype)
        digest = hashlib.sha256()
        for first in range(0, entry.shape[0], step):
            count = min(step, entry.shape[0] - first)
            found[first : first + count] = part = self.rows(name, first, count)
            digest.update(part.reshape(-1).view(torch.uint8).numpy().data)
        if self.card.sha256.get(name, digest.hexdigest()) != digest.hexdigest():
            raise self.damaged(f"{name} are not what was written")
        return found

    def decoder(self) -> dict[str, Tensor]:
        """The weights of the teacher's decoder; empty if the file has none."""
        prefix = "decoder."
        return {
            name.removeprefix(prefix): self.whole(name)
            for name in self.entries
            if name.startswith(prefix)
        }
