"""The two halves of a Transformer block and a stack's end, each with its gradient, from kernels.

The reference is `models.layers.Block`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.accel.triton import mlp, norm
from memtrain.accel.triton.attention import run_forward
from memtrain.accel.triton.attention_backward import run_backward
from memtrain.accel.triton.attention_heads import Heads, query_scale
from memtrain.accel.triton.column_sum import column_sums
from memtrain.accel.triton.qkv import run_projection


class Attend(torch.autograd.Function):
    """The stream with its update; and what its norm reads by attention, projected back."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        update: Tensor | None,
        gain: Tensor,
        project_in: Tensor,
        project_out: Tensor,
        cosine: Tensor,
        sine: Tensor,
        heads: int,
        kept: slice | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        wanted = any(ctx.needs_input_grad)
        first = 0 if kept is None else range(x.shape[1])[kept].start
        total, normed = norm.run_forward(_flat(x), None if update is None else _flat(update), gain)
        normed = normed.view(x.shape)
        query = None
        if kept is None:
            projected = _project(normed, project_in, cosine, sine, heads, 0, "query key value")
        else:
            of_query, of_rest = _split(project_in)
            query = _project(normed[:, kept], of_query, cosine, sine, heads, first, "query")
            projected = _project(normed, of_rest, cosine, sine, heads, 0, "key value")
        mixed, log_sum = run_forward(Heads(query, projected, heads), first, causal, wanted)
        if wanted:
            ctx.save_for_backward(
                total, normed, gain, project_in, project_out, cosine, sine, query, projected,
                mixed, log_sum,
            )  # fmt: skip
        ctx.heads, ctx.kept, ctx.first, ctx.causal = heads, kept, first, causal
        ctx.summed = update is not None
        return x if update is None else total.view(x.shape), F.linear(mixed, project_out)

    @staticmethod
    def backward(ctx, stream: Tensor, attended: Tensor):  # type: ignore[override]
        (
            total, normed, gain, project_in, project_out, cosine, sine, query, projected,
            mixed, log_sum,
        ) = ctx.saved_tensors  # fmt: skip
        attended = attended.contiguous()
        of_out = _weight_gradient(attended, mixed)
        of_query = None if query is None else torch.empty_like(query)
        of_projected = torch.empty_like(projected)
        run_backward(
            Heads(query, projected, ctx.heads),
            Heads(of_query, of_projected, ctx.heads),
            mixed,
            log_sum,
            attended @ project_out,
            cosine,
            sine,
            ctx.first,
            ctx.causal,
        )
        if of_query is None:
            of_in = _weight_gradient(of_projected, normed)
            of_normed = of_projected @ project_in
        else:
            asking, rest = _split(project_in)
            some = normed[:, ctx.kept]
            of_in = torch.cat(
                [_weight_gradient(of_query, some), _weight_gradient(of_projected, normed)]
            )
            of_normed = of_projected @ rest
            of_normed[:, ctx.kept] += of_query @ asking
        of_total, shares = norm.run_backward(total, gain, _flat(of_normed), _flat(stream))
        of_gain = column_sums(shares).to(gain.dtype)
        of_x = of_total.view(stream.shape)
        return of_x, of_x if ctx.summed else None, of_gain, of_in, of_out, *[None] * 5


class Finish(torch.autograd.Function):
    """The stream with what attention has read; and the MLP of its norm."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        attended: Tensor,
        gain: Tensor,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wanted = any(ctx.needs_input_grad)
        total, normed = norm.run_forward(_flat(x), _flat(attended), gain)
        before, after = mlp.run_up(normed, up, up_bias, wanted)
        if wanted:
            ctx.save_for_backward(total, normed, gain, up, down, before, after)
        ctx.kinds = up_bias.dtype, down_bias.dtype
        # The first bias was added in fp32, the second is as autocast does it.
        out = F.linear(after, down, down_bias.to(down.dtype))
        return total.view(x.shape), out.view(x.shape)

    @staticmethod
    def backward(ctx, stream: Tensor, update: Tensor):  # type: ignore[override]
        total, normed, gain, up, down, before, after = ctx.saved_tensors
        gradient = _flat(update)
        of_before, shares = mlp.run_down_backward(gradient, down, before)
        of_down = _weight_gradient(gradient, after)
        of_up = _weight_gradient(of_before, normed)
        of_up_bias, of_down_bias = column_sums(shares).split([len(up), len(down)])
        of_total, shares_of_gain = norm.run_backward(total, gain, of_before @ up, _flat(stream))
        of_gain = column_sums(shares_of_gain).to(gain.dtype)
        of_x = of_total.view(stream.shape)
        kinds = ctx.kinds
        return (
            of_x, of_x, of_gain, of_up, of_up_bias.to(kinds[0]), of_down,
            of_down_bias.to(kinds[1]),
        )  # fmt: skip


class End(torch.autograd.Function):
    """The norm in fp32 of the stream with its last update."""

    @staticmethod
    def forward(ctx, x: Tensor, update: Tensor, gain: Tensor) -> Tensor:
        total, normed = norm.run_forward(_flat(x), _flat(update), gain, torch.float32)
        ctx.save_for_backward(total, gain)
        ctx.kind = x.dtype
        return normed.view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        total, gain = ctx.saved_tensors
        out, shares = norm.run_backward(total, gain, _flat(gradient), None, ctx.kind)
        of_gain = column_sums(shares).to(gain.dtype)
        of_x = out.view(gradient.shape)
        return of_x, of_x, of_gain


def _flat(x: Tensor) -> Tensor:
    """Rows of all sequences, (R, W)."""
    return x.flatten(0, -2).contiguous()


def _project(
    x: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor, heads: int, first: int, parts: str
) -> Tensor:
    """Turned queries, scaled, turned keys, values, those of them in `parts`, (N, L, _)."""
    inner = len(weight) // len(parts.split())
    out = run_projection(
        _flat(x),
        weight,
        cosine,
        sine,
        head_dim=inner // heads,
        length=x.shape[1],
        first=first,
        query_columns=inner * ("query" in parts),
        key_columns=inner * ("key" in parts),
        scale=query_scale(inner // heads),
    )
    return out.unflatten(0, x.shape[:2])


def _split(project_in: Tensor) -> tuple[Tensor, Tensor]:
    """The projection to queries, and that to keys and values."""
    inner = len(project_in) // 3
    query, rest = project_in.split([inner, 2 * inner])
    return query, rest


def _weight_gradient(out: Tensor, x: Tensor) -> Tensor:
    return out.flatten(0, -2).T @ x.flatten(0, -2)
