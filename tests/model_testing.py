"""Tiny untrained models with a codec, as `load_rnn` would return them."""

from dataclasses import replace
from typing import Any

import torch

import memtrain
from conftest import TINY
from memtrain.config import CellConfig
from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.generation.pretrained import Pretrained
from memtrain.models.attention import AttentionReadout
from memtrain.models.build import build_rnn
from memtrain.models.rnn import RNN
from memtrain.shapes import Values

SIZES: dict[str, Any] = dict(width=16, heads=2, head_dim=8)
VALUES = Values(features=3, targets=2)
TEXT = TokenCodec(vocab_size=256, start_token=10, text=True)
"""A text of bytes; `text_codec` has an alphabet."""
PICTURE = TokenCodec(
    vocab_size=16, start_token=3, picture=ImageFormat(height=4, width=6, levels=2, patch=2)
)
"""Images of six tokens, each a patch of 2 x 2 pixels."""


def tiny_model(kind: str = "transformer", spelling: TokenCodec | None = None) -> Pretrained:
    """A model of one layer and a memory of 2 x 16, of the codec's tokens or 7.

    Args:
        kind: that of the cell; "torch" is a wrapped nn.LSTMCell, "values" reads three numbers.
        spelling: the codec.
    """
    torch.manual_seed(0)
    symbols = spelling.vocab_size if spelling else 7
    memory: dict[str, Any] = dict(memory_tokens=2, memory_dim=16)
    if kind == "values":
        cell = memtrain.make_cell(values=VALUES, layers=1, **memory, **SIZES)
        rnn = RNN(cell, values=VALUES, decoder_layers=1, **SIZES)
    elif kind == "torch":
        cell = memtrain.wrap(torch.nn.LSTMCell(16, 16), vocab_size=symbols)
        rnn = RNN(cell, vocab_size=symbols, decoder_layers=1, **SIZES)
    elif kind == "attention":
        cell = memtrain.make_cell(kind, vocab_size=symbols, memory_tokens=4, layers=1, **SIZES)
        rnn = RNN(cell, AttentionReadout(16, symbols))
    else:
        sizes: dict[str, Any] = SIZES if kind == "transformer" else {}
        sizes = sizes | dict(width=16) if kind == "mlp" else sizes
        layers: dict[str, Any] = {"layers": 1} if kind in ("transformer", "mlp") else {}
        cell = memtrain.make_cell(kind, vocab_size=symbols, **layers, **memory, **sizes)
        rnn = RNN(cell, vocab_size=symbols, decoder_layers=1, **SIZES)
    named = kind in ("transformer", "mlp", "gru", "lstm")
    config = replace(TINY, cell=CellConfig(kind=kind)) if named else TINY
    return Pretrained("tiny", rnn.eval(), spelling, config, {})


def text_codec(alphabet: str = "abc \n", **options: Any) -> TokenCodec:
    """A text of ASCII bytes."""
    known = tuple(sorted(alphabet.encode()))
    return TokenCodec(vocab_size=128, start_token=10, text=True, alphabet=known, **options)


def decided_model(
    codec: TokenCodec | None = TEXT,
    kind: str = "transformer",
    readout_attention: Any = "causal",
    **teacher: Any,
) -> Pretrained:
    """A model whose choices lie far apart: rounding does not change what it generates.

    Args:
        codec: None for a task without sequences, of 4 tokens.
        kind: that of the cell.
        readout_attention: as in a RunConfig.
        teacher: fields of the TeacherConfig, after which its readout is built.
    """
    config = replace(
        TINY,
        cell=replace(TINY.cell, kind=kind),
        teacher=replace(TINY.teacher, **teacher),
        readout_attention=readout_attention,
    )
    rnn = build_rnn(config, codec.vocab_size if codec else 4)
    with torch.no_grad():
        rnn.readout.head.weight.mul_(20)
    stages = [{"name": "smt", "steps": 3, "tokens": 12, "seconds": 0.5, "lowest": 1.25}]
    return Pretrained("tiny", rnn, codec, config, {"stages": stages}).eval()
