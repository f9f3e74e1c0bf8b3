"""The cell contract, which any module may keep, and a check that says in words what one breaks.

- an `nn.Module` with the whole numbers `memory_tokens` (M) and `memory_dim` (D);
- `forward(memory (B, M, D), token (B,)) -> memory (B, M, D)`, for any batch size;
- rows do not mix, nothing is kept between calls, the memory that came in is not written to;
- gradients reach every parameter and the memory that came in;
- the zero memory is a valid start.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from memtrain.errors import CellContractError


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
    if not isinstance(cell, nn.Module):
        raise CellContractError(f"{name}: a cell must be a torch.nn.Module")
    for key in ("memory_tokens", "memory_dim"):
        size = getattr(cell, key, None)
        if not isinstance(size, int) or size < 1:
            raise CellContractError(
                f"{name}: {key}={size!r}: the cell must state it as a whole number above 0"
            )
    training = cell.training
    cell.eval()
    try:
        probe = _Probe(cell, vocab_size)
        with torch.no_grad():
            probe.check_values()
            probe.check_rows()
        probe.check_gradients()
    finally:
        cell.train(training)
    return cell


class _Probe:
    """A cell, three random rows to try it on, and the rules."""

    def __init__(self, cell: nn.Module, vocab_size: int) -> None:
        self.cell = cell
        self.shape = memory_shape(cell)
        generator = torch.Generator().manual_seed(0)
        device = next((p.device for p in cell.parameters()), torch.device("cpu"))
        self.memory = torch.randn(3, *self.shape, generator=generator).to(device)
        self.token = torch.randint(vocab_size, (3,), generator=generator).to(device)
        self.direction = torch.randn(3, *self.shape, generator=generator).to(device)

    def require(self, kept: bool, rule: str) -> None:
        if not kept:
            raise CellContractError(f"{type(self.cell).__name__}: {rule}")

    def step(self, memory: Tensor, token: Tensor) -> Any:
        try:
            return self.cell(memory, token)
        except Exception as error:  # the user's code: any error is a broken contract
            said = str(error).strip().partition("\n")[0]
            raise CellContractError(
                f"{type(self.cell).__name__}: forward(memory {tuple(memory.shape)}, "
                f"token {tuple(token.shape)}) raised {type(error).__name__}{said and ': ' + said}"
            ) from error

    def check_values(self) -> None:
        """Type, shape, finiteness, and that a step is a function and nothing more."""
        before = self.memory.clone()
        out = self.step(self.memory, self.token)
        self.require(
            isinstance(out, Tensor) and out.is_floating_point(),
            f"forward must return one floating-point tensor, not {type(out).__name__}",
        )
        self.require(
            out.shape == self.memory.shape,
            f"forward must return the shape it got, {tuple(self.memory.shape)}, "
            f"not {tuple(out.shape)}",
        )
        self.require(
            torch.equal(self.memory, before), "forward must not write to the memory it got"
        )
        self.require(bool(out.isfinite().all()), "forward must return finite numbers")
        self.require(
            torch.equal(self.step(self.memory, self.token), out),
            "forward must give the same result twice: keep no state between calls",
        )
        start = self.step(torch.zeros_like(self.memory), self.token)
        self.require(
            bool(start.isfinite().all()),
            "the zero memory must be a valid start, but the step from it is not finite",
        )

    def check_rows(self) -> None:
        """A row's result is its own, whatever stands beside it."""
        mixing = [type(m).__name__ for m in self.cell.modules() if isinstance(m, _BatchNorm)]
        self.require(not mixing, f"rows must not mix, but {mixing[:1]} averages over them")
        out = self.step(self.memory, self.token)
        alone = self.step(self.memory[:1], self.token[:1])
        self.require(
            alone.shape == out[:1].shape and torch.allclose(alone, out[:1], rtol=1e-3, atol=1e-4),
            "rows must not mix: a row alone gives another result than in a batch",
        )

    def check_gradients(self) -> None:
        """They reach the memory that came in and every parameter."""
        memory = self.memory.clone().requires_grad_()
        out = self.step(memory, self.token)
        self.require(
            out.requires_grad, "forward must be differentiable, but its result has no gradient"
        )
        named = {key: p for key, p in self.cell.named_parameters() if p.requires_grad}
        self.require(bool(named), "a cell must have parameters to train")
        # Along a random direction: the length of a normalised memory would have no gradient.
        through = (out * self.direction).sum()
        gradients = torch.autograd.grad(through, [memory, *named.values()], allow_unused=True)
        self.require(
            gradients[0] is not None and bool(gradients[0].any()),
            "the new memory must depend on the old one, but no gradient reaches it",
        )
        unused = [key for key, found in zip(named, gradients[1:], strict=True) if found is None]
        self.require(not unused, f"every parameter must be used, but {unused[:1]} is not")
