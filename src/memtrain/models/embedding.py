"""Looking rows up in a table of few symbols."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.models.layers import residual

MOST_SYMBOLS = 1024
"""Up to here, one product of all tokens with all symbols is faster than sorting them."""

TableGradient = Callable[[Tensor, Tensor, int], Tensor]
"""The sums of rows (N, W) by token (N): (V, W)."""


def table_gradient(
    tokens: Int[Tensor, " N"], gradient: Float[Tensor, "N W"], symbols: int
) -> Float[Tensor, "V W"]:
    """A product with the tokens as one-hot rows."""
    hot = torch.arange(symbols, device=tokens.device)[:, None] == tokens  # (V, N)
    return hot.to(gradient.dtype) @ gradient


class _Lookup(torch.autograd.Function):
    """Rows of a table. torch's own gradient sorts the tokens on a GPU, in a dozen kernels."""

    @staticmethod
    def forward(ctx, table: Tensor, tokens: Tensor, of_table: TableGradient) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.symbols, ctx.of_table = len(table), of_table
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        return ctx.of_table(tokens.flatten(), gradient.flatten(0, -2), ctx.symbols), None, None


class Lookup(nn.Module):
    """Rows of a table, in the precision of the residual stream that they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.table_gradient: TableGradient = table_gradient
        """An engine may put a faster one in its place."""

    def forward(
        self, table: Float[Tensor, "V W"], tokens: Int[Tensor, "*rows"]
    ) -> Float[Tensor, "*rows W"]:
        table = residual(table)
        if table.device.type == "cuda" and len(table) <= MOST_SYMBOLS:
            return _Lookup.apply(table, tokens, self.table_gradient)
        return F.embedding(tokens, table)
