"""Small networks to export."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conftest import TINY
from memtrain.config import RunConfig
from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.deploy.hugging_face.export import write
from memtrain.generation.pretrained import Pretrained
from memtrain.models.build import build_rnn

TEXT = TokenCodec(vocab_size=256, start_token=10, text=True)
SEPARATED = replace(TEXT, alphabet=(0, *range(10, 127)))
TOKENS = TokenCodec(vocab_size=9, start_token=3)
PICTURE = TokenCodec(
    vocab_size=16, start_token=3, picture=ImageFormat(height=4, width=6, levels=2, patch=2)
)
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


def network(
    codec: TokenCodec | None = TEXT, kind: str = "transformer", **teacher: Any
) -> Pretrained:
    """A network whose choices lie far apart; `teacher` are fields of TeacherConfig."""
    config = changed(kind, **teacher)
    rnn = build_rnn(config, codec.vocab_size if codec else 4)
    with torch.no_grad():
        rnn.readout.head.weight.mul_(20)
    stages = [{"name": "smt", "steps": 3, "tokens": 12, "seconds": 0.5, "lowest": 1.25}]
    return Pretrained("tiny", rnn, codec, config, {"stages": stages}).eval()


def changed(kind: str, **teacher: Any) -> RunConfig:
    return replace(
        TINY, cell=replace(TINY.cell, kind=kind), teacher=replace(TINY.teacher, **teacher)
    )


def exported(folder: Path, model: Pretrained) -> Path:
    """The folder, written."""
    write(model, folder, Options())
    return folder
