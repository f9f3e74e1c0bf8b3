"""A Transformer block from kernels: attention, MLP and final norm as autograd functions.

The forward and backward pass of each function are written out by hand. The reference is
`models.layers.Block`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.accel.triton import HEAD_DIMS
from memtrain.accel.triton.attention import AttentionBackward, Heads, keys_fit, run_attention
from memtrain.accel.triton.attention_backward import run_attention_backward
from memtrain.accel.triton.mlp import run_mlp_down_backward, run_mlp_up
from memtrain.accel.triton.norm import column_sums, run_norm, run_norm_backward
from memtrain.accel.triton.qkv import run_qkv
from memtrain.models.layers import (
    Attention,
    Block,
    RMSNorm,
    Rotary,
    refuse_second_derivatives,
)


class KernelBlock:
    """Fast path of `models.layers.Block`, in autocast's precision."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def serves(self, length: int) -> bool:
        """Whether `attend` supports sequences of this length; `finish` supports all."""
        return fits_heads(self.block.attention) and keys_fit(length)

    def attend(
        self, x: Tensor, update: Tensor | None, rotary: Rotary, queries: slice | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Add the update to the residual stream x; return it and attention at the kept positions.

        Args:
            x: The residual stream, (N, L, W).
            update: The previous block's MLP output, not yet added.
            queries: Positions whose queries are computed; None for all.
        """
        kind = _precision(x)
        layer = self.block.attention
        return AttentionFn.apply(
            x.to(kind),
            None if update is None else update.to(kind),
            self.block.attention_norm.weight,
            layer.project_in.weight.to(kind),
            layer.project_out.weight.to(kind),
            *rotary.tables(kind),
            layer.heads,
            queries,
            causal,
        )

    def finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Add attention's result to the stream x; return it and the MLP's output."""
        kind = _precision(x)
        up, _, down = self.block.mlp
        return MLPFn.apply(
            x.to(kind),
            attended.to(kind),
            self.block.mlp_norm.weight,
            up.weight.to(kind),
            up.bias,
            down.weight.to(kind),
            down.bias,
        )

    def end(self, layer: RMSNorm, x: Tensor, update: Tensor) -> Tensor:
        """Add the last update to the stream and apply the stack's final norm, in fp32."""
        kind = _precision(x)
        return FinalNormFn.apply(x.to(kind), update.to(kind), layer.weight)


def fits_heads(layer: Attention) -> bool:
    """Whether the kernels support heads of this size: tiles are powers of two, Triton 3.6 gets
    products with 16 columns wrong, and heads larger than 64 do not fit on the chip."""
    return layer.head_dim in HEAD_DIMS


def _precision(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# ------------------------------------------------------------------------------ autograd functions


class AttentionFn(torch.autograd.Function):
    """(x, update) -> x + update, and attention of its norm, projected back."""

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
        needs_gradient = any(ctx.needs_input_grad)
        first = 0 if kept is None else range(x.shape[1])[kept].start
        total, normed = run_norm(_flat(x), None if update is None else _flat(update), gain)
        normed = normed.view(x.shape)
        query = None
        if kept is None:
            projected = run_qkv(normed, project_in, cosine, sine, heads, 0, "query key value")
        else:
            of_query, of_rest = _split(project_in)
            query = run_qkv(normed[:, kept], of_query, cosine, sine, heads, first, "query")
            projected = run_qkv(normed, of_rest, cosine, sine, heads, 0, "key value")
        mixed, log_sum = run_attention(
            Heads(query, projected, heads), first, causal, needs_gradient
        )
        if needs_gradient:
            ctx.save_for_backward(
                total, normed, gain, project_in, project_out, cosine, sine, query, projected,
                mixed, log_sum,
            )  # fmt: skip
        ctx.heads, ctx.kept, ctx.first, ctx.causal = heads, kept, first, causal
        ctx.summed = update is not None
        return x if update is None else total.view(x.shape), F.linear(mixed, project_out)

    @staticmethod
    def backward(ctx, stream: Tensor, attended: Tensor):  # type: ignore[override]
        refuse_second_derivatives("a Triton kernel")
        (
            total, normed, gain, project_in, project_out, cosine, sine, query, projected,
            mixed, log_sum,
        ) = ctx.saved_tensors  # fmt: skip
        attended = attended.contiguous()
        of_out = _weight_gradient(attended, mixed)
        of_query = None if query is None else torch.empty_like(query)
        of_projected = torch.empty_like(projected)
        run_attention_backward(
            AttentionBackward(
                heads=Heads(query, projected, ctx.heads),
                gradients=Heads(of_query, of_projected, ctx.heads),
                out=mixed,
                log_sum=log_sum,
                out_gradient=attended @ project_out,
                cosine=cosine,
                sine=sine,
                first=ctx.first,
                causal=ctx.causal,
            )
        )
        if of_query is None:
            of_in = _weight_gradient(of_projected, normed)
            of_normed = of_projected @ project_in
        else:
            to_query, to_rest = _split(project_in)
            of_in = torch.cat(
                [
                    _weight_gradient(of_query, normed[:, ctx.kept]),
                    _weight_gradient(of_projected, normed),
                ]
            )
            of_normed = of_projected @ to_rest
            of_normed[:, ctx.kept] += of_query @ to_query
        of_total, shares = run_norm_backward(total, gain, _flat(of_normed), _flat(stream))
        of_gain = column_sums(shares).to(gain.dtype)
        of_x = of_total.view(stream.shape)
        return of_x, of_x if ctx.summed else None, of_gain, of_in, of_out, *[None] * 5


class MLPFn(torch.autograd.Function):
    """(x, attended) -> x + attended, and the MLP of its norm."""

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
        needs_gradient = any(ctx.needs_input_grad)
        total, normed = run_norm(_flat(x), _flat(attended), gain)
        before, after = run_mlp_up(normed, up, up_bias, needs_gradient)
        if needs_gradient:
            ctx.save_for_backward(total, normed, gain, up, down, before, after)
        ctx.kinds = up_bias.dtype, down_bias.dtype
        # The first bias is added in fp32, the second in autocast's precision.
        out = F.linear(after, down, down_bias.to(down.dtype))
        return total.view(x.shape), out.view(x.shape)

    @staticmethod
    def backward(ctx, stream: Tensor, update: Tensor):  # type: ignore[override]
        refuse_second_derivatives("a Triton kernel")
        total, normed, gain, up, down, before, after = ctx.saved_tensors
        gradient = _flat(update)
        of_before, shares = run_mlp_down_backward(gradient, down, before)
        of_down = _weight_gradient(gradient, after)
        of_up = _weight_gradient(of_before, normed)
        of_up_bias, of_down_bias = column_sums(shares).split([len(up), len(down)])
        of_total, shares_of_gain = run_norm_backward(total, gain, of_before @ up, _flat(stream))
        of_gain = column_sums(shares_of_gain).to(gain.dtype)
        of_x = of_total.view(stream.shape)
        of_biases = of_up_bias.to(ctx.kinds[0]), of_down_bias.to(ctx.kinds[1])
        return of_x, of_x, of_gain, of_up, of_biases[0], of_down, of_biases[1]


class FinalNormFn(torch.autograd.Function):
    """(x, update) -> the norm of x + update, in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, update: Tensor, gain: Tensor) -> Tensor:
        total, normed = run_norm(_flat(x), _flat(update), gain, torch.float32)
        ctx.save_for_backward(total, gain)
        ctx.kind = x.dtype
        return normed.view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        refuse_second_derivatives("a Triton kernel")
        total, gain = ctx.saved_tensors
        out, shares = run_norm_backward(total, gain, _flat(gradient), None, ctx.kind)
        of_gain = column_sums(shares).to(gain.dtype)
        of_x = out.view(gradient.shape)
        return of_x, of_x, of_gain


def _flat(x: Tensor) -> Tensor:
    """The rows of all sequences, (R, W)."""
    return x.flatten(0, -2).contiguous()


def _split(project_in: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of queries, and those of keys and values."""
    inner = len(project_in) // 3
    query, rest = project_in.split([inner, 2 * inner])
    return query, rest


def _weight_gradient(out: Tensor, x: Tensor) -> Tensor:
    return out.flatten(0, -2).T @ x.flatten(0, -2)
