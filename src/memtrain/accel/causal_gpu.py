"""The causal encoder with tokens and registers as one sequence, for a GPU.

Both go through the same blocks, so a block is one product of all rows and one attention with a mask
that says who sees whom: few kernels, large ones. The mathematics is that of `CausalEncoder`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memtrain.models.layers import RMS_EPSILON, Block, residual
from memtrain.models.teacher import CausalEncoder, EncoderOutput

LONGEST = 2048
"""Rows of a sequence. Evaluation asks for the registers of every step; they see only their own, and
a mask of all pairs would be mostly empty."""


class CausalEncoderGPU:
    """Stands in for `CausalEncoder.forward`."""

    def __init__(self, *, compiled: bool) -> None:
        self.attend: Callable[..., tuple[Tensor, Tensor]] = _attend
        if compiled:
            self.attend = torch.compile(_attend, dynamic=False)

    def serves(
        self, encoder: CausalEncoder, inputs: Tensor, steps: Tensor, embedding: nn.Embedding
    ) -> bool:
        return inputs.shape[1] + steps.shape[1] * len(encoder.registers) <= LONGEST

    def __call__(
        self,
        encoder: CausalEncoder,
        inputs: Int[Tensor, "B T"],
        steps: Int[Tensor, "B S"],
        embedding: nn.Embedding,
    ) -> EncoderOutput:
        """Memories after `steps`."""
        length, count, stack = inputs.shape[1], len(encoder.registers), encoder.stack
        stack.rotary.reserve(length + count)
        tokens = encoder.lookup(embedding.weight, inputs)
        registers = encoder.registers.to(tokens.dtype).repeat(*steps.shape[:1], steps.shape[1], 1)
        x, update = residual(torch.cat([tokens, registers], dim=1)), None  # (B, T+S·M, W)
        time = torch.arange(length, device=inputs.device).expand_as(inputs)
        own = steps[..., None] + 1 + torch.arange(count, device=steps.device)  # (B, S, M)
        positions = torch.cat([time, own.flatten(1)], dim=1)
        cosine, sine = (table[positions][:, None] for table in stack.rotary.tables(x.dtype))
        seen = _seen(time, steps, count, encoder.context_length)[:, None]

        *inner, last = (block for block in stack.blocks if isinstance(block, Block))
        for block in inner:
            x, attended = self.attend(x, update, *_weights(block), cosine, sine, seen, 0)
            x, update = block.finish(x, attended)
        x, attended = self.attend(x, update, *_weights(last), cosine, sine, seen, length)
        memory = stack.end(*last.finish(x[:, length:], attended))
        memory = encoder.to_memory(memory).unflatten(1, (steps.shape[1], count))
        return EncoderOutput(memory, x[:, :length])


def _seen(
    time: Int[Tensor, "B T"], steps: Int[Tensor, "B S"], count: int, context: int
) -> Bool[Tensor, "B L L"]:
    """Which rows (keys) each row sees: tokens of its past; registers also those of their step."""
    when = torch.cat([time, steps.repeat_interleave(count, dim=1)], dim=1)  # (B, L)
    age = when[:, :, None] - time[:, None]  # (B, L, T)
    past = (age >= 0) & (age < context)
    owner = torch.arange(steps.shape[1], device=steps.device).repeat_interleave(count)
    together = owner[:, None] == owner  # (S·M, S·M)
    together = F.pad(together, (0, 0, time.shape[1], 0))  # no token sees a register
    return torch.cat([past, together.expand(len(steps), -1, -1)], dim=2)


def _weights(block: Block) -> tuple[Tensor, Tensor, Tensor, int]:
    layer = block.attention
    norm = block.attention_norm.weight
    return norm, layer.project_in.weight, layer.project_out.weight, layer.heads


def _attend(
    x: Float[Tensor, "B L W"],
    update: Float[Tensor, "B L W"] | None,
    norm: Float[Tensor, " W"],
    project_in: Float[Tensor, "I3 W"],
    project_out: Float[Tensor, "W I"],
    heads: int,
    cosine: Float[Tensor, "B 1 L P"],
    sine: Float[Tensor, "B 1 L P"],
    seen: Bool[Tensor, "B 1 L L"],
    first: int,
) -> tuple[Float[Tensor, "B L W"], Float[Tensor, "B Q W"]]:
    """The stream with its update, and what the rows from `first` on read there."""
    x = x if update is None else x + update
    normed = F.rms_norm(x, x.shape[-1:], norm.to(x.dtype), RMS_EPSILON)
    query, key, value = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in F.linear(normed, project_in).chunk(3, dim=-1)
    )
    query = _turn(query[:, :, first:], cosine[:, :, first:], sine[:, :, first:])
    key = _turn(key, cosine, sine)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, :, first:])
    return x, F.linear(mixed.transpose(1, 2).flatten(2), project_out)


def _turn(
    x: Float[Tensor, "B H Q E"], cosine: Float[Tensor, "B 1 Q P"], sine: Float[Tensor, "B 1 Q P"]
) -> Float[Tensor, "B H Q E"]:
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
