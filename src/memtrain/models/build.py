"""Build the models of a config."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from memtrain.config import CELLS, TORCH_CELLS, RunConfig
from memtrain.errors import MemtrainError
from memtrain.models.attention import AttentionCell, AttentionReadout
from memtrain.models.cells import build_cell
from memtrain.models.check_cell import check_cell, memory_shape
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder, Teacher
from memtrain.shapes import Space, Values, named

Models = TypeVar("Models", bound=tuple[Any, ...])


def build_models(
    config: RunConfig, space: Space, cell: nn.Module | None = None
) -> tuple[RNN, Teacher | None]:
    """The RNN and its teacher, if it has one, initialized from the config's seed.

    Raises:
        MemtrainError: they are larger than this machine's memory, which is checked before any is
            allocated; or the cell breaks the contract.
    """

    def build() -> tuple[RNN, Teacher | None]:
        rnn = _build_rnn(config, space, cell)
        if not config.has_teacher:
            return rnn, None
        return rnn, _build_teacher(config, space, rnn)

    return _build_checked(config, space, cell, build)


def build_rnn(config: RunConfig, space: Space, cell: nn.Module | None = None) -> RNN:
    """The RNN of a config alone; `cell` replaces the one that the config names.

    Raises:
        MemtrainError: as `build_models`.
    """
    (rnn,) = _build_checked(config, space, cell, lambda: (_build_rnn(config, space, cell),))
    return rnn


def _build_teacher(config: RunConfig, space: Space, rnn: RNN) -> Teacher:
    tokens, dim = memory_shape(rnn.cell)
    return Teacher(config.teacher, memory_tokens=tokens, memory_dim=dim, **named(space))


def _build_rnn(config: RunConfig, space: Space, cell: nn.Module | None) -> RNN:
    if cell is None:
        cell = build_cell(config.cell, space)
    else:
        check_cell(cell, **named(space))
    if isinstance(cell, AttentionCell):
        assert not isinstance(space, Values)
        return RNN(cell, AttentionReadout(cell.embedding.embedding_dim, space)).train()
    _, memory_dim = memory_shape(cell)
    causal = config.readout_attention == "causal"
    rnn = RNN(cell, Decoder(config.teacher, memory_dim=memory_dim, causal=causal, **named(space)))
    # A cell in eval mode would stay in it until the first evaluation, and again after a resume.
    return rnn.train()


def _build_checked(
    config: RunConfig, space: Space, cell: nn.Module | None, build: Callable[[], Models]
) -> Models:
    """Build models if they fit, from the config's seed, and restore torch's global RNG state."""
    known = cell is None and config.cell.kind in CELLS
    if known and 4 * most_parameters(config, space) > _memory():
        # An exact count needs torch's compiler, which takes a second to load.
        with torch.device("meta"):  # shapes without memory
            _check_size(*build())
    if cell is None and config.cell.kind in TORCH_CELLS:
        sizes = [value for value in config.cell.options.values() if type(value) is int]
        _check_count(8 * max(sizes, default=0) ** 2)  # of an LSTM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            return build()
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            raise MemtrainError(
                "the models do not fit into free memory; use a smaller width or fewer layers"
            ) from None


def most_parameters(config: RunConfig, space: Space) -> int:
    """An upper bound on the number of parameters, computed without building the models."""
    teacher, cell = config.teacher, config.cell
    widest = max(
        teacher.width,
        teacher.heads * teacher.head_dim,
        cell.width,
        cell.heads * cell.head_dim,
        0 if cell.kind == "attention" else cell.memory_tokens * cell.memory_dim,
    )
    symbols = space.features + space.outputs if isinstance(space, Values) else space
    layers = teacher.encoder_layers + 2 * teacher.decoder_layers + cell.layers + 2
    return 16 * layers * widest**2 + 8 * symbols * widest


def _memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_size(*models: nn.Module | None) -> None:
    _check_count(
        sum(p.numel() for model in models if model is not None for p in model.parameters())
    )


def _check_count(count: int) -> None:
    memory = _memory()
    if 4 * count > memory:
        raise MemtrainError(
            f"the models have {count:,} parameters, {4 * count / 2**30:,.0f} GiB; this machine has "
            f"{memory / 2**30:,.0f} GiB; use a smaller width or fewer layers"
        )
