"""The cell contract, and a check that names the rule that a cell breaks.

- an `nn.Module` with the whole numbers `memory_tokens` (M) and `memory_dim` (D);
- `forward(memory (B, M, D), token (B,)) -> memory (B, M, D)`, for any batch size; of sequences of
  numbers it reads (B, X) instead of tokens;
- rows do not mix, no state is kept between calls, the input memory is not modified;
- gradients reach every parameter and the input memory;
- the zero memory is a valid start;
- parameters and buffers are all its state, and a checkpoint can hold them (cell_state.py).
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from memtrain.config.validation import preserve_rng_state
from memtrain.errors import CellContractError, describe_error
from memtrain.models.cell_state import check_resume, check_tensors, gradients_of
from memtrain.shapes import Space, Values, space_of


def memory_shape(cell: nn.Module) -> tuple[int, int]:
    """(M, D) of a cell."""
    tokens, dim = cell.memory_tokens, cell.memory_dim
    assert isinstance(tokens, int) and isinstance(dim, int)
    return tokens, dim


def check_cell(cell: object, vocab_size: int = 0, *, values: Values | None = None) -> nn.Module:
    """Return the cell if it keeps the contract.

    Args:
        cell: one step, from a memory and an input to the next memory.
        vocab_size: the number of tokens, if it reads tokens, (B,).
        values: what it reads, if that is numbers, (B, X).

    Raises:
        CellContractError: names the broken rule and the observation.
    """
    space = space_of(vocab_size, values)
    try:
        checked = check_kind(cell)
        check_tensors(checked)
        with _unchanged(checked):
            checked.eval()
            probe = _Probe(checked, space)
            with torch.no_grad():
                probe.check_values()
                probe.check_rows()
            with torch.enable_grad():
                probe.check_gradients()
        with (
            _unchanged(checked),
            torch.enable_grad(),
        ):  # in its initial state, since a first call may change it
            check_resume(checked, probe.step, probe.memory, probe.token)
    except CellContractError:
        raise
    except Exception as error:  # the user's code, in a property or an overridden method
        raise CellContractError(
            f"{type(cell).__name__}: checking it raised {describe_error(error)}"
        ) from error
    return checked


def check_kind(cell: object) -> nn.Module:
    """The cell, if it is a module with the shape of its memory."""
    name = type(cell).__name__
    if isinstance(cell, type):
        raise CellContractError(
            f"{cell.__name__}: is a class; pass an instance, cell={cell.__name__}(...)"
        )
    if isinstance(cell, str):
        raise CellContractError(
            f"cell={cell!r}: must be a torch.nn.Module; a built-in cell is named in the config, "
            "config.cell.kind; memtrain.make_cell makes one"
        )
    if not isinstance(cell, nn.Module):
        raise CellContractError(f"{name}: a cell must be a torch.nn.Module")
    sizes = ("memory_tokens", "memory_dim")
    if missing := [key for key in sizes if not hasattr(cell, key)]:
        raise CellContractError(
            f"{name}: {' and '.join(missing)} missing; a cell states the shape of its memory as "
            "memory_tokens (M) and memory_dim (D), and takes a step by "
            "forward(memory (B, M, D), token (B,)) -> memory (B, M, D); of a recurrent cell "
            "(input, states) -> states make one, memtrain.wrap(cell, vocab_size=...)"
        )
    for key in sizes:
        size = getattr(cell, key)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise CellContractError(
                f"{name}: {key}={size!r}: the cell must state it as a whole number above 0"
            )
    return cell


@contextmanager
def _unchanged(cell: nn.Module) -> Iterator[None]:
    """Restore the cell's tensors, attributes and modes, and the RNG states, at the end."""
    attributes = {module: dict(vars(module)) for module in cell.modules()}
    plain = [value for found in attributes.values() for value in found.values()]
    containers = [(c, c.copy()) for c in plain if type(c) in (dict, OrderedDict, list, set)]
    tensors = [*cell.parameters(), *cell.buffers(), *(v for v in plain if isinstance(v, Tensor))]
    before = [(t, t.detach().clone()) for t in tensors if t.layout is torch.strided]
    try:
        with preserve_rng_state():
            yield
    finally:
        for module, found in attributes.items():
            for name in vars(module).keys() - found.keys():
                del vars(module)[name]
            vars(module).update(found)
        for container, copy in containers:  # in place: hook handles refer to them
            container.clear()
            container.extend(copy) if isinstance(container, list) else container.update(copy)
        with torch.no_grad():
            for tensor, value in before:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def sample_token(space: Space, rows: int, generator: torch.Generator) -> Tensor:
    """One random input per row: tokens (B,), or numbers (B, X)."""
    if isinstance(space, Values):
        return torch.randn(rows, space.features, generator=generator)
    return torch.randint(space, (rows,), generator=generator)


class _Probe:
    """A cell, three random rows to test it on, and the rules."""

    def __init__(self, cell: nn.Module, space: Space) -> None:
        self.cell = cell
        self.shape = memory_shape(cell)
        generator = torch.Generator().manual_seed(0)
        device = next((p.device for p in cell.parameters()), torch.device("cpu"))
        self.memory = torch.randn(3, *self.shape, generator=generator).to(device)
        self.token = sample_token(space, 3, generator).to(device)
        if not isinstance(space, Values):
            self.token[0] = space - 1  # an embedding with too few rows fails here
        self.space = space
        self.direction = torch.randn(3, *self.shape, generator=generator).to(device)

    def require(self, kept: bool, rule: str) -> None:
        if not kept:
            raise CellContractError(f"{type(self.cell).__name__}: {rule}")

    def step(self, memory: Tensor, token: Tensor) -> Tensor:
        """The new memory, after checking its type and shape."""
        try:
            out: Any = self.cell(memory, token)
        except Exception as error:  # the user's code: any error is a broken contract
            guess = self._guess(memory, token, error)
            raise CellContractError(
                f"{type(self.cell).__name__}: forward(memory {tuple(memory.shape)}, "
                f"token {tuple(token.shape)}) raised {describe_error(error)}"
                f"{guess and '; ' + guess}"
            ) from error
        self.require(
            isinstance(out, Tensor) and out.is_floating_point(),
            f"forward must return one floating-point tensor, not {type(out).__name__}",
        )
        self.require(
            out.shape == memory.shape,
            f"forward must return the shape it got, {tuple(memory.shape)}, not {tuple(out.shape)}",
        )
        self.require(
            out.dtype == memory.dtype,
            f"forward must return {memory.dtype} for a memory of {memory.dtype}, not "
            f"{out.dtype}; call cell.float(), or return out.to(memory.dtype)",
        )
        return out

    def _guess(self, memory: Tensor, token: Tensor, error: Exception) -> str:
        """The probable mistake, if there is an obvious one."""
        for name, module in self.cell.named_modules():
            if isinstance(module, nn.Embedding) and isinstance(error, IndexError):
                rows = module.num_embeddings
                if isinstance(self.space, int) and rows < self.space:
                    return f"{name} has {rows} rows, the task's vocabulary {self.space} tokens"
        with torch.no_grad(), suppress(Exception):
            if self.cell(token, memory).shape == memory.shape:
                return "are memory and token swapped? It is forward(memory, token)"
        other = [p.dtype for p in self.cell.parameters() if p.is_floating_point()]
        if other and memory.dtype not in other:
            return f"its parameters are {other[0]}, memories {memory.dtype}: call cell.float()"
        return ""

    def check_values(self) -> None:
        """The result is finite and depends only on memory and token."""
        before = self.memory.clone()
        out = self.step(self.memory, self.token)
        self.require(
            torch.equal(self.memory, before), "forward must not write to the memory it got"
        )
        self.require(bool(out.isfinite().all()), "forward must return finite numbers")
        self.require(
            torch.equal(self.step(self.memory, self.token), out),
            "forward must give the same result twice in eval mode: keep no state between calls, "
            "and draw no random numbers",
        )
        start = self.step(torch.zeros_like(self.memory), self.token)
        self.require(
            bool(start.isfinite().all()),
            "the zero memory must be a valid start, but the step from it is not finite",
        )

    def check_rows(self) -> None:
        """A row's result does not depend on the other rows."""
        mixing = [type(m).__name__ for m in self.cell.modules() if isinstance(m, _BatchNorm)]
        self.require(not mixing, f"rows must not mix, but {mixing[:1]} averages over them")
        out = self.step(self.memory, self.token)
        alone = self.step(self.memory[:1], self.token[:1])
        self.require(
            torch.allclose(alone, out[:1], rtol=1e-3, atol=1e-4),
            "rows must not mix: a row alone gives another result than in a batch",
        )

    def check_gradients(self) -> None:
        """Gradients reach the input memory and every parameter."""
        memory = self.memory.clone().requires_grad_()
        out = self.step(memory, self.token)
        self.require(
            out.requires_grad, "forward must be differentiable, but its result has no gradient"
        )
        named = {key: p for key, p in self.cell.named_parameters() if p.requires_grad}
        self.require(bool(named), "a cell must have parameters to train")
        # In a random direction: the norm of a normalized memory has no gradient.
        through = (out * self.direction).sum()
        gradients = gradients_of(self.cell, through, [memory, *named.values()])
        self.require(
            gradients[0] is not None and bool(gradients[0].any()),
            "the new memory must depend on the old one, but no gradient reaches it",
        )
        found = dict(zip(named, gradients[1:], strict=True))
        reached = {key: gradient for key, gradient in found.items() if gradient is not None}
        unused = [key for key in named if key not in reached]
        self.require(not unused, f"every parameter must be used, but {unused[:1]} is not")
        sparse = [key for key, gradient in reached.items() if gradient.layout is not torch.strided]
        self.require(
            not sparse,
            f"the gradient of {sparse[:1]} is sparse, which AdamW cannot use; make the embedding "
            "with sparse=False",
        )
