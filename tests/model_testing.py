"""Tiny untrained models with a codec, as `load_rnn` would return them."""

from dataclasses import replace
from typing import Any

import torch

import memtrain
from conftest import TINY
from memtrain.config import CellConfig
from memtrain.data.codec import TokenCodec
from memtrain.generation.pretrained import Pretrained
from memtrain.models.attention import AttentionReadout
from memtrain.models.rnn import RNN
from memtrain.shapes import Values

SIZES: dict[str, Any] = dict(width=16, heads=2, head_dim=8)
VALUES = Values(features=3, targets=2)


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
