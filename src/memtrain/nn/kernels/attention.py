"""Attention with rotary positions as one operator, from the rows it reads to its heads' sums.

The projection is part of it: that turns queries and keys as it writes them, and autograd never sees
them turned. The product with the heads' sums stays outside. The reference is
`nn.blocks.Attention.forward`.
"""

import torch
from torch import Tensor

from memtrain.nn.blocks import Rotary
from memtrain.nn.kernels.attention_backward import run_backward
from memtrain.nn.kernels.attention_forward import run_forward
from memtrain.nn.kernels.heads import Heads, fits, query_scale
from memtrain.nn.kernels.projection import run_projection

# Rows are (N, L, W), the weight (3·H·E, W). Where only some positions ask, their rows stand alone,
# `asking` (N, Q, W), and there are two projections: to queries, and to keys and values.


def _projections(
    asking: Tensor | None,
    x: Tensor,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Queries, where they stand alone, and the rest."""
    inner = len(weight) // 3

    def project(rows: Tensor, weight: Tensor, first: int, queries: int, keys: int) -> Tensor:
        projected = run_projection(
            rows.flatten(0, 1),
            weight,
            cosine,
            sine,
            head_dim=inner // heads,
            length=rows.shape[1],
            first=first,
            query_columns=queries,
            key_columns=keys,
            scale=query_scale(inner // heads),
        )
        return projected.unflatten(0, rows.shape[:2])

    if asking is None:
        return x.new_empty(0), project(x, weight, 0, inner, inner)
    query = project(asking, weight[:inner], first, inner, 0)
    return query, project(x, weight[inner:], 0, 0, inner)


def _heads(query: Tensor, rest: Tensor, heads: int) -> Heads:
    """Of projections; an operator returns no None: queries that do not stand alone are (0)."""
    return Heads(query if query.dim() == 3 else None, rest, heads)


def _empty_projections(asking: Tensor | None, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    inner = len(weight) // 3
    if asking is None:
        return x.new_empty(0), x.new_empty(*x.shape[:2], 3 * inner)
    return x.new_empty(*asking.shape[:2], inner), x.new_empty(*x.shape[:2], 2 * inner)


# -------------------------------------------------------------------------------- torch operators


@torch.library.custom_op("memtrain::attend", mutates_args=())
def attend(
    asking: Tensor | None,
    x: Tensor,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    first: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of the positions from `first` on, whose rows are given, to all; or of all to all.

    Returns:
        What they read, (N, Q, H·E), and what the backward pass needs: projected queries, if they
        stand alone, the rest of the projection, log2 of the weights' sums.
    """
    query, rest = _projections(asking, x, weight, cosine, sine, heads, first)
    out, log_sum = run_forward(_heads(query, rest, heads), first, causal, keep=True)
    assert log_sum is not None
    return out, query, rest, log_sum


@attend.register_fake
def _(asking, x, weight, cosine, sine, heads, first, causal):
    query, rest = _empty_projections(asking, x, weight)
    given = _heads(query, rest, heads)
    return given.empty_out(), query, rest, given.empty_log_sum()


@torch.library.custom_op("memtrain::attend_only", mutates_args=())
def attend_only(
    asking: Tensor | None,
    x: Tensor,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    first: int,
    causal: bool,
) -> Tensor:
    """`attend` where no gradient will be asked for."""
    query, rest = _projections(asking, x, weight, cosine, sine, heads, first)
    return run_forward(_heads(query, rest, heads), first, causal, keep=False)[0]


@attend_only.register_fake
def _(asking, x, weight, cosine, sine, heads, first, causal):
    return _heads(*_empty_projections(asking, x, weight), heads).empty_out()


@torch.library.custom_op("memtrain::attend_backward", mutates_args=())
def attend_backward(
    query: Tensor,
    rest: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    first: int,
    causal: bool,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of the projections before they were turned."""
    of_query, of_rest = torch.empty_like(query), torch.empty_like(rest)
    run_backward(
        _heads(query, rest, heads),
        _heads(of_query, of_rest, heads),
        out,
        log_sum,
        out_gradient,
        cosine,
        sine,
        first,
        causal,
    )
    return of_query, of_rest


@attend_backward.register_fake
def _(query, rest, *_):
    return torch.empty_like(query), torch.empty_like(rest)


def _context(ctx, inputs, output) -> None:
    asking, x, weight, cosine, sine, ctx.heads, ctx.first, ctx.causal = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(asking, x, weight, cosine, sine, *output)


def _gradient(ctx, out_gradient, *_):
    asking, x, weight, cosine, sine, out, query, rest, log_sum = ctx.saved_tensors
    of_query, of_rest = attend_backward(
        query,
        rest,
        cosine,
        sine,
        ctx.heads,
        ctx.first,
        ctx.causal,
        out,
        log_sum,
        out_gradient.contiguous(),
    )
    wanted = ctx.needs_input_grad
    of_asking = of_x = of_weight = None
    query_weight, rest_weight = weight.split([len(weight) - rest.shape[-1], rest.shape[-1]])
    if wanted[0]:
        of_asking = of_query @ query_weight
    if wanted[1]:
        of_x = of_rest @ rest_weight
    if wanted[2]:
        of_weight = of_rest.flatten(0, 1).T @ x.flatten(0, 1)
        if asking is not None:
            of_weight = torch.cat([of_query.flatten(0, 1).T @ asking.flatten(0, 1), of_weight])
    return of_asking, of_x, of_weight, None, None, None, None, None


attend.register_autograd(_gradient, setup_context=_context)


class KernelAttention:
    """What `nn.blocks.Attention` calls in the place of its reference."""

    def serves(self, x: Tensor) -> bool:
        """Whether a program can hold the keys, and all rows begin where descriptors ask for it."""
        return fits(x.shape[1]) and x.shape[2] % 16 == 0

    def __call__(
        self,
        asking: Tensor | None,
        x: Tensor,
        weight: Tensor,
        rotary: Rotary,
        heads: int,
        first: int,
        causal: bool,
    ) -> Tensor:
        device = x.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        given = (
            None if asking is None else asking.to(kind).contiguous(),
            x.to(kind).contiguous(),
            weight.to(kind),
            *rotary.tables(kind),
            heads,
            first,
            causal,
        )
        return attend(*given)[0] if torch.is_grad_enabled() else attend_only(*given)
