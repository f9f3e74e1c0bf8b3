"""Recurrent cells: one step (memory, token) -> memory, and nothing else.

The contract, which `check_cell` checks and any module of yours may keep:

- an `nn.Module` with the whole numbers `memory_tokens` (M) and `memory_dim` (D);
- `forward(memory (B, M, D), token (B,)) -> memory (B, M, D)`, for any batch size;
- rows do not mix, nothing is kept between calls, the input memory is not written to;
- gradients reach the parameters and the memory that came in;
- the zero memory is a valid start.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.config import CellConfig
from memtrain.errors import CellContractError, MemtrainError
from memtrain.load import load_class
from memtrain.nn.blocks import Stack, normalize_memory, projection


class Cell(nn.Module, ABC):
    """Base of our cells. A cell of yours may derive from it or from nn.Module alone."""

    memory_tokens: int
    memory_dim: int

    @abstractmethod
    def forward(
        self, memory: Float[Tensor, "B M D"], token: Int[Tensor, " B"]
    ) -> Float[Tensor, "B M D"]:
        """One step of the recurrence."""


class TransformerCell(Cell):
    """[memory, token] through full attention; the memory's positions are the next memory."""

    def __init__(self, config: CellConfig, vocab_size: int) -> None:
        super().__init__()
        self.memory_tokens, self.memory_dim = config.memory_tokens, config.memory_dim
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.from_memory = projection(config.memory_dim, config.width)
        self.stack = Stack(config.width, config.layers, config.heads, config.head_dim)
        self.to_memory = projection(config.width, config.memory_dim)

    def forward(
        self, memory: Float[Tensor, "B M D"], token: Int[Tensor, " B"]
    ) -> Float[Tensor, "B M D"]:
        tokens = self.from_memory(memory)
        x = torch.cat([tokens, self.embedding(token).to(tokens.dtype)[:, None]], dim=1)
        x = self.stack(x, keep=slice(self.memory_tokens))
        return normalize_memory(self.to_memory(x))


class MLPCell(Cell):
    """The memory as one vector beside the token's embedding, through an MLP."""

    def __init__(self, config: CellConfig, vocab_size: int) -> None:
        super().__init__()
        self.memory_tokens, self.memory_dim = config.memory_tokens, config.memory_dim
        size = config.memory_tokens * config.memory_dim
        self.embedding = nn.Embedding(vocab_size, config.memory_dim)
        widths = [size + config.memory_dim] + [config.width] * config.layers
        hidden = [
            layer
            for inner, outer in zip(widths, widths[1:], strict=False)
            for layer in (nn.Linear(inner, outer), nn.GELU())
        ]
        self.mlp = nn.Sequential(*hidden, nn.Linear(config.width, size))

    def forward(
        self, memory: Float[Tensor, "B M D"], token: Int[Tensor, " B"]
    ) -> Float[Tensor, "B M D"]:
        embedded = self.embedding(token).to(memory.dtype)
        x = self.mlp(torch.cat([memory.flatten(1), embedded], dim=1))
        return normalize_memory(x.unflatten(1, (self.memory_tokens, self.memory_dim)))


class GRUCell(Cell):
    """A stacked GRU: memory token l is the state of layer l, which reads the layer below.

    No norm on the way out: it would undo the gates' residual path.
    """

    def __init__(self, config: CellConfig, vocab_size: int) -> None:
        super().__init__()
        self.memory_tokens, self.memory_dim = config.memory_tokens, config.memory_dim
        self.embedding = nn.Embedding(vocab_size, config.memory_dim)
        self.layers = nn.ModuleList(
            nn.GRUCell(config.memory_dim, config.memory_dim) for _ in range(config.memory_tokens)
        )

    def forward(
        self, memory: Float[Tensor, "B M D"], token: Int[Tensor, " B"]
    ) -> Float[Tensor, "B M D"]:
        below = self.embedding(token).to(memory.dtype)
        states = []
        for layer, state in zip(self.layers, memory.unbind(1), strict=True):
            below = layer(below, state)
            states.append(below)
        return torch.stack(states, dim=1)


CELL_CLASSES = {"transformer": TransformerCell, "mlp": MLPCell, "gru": GRUCell}


def build_cell(config: CellConfig, vocab_size: int) -> nn.Module:
    """The cell a config names; a cell of the user's is checked against the contract."""
    if config.kind in CELL_CLASSES:
        return CELL_CLASSES[config.kind](config, vocab_size)
    cell_class = load_class(config.kind, "cell.kind")
    try:
        cell = cell_class(vocab_size=vocab_size, **config.options)
    except TypeError as error:
        raise MemtrainError(
            f"cell.kind={config.kind}: {error}; a cell is made as Class(vocab_size=..., **options)"
        ) from None
    return check_cell(cell, vocab_size)


def memory_shape(cell: nn.Module) -> tuple[int, int]:
    """(M, D) of a cell that keeps the contract."""
    tokens, dim = cell.memory_tokens, cell.memory_dim
    assert isinstance(tokens, int) and isinstance(dim, int)
    return tokens, dim


def check_cell(cell: object, vocab_size: int) -> nn.Module:
    """Return the cell if it keeps the contract.

    Raises:
        CellContractError: says in words which rule is broken, and what was seen.
    """
    name = type(cell).__name__

    def require(kept: bool, rule: str) -> None:
        if not kept:
            raise CellContractError(f"{name}: {rule}")

    require(isinstance(cell, nn.Module), "a cell must be a torch.nn.Module")
    assert isinstance(cell, nn.Module)
    sizes = {key: getattr(cell, key, None) for key in ("memory_tokens", "memory_dim")}
    for key, size in sizes.items():
        require(
            isinstance(size, int) and size > 0,
            f"{key}={size!r}: the cell must state it as a whole number above 0",
        )
    shape = (sizes["memory_tokens"], sizes["memory_dim"])
    generator = torch.Generator().manual_seed(0)
    device = next((p.device for p in cell.parameters()), torch.device("cpu"))

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        memory = torch.randn(rows, *shape, generator=generator)  # type: ignore[arg-type]
        token = torch.randint(vocab_size, (rows,), generator=generator)
        return memory.to(device), token.to(device)

    def step(memory: Tensor, token: Tensor) -> Any:
        try:
            return cell(memory, token)
        except Exception as error:  # the user's code: any error is a broken contract
            said = str(error).strip().partition("\n")[0]
            raise CellContractError(
                f"{name}: forward(memory {tuple(memory.shape)}, token {tuple(token.shape)}) "
                f"raised {type(error).__name__}{said and ': ' + said}"
            ) from error

    training = cell.training
    cell.eval()
    try:
        memory, token = draw(3)
        before = memory.clone()
        with torch.no_grad():
            out = step(memory, token)
            require(
                isinstance(out, Tensor) and out.is_floating_point(),
                f"forward must return one floating-point tensor, not {type(out).__name__}",
            )
            require(
                tuple(out.shape) == tuple(memory.shape),
                f"forward must return the shape it got, {tuple(memory.shape)}, "
                f"not {tuple(out.shape)}",
            )
            require(torch.equal(memory, before), "forward must not write to the memory it got")
            require(
                torch.equal(step(memory, token), out),
                "forward must give the same result twice: keep no state between calls",
            )
            alone = step(memory[:1], token[:1])
            require(
                tuple(alone.shape) == (1, *shape)
                and torch.allclose(alone, out[:1], rtol=1e-3, atol=1e-4),
                "rows must not mix: a row alone gives another result than in a batch",
            )
            start = step(torch.zeros_like(memory), token)
            require(
                bool(start.isfinite().all()),
                "the zero memory must be a valid start, but the step from it is not finite",
            )
        memory = memory.requires_grad_()
        out = step(memory, token)
        require(out.requires_grad, "forward must be differentiable, but its result has no gradient")
        wanted = [memory, *(p for p in cell.parameters() if p.requires_grad)]
        require(len(wanted) > 1, "a cell must have parameters to train")
        gradients = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
        require(
            gradients[0] is not None and bool(gradients[0].any()),
            "the new memory must depend on the old one, but no gradient reaches it",
        )
        unused = [
            key
            for (key, _), gradient in zip(
                ((k, p) for k, p in cell.named_parameters() if p.requires_grad),
                gradients[1:],
                strict=True,
            )
            if gradient is None
        ]
        require(not unused, f"every parameter must be used, but {unused[:1]} is not")
    finally:
        cell.train(training)
    return cell
