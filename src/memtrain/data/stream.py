"""A prepared data set as windows of one long sequence, gathered where the model is."""

import math
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from memtrain.config import Stream
from memtrain.data.offsets import Offsets
from memtrain.data.pictures import decode_pictures
from memtrain.data.store import Store, open_store, require_tokens
from memtrain.data.task import Task
from memtrain.data.text import decode_text
from memtrain.errors import MemtrainError
from memtrain.shapes import Batch


class StreamTask(Task):
    """Windows of a token stream; every token but the first is the target of the one before.

    Training windows start anywhere; some of those that are read from nothing start where a
    document does. Held-out sequences always start there.
    """

    def __init__(
        self,
        store: Store,
        config: Stream,
        length: int,
        from_nothing: int = 0,
        tokens: dict[str, Tensor] | None = None,
    ) -> None:
        self.store = store
        self.config = config
        self.vocab_size = store.meta.vocab_size
        self.sequence_length = length
        self.unit = "character" if store.meta.text else "pixel" if store.meta.picture else "token"
        self.start_token = _first_token(store)
        for split in ("train", "test"):
            require_tokens(store, split, length + 1)
        self._tokens = tokens or {
            split: torch.from_numpy(np.array(store.tokens(split))) for split in ("train", "test")
        }
        self._starting = round(config.document_starts * from_nothing)
        self._offsets: Offsets | None = None

    @classmethod
    def from_config(cls, config: Stream) -> "StreamTask":
        if not config.path:
            raise MemtrainError("data.path: name a folder that `memtrain data` prepared")
        return cls(open_store(Path(config.path)), config, config.evaluate_length)

    def windows(self, length: int, from_nothing: int = 0) -> "StreamTask":
        task = StreamTask(self.store, self.config, length, from_nothing, self._tokens)
        task._offsets = Offsets(
            self.store.starts("train"),
            len(self._tokens["train"]),
            length + 1,
            self.config.cross_documents,
            self.device,
        )
        return task

    @property
    def device(self) -> torch.device:
        return self._tokens["train"].device

    def to(self, device: torch.device) -> "StreamTask":
        """Move the tokens to a device once, so that drawing windows needs no copy."""
        self._tokens = {split: tokens.to(device) for split, tokens in self._tokens.items()}
        return self

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        if self._offsets is None:
            return self.windows(self.sequence_length).sample(count, generator)
        offsets = self._offsets.anywhere(count, generator)
        starting = min(self._starting, count)
        if starting:
            offsets[:starting] = self._offsets.at_starts(starting, generator)
        return self._gather(self._tokens["train"], offsets)

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        """Distinct documents from their starts; of one long document, evenly spread windows."""
        tokens = self._tokens["test"]
        starts = torch.from_numpy(np.array(self.store.starts("test")))
        starts = starts[starts < len(tokens) - self.sequence_length]
        if len(starts) < 2:
            last = len(tokens) - self.sequence_length - 1
            starts = torch.linspace(0, last, count).long().unique()
        order = torch.randperm(len(starts), generator=generator)
        return self._gather(tokens, starts[order[:count]])

    def _gather(self, tokens: Tensor, offsets: Int[Tensor, " B"]) -> Batch:
        offsets = offsets.to(tokens.device)
        span = torch.arange(self.sequence_length + 1, device=tokens.device)
        window = tokens[offsets[:, None] + span].long()
        return Batch(window[:, :-1], window[:, 1:])

    @property
    def written_length(self) -> int:
        return (self.store.meta.document_length or 512) - 1

    def written(self, start: Int[Tensor, "B 1"], tokens: Int[Tensor, "B L"]) -> Int[Tensor, "B T"]:
        return torch.cat([start, tokens], dim=1)

    def describe(self, inputs: list[int], targets: list[int]) -> str:
        if self.store.meta.text:
            return decode_text(np.array(inputs))
        return super().describe(inputs, targets)

    def save_samples(self, tokens: Int[Tensor, "B T"], path: Path) -> None:
        """Pictures as a PNG grid, anything else as text."""
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = self.store.meta.picture
        if picture is None:
            text = [
                decode_text(row) if self.store.meta.text else str(row) for row in tokens.numpy()
            ]
            path.write_text("\n\n----\n\n".join(text), encoding="utf-8")
            return
        from matplotlib.image import imsave

        pictures = decode_pictures(tokens.numpy(), picture)
        imsave(path, _tile(pictures), cmap="gray", vmin=0, vmax=255)


def _tile(pictures: np.ndarray, gap: int = 2) -> np.ndarray:
    """Pictures (N, H, W) in a near-square grid."""
    count, height, width = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    canvas = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap), 128, np.uint8)
    for index, picture in enumerate(pictures):
        top = gap + (index // columns) * (height + gap)
        left = gap + (index % columns) * (width + gap)
        canvas[top : top + height, left : left + width] = picture
    return canvas


def _first_token(store: Store) -> int:
    """The commonest first token of a document: what is read before anything is written."""
    starts = np.array(store.starts("train")[:10_000])
    return int(np.bincount(store.tokens("train")[starts]).argmax())
