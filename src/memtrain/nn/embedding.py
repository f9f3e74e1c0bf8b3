"""Looking rows up in a table of few symbols."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.nn.blocks import residual

MOST_SYMBOLS = 1024
"""Up to here, one product of all tokens with all symbols is faster than sorting them."""


class _Lookup(torch.autograd.Function):
    """Rows of a table; the gradient is a product with the tokens as one-hot rows.

    torch's own sorts the tokens on a GPU, in a dozen kernels.
    """

    @staticmethod
    def forward(ctx, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.symbols = len(table)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        symbols = torch.arange(ctx.symbols, device=tokens.device)
        hot = (symbols[:, None] == tokens.flatten()).to(gradient.dtype)  # (V, N)
        return hot @ gradient.flatten(0, -2), None


def embed(embedding: nn.Embedding, tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows W"]:
    """The tokens' rows, in the precision of the residual stream that they begin."""
    table = residual(embedding.weight)
    if table.device.type == "cuda" and len(table) <= MOST_SYMBOLS:
        return _Lookup.apply(table, tokens)
    return F.embedding(tokens, table)
