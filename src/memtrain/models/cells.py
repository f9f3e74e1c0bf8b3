"""Recurrent cells: one step (memory, token) -> memory, checked by check_cell.py."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memtrain.config import CellConfig, check_used
from memtrain.config.validation import config_from, load_class
from memtrain.errors import MemtrainError, describe_error, did_you_mean
from memtrain.models.attention import AttentionCell
from memtrain.models.check_cell import check_cell
from memtrain.models.layers import Replaceable, Stack, make_embedding, normalize_memory, projection
from memtrain.models.wrap import WrappedCell, constructor_options, is_wrappable, wrap
from memtrain.shapes import Space, Token, Values, named, space_of


class Cell(nn.Module, ABC):
    """Base of the built-in cells. Your own may derive from it or from nn.Module alone."""

    memory_tokens: int
    memory_dim: int

    @abstractmethod
    def forward(self, memory: Float[Tensor, "B M D"], token: Token) -> Float[Tensor, "B M D"]:
        """One step of the recurrence."""


class TransformerCell(Cell, Replaceable):
    """Full attention over [memory, token]; the memory's positions become the next memory."""

    def __init__(self, config: CellConfig, space: Space) -> None:
        super().__init__()
        self.memory_tokens, self.memory_dim = config.memory_tokens, config.memory_dim
        self.embedding = make_embedding(space, config.width)
        self.from_memory = projection(config.memory_dim, config.width)
        self.stack = Stack(
            config.width, config.layers, config.heads, config.head_dim, config.rotary_fraction
        )
        self.to_memory = projection(config.width, config.memory_dim)

    def forward(self, memory: Float[Tensor, "B M D"], token: Token) -> Float[Tensor, "B M D"]:
        if self.fast is not None and not torch.is_grad_enabled() and self.fast.serves(memory):
            return self.fast(memory, token)
        tokens = self.from_memory(memory)
        x = torch.cat([tokens, self.embedding(token).to(tokens.dtype)[:, None]], dim=1)
        x = self.stack(x, queries=slice(self.memory_tokens))
        return normalize_memory(self.to_memory(x))


class MLPCell(Cell):
    """An MLP on the memory as one vector, concatenated with the token's embedding."""

    def __init__(self, config: CellConfig, space: Space) -> None:
        super().__init__()
        self.memory_tokens, self.memory_dim = config.memory_tokens, config.memory_dim
        size = config.memory_tokens * config.memory_dim
        self.embedding = make_embedding(space, config.memory_dim)
        widths = [size + config.memory_dim] + [config.width] * config.layers
        hidden = [
            layer
            for inner, outer in zip(widths, widths[1:], strict=False)
            for layer in (nn.Linear(inner, outer), nn.GELU())
        ]
        self.mlp = nn.Sequential(*hidden, nn.Linear(config.width, size))

    def forward(self, memory: Float[Tensor, "B M D"], token: Token) -> Float[Tensor, "B M D"]:
        embedded = self.embedding(token).to(memory.dtype)
        x = self.mlp(torch.cat([memory.flatten(1), embedded], dim=1))
        return normalize_memory(x.unflatten(1, (self.memory_tokens, self.memory_dim)))


class GRUCell(Cell):
    """A stacked GRU: memory token l is the state of layer l, which reads the layer below.

    The output is not normalized, which would undo the gates' residual path. Autocast is off,
    because a small change of the state would be lost to rounding.
    """

    def __init__(self, config: CellConfig, space: Space) -> None:
        super().__init__()
        self.memory_tokens, self.memory_dim = config.memory_tokens, config.memory_dim
        self.embedding = make_embedding(space, config.memory_dim)
        self.layers = nn.ModuleList(
            nn.GRUCell(config.memory_dim, config.memory_dim) for _ in range(config.memory_tokens)
        )

    def forward(self, memory: Float[Tensor, "B M D"], token: Token) -> Float[Tensor, "B M D"]:
        states = []
        with torch.autocast(memory.device.type, enabled=False):
            below, memory = self.embedding(token), memory.to(self.embedding.weight.dtype)
            for layer, state in zip(self.layers, memory.unbind(1), strict=True):
                below = layer(below, state)
                states.append(below)
        return torch.stack(states, dim=1)


class LSTMCell(Cell):
    """A stacked LSTM: memory tokens 2l and 2l + 1 are the states h and c of layer l.

    A layer reads h of the layer below. Neither normalized nor under autocast, as a GRU.
    """

    def __init__(self, config: CellConfig, space: Space) -> None:
        super().__init__()
        self.memory_tokens, self.memory_dim = config.memory_tokens, config.memory_dim
        if config.memory_tokens % 2:
            raise MemtrainError(
                f"cell.memory_tokens={config.memory_tokens}: must be even with cell.kind=lstm, "
                "whose layers have two memory tokens each, h and c; set it to "
                f"{config.memory_tokens + 1}"
            )
        self.embedding = make_embedding(space, config.memory_dim)
        self.layers = nn.ModuleList(
            nn.LSTMCell(config.memory_dim, config.memory_dim)
            for _ in range(config.memory_tokens // 2)
        )

    def forward(self, memory: Float[Tensor, "B M D"], token: Token) -> Float[Tensor, "B M D"]:
        states: list[Tensor] = []
        with torch.autocast(memory.device.type, enabled=False):
            below, memory = self.embedding(token), memory.to(self.embedding.weight.dtype)
            for number, layer in enumerate(self.layers):
                h, c = layer(below, (memory[:, 2 * number], memory[:, 2 * number + 1]))
                states += [h, c]
                below = h
        return torch.stack(states, dim=1)


CELL_CLASSES = {
    "transformer": TransformerCell,
    "mlp": MLPCell,
    "gru": GRUCell,
    "lstm": LSTMCell,
    "attention": AttentionCell,
}


def build_cell(config: CellConfig, space: Space) -> nn.Module:
    """The cell that a config names; a user's cell is checked against the contract."""
    if config.kind in CELL_CLASSES:
        return CELL_CLASSES[config.kind](config, space)
    cell_class = load_class(config.kind, "cell.kind")
    if cell_class is WrappedCell:
        raise MemtrainError(
            f"cell.kind={config.kind}: the run was created with a cell that memtrain.wrap made; "
            "pass the same, cell=memtrain.wrap(...)"
        )
    wrapped = is_wrappable(cell_class)
    reads = named(space)
    made_as = f"a cell is made as Class({next(iter(reads))}=..., **options)"
    if wrapped:
        made_as = "cell.options sets its arguments that are numbers, strings or booleans"
    try:
        if wrapped:
            cell = cell_class(**constructor_options(cell_class, config))
        else:
            cell = cell_class(**reads, **config.options)
    except TypeError as error:
        raise MemtrainError(f"cell.kind={config.kind}: {error}; {made_as}") from None
    except MemtrainError:
        raise
    except Exception as error:  # the user's code
        if "can't allocate memory" in str(error):
            raise  # reported by build.py
        raise MemtrainError(
            f"cell.kind={config.kind}: its constructor raised {describe_error(error)}"
        ) from error
    return check_cell(wrap(cell, **reads) if wrapped else cell, **reads)


def make_cell(
    kind: str = "transformer", *, vocab_size: int = 0, values: Values | None = None, **sizes: Any
) -> nn.Module:
    """A built-in cell: transformer, mlp, gru, lstm or attention.

    Args:
        kind: its name.
        vocab_size: the number of tokens, if it reads tokens.
        values: what it reads, if that is numbers.
        sizes: fields of CellConfig; those that are left out are the paper's.

    Example: `make_cell("gru", vocab_size=256, memory_tokens=1, memory_dim=64)`
    """
    if kind not in CELL_CLASSES:
        raise MemtrainError(f"kind={kind!r}: {did_you_mean(str(kind), CELL_CLASSES)}")
    space = space_of(vocab_size, values)
    config = config_from(CellConfig, CellConfig(kind=kind), sizes)
    check_used(config, CellConfig())
    return build_cell(config, space)
