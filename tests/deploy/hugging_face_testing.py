"""Codecs of models to export, and the export."""

from dataclasses import dataclass, replace
from pathlib import Path

from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.deploy.hugging_face.export import write
from memtrain.generation.pretrained import Pretrained
from model_testing import TEXT

SEPARATED = replace(TEXT, alphabet=(0, *range(10, 127)))
TOKENS = TokenCodec(vocab_size=9, start_token=3)
MARKED = TokenCodec(
    vocab_size=6,
    start_token=4,
    start_written=False,
    picture=ImageFormat(height=2, width=3, levels=4),
    classes=("cat", "dog"),
    class_counts=(3, 1),
)
CELLS = ("transformer", "mlp", "gru", "lstm")


@dataclass
class Options:
    push: str | None = None


def exported(folder: Path, model: Pretrained) -> Path:
    """The folder, written."""
    write(model, folder, Options())
    return folder
