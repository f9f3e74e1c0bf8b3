"""The causal encoder in fewer and larger operations, for a CPU.

What the first block projects hangs on a token's symbol or on a register alone, so it is computed
once for each; norms have their gradient written out, and a turn is one product of complex numbers
(`written_out.fold`). The mathematics is that of `CausalEncoder`.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from memtrain.accel.cpu_transformer import Weights, fold, rms_normalized
from memtrain.models.layers import Block
from memtrain.models.teacher import CausalEncoder, EncoderOutput


class CausalEncoderCPU:
    """Stands in for `CausalEncoder.forward`."""

    def serves(
        self, encoder: CausalEncoder, inputs: Tensor, steps: Tensor, embedding: nn.Embedding
    ) -> bool:
        """Whether there are fewer symbols than tokens, and one precision throughout."""
        few = embedding.num_embeddings < inputs.numel()
        return few and not torch.is_autocast_enabled(inputs.device.type)

    def __call__(
        self,
        encoder: CausalEncoder,
        inputs: Int[Tensor, "B T"],
        steps: Int[Tensor, "B S"],
        embedding: nn.Embedding,
    ) -> EncoderOutput:
        """Memories after `steps`."""
        length, count = inputs.shape[1], len(encoder.registers)
        time = torch.arange(length, device=inputs.device)
        age = time[:, None] - time
        seen = (age >= 0) & (age < encoder.context_length)  # (T, T)
        positions = steps[..., None] + 1 + torch.arange(count, device=inputs.device)

        blocks = [block for block in encoder.stack.blocks if isinstance(block, Block)]
        heads = blocks[0].attention.heads
        encoder.stack.rotary.reserve(length + count)
        phase = encoder.stack.rotary.phase(length + count, embedding.weight.dtype)
        phase = phase.expand(-1, 1, heads, -1).flatten(1)  # (L, I/2), the same for all heads
        layer = _Layer(heads, seen, ~seen[steps], phase[:length], phase[positions])

        tokens, registers = embedding.weight, encoder.registers
        for i, block in enumerate(blocks):
            weights = fold(block)
            used = slice(None) if i + 1 < len(blocks) else slice(1, None)
            of_tokens = _project(tokens, weights.project_in[used])
            of_registers = _project(registers, weights.project_in)
            if i == 0:
                of_tokens = [F.embedding(inputs, part) for part in of_tokens]
                of_registers = [part.expand(*steps.shape, -1, -1) for part in of_registers]
                tokens = F.embedding(inputs, tokens)
                registers = registers.expand(*steps.shape, -1, -1)
            *query, key, value = of_tokens
            key = _turn(key, layer.token_phase)
            mixed = layer.registers(of_registers, key, value)
            registers = _finish(registers, mixed, weights)
            if query:
                mixed = layer.tokens(_turn(query[0], layer.token_phase), key, value)
                tokens = _finish(tokens, mixed, weights)
        return EncoderOutput(encoder.to_memory(encoder.stack.norm(registers)), tokens)


class _Layer:
    """Attention of tokens and registers; it is the same in all layers."""

    def __init__(
        self,
        heads: int,
        seen: Bool[Tensor, "T T"],
        hidden: Bool[Tensor, "B S T"],
        token_phase: Complex[Tensor, "T P"],
        register_phase: Complex[Tensor, "B S M P"],
    ) -> None:
        self.heads, self.seen, self.hidden = heads, seen, hidden[:, None, :, None]
        self.token_phase, self.register_phase = token_phase, register_phase

    def tokens(
        self,
        query: Float[Tensor, "B T I"],
        key: Float[Tensor, "B T I"],
        value: Float[Tensor, "B T I"],
    ) -> Float[Tensor, "B T I"]:
        """What tokens read at tokens; scores need no scale, the queries have it."""
        query, key, value = (self._split(part) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self.seen, scale=1.0)
        return mixed.transpose(1, 2).flatten(-2)

    def registers(
        self,
        projected: list[Float[Tensor, "B S M I"]],
        key: Float[Tensor, "B T I"],
        value: Float[Tensor, "B T I"],
    ) -> Float[Tensor, "B S M I"]:
        """What registers read at the tokens before them and at their own step's registers."""
        query, own_key, own_value = projected
        query, own_key = _turn(query, self.register_phase), _turn(own_key, self.register_phase)
        shape = query.shape
        key, value = self._split(key), self._split(value)  # (B, H, T, E)
        past = self._split(query.flatten(1, 2)) @ key.transpose(-1, -2)  # (B, H, S·M, T)
        past = past.unflatten(2, shape[1:3]).masked_fill(self.hidden, float("-inf"))
        query, own_key, own_value = (
            part.unflatten(-1, (self.heads, -1)) for part in (query, own_key, own_value)
        )
        # A product for each register with each of its step: few, and short.
        own = (query[:, :, :, None] * own_key[:, :, None]).sum(-1)  # (B, S, M, M, H)
        weights = torch.cat([past, own.permute(0, 4, 1, 2, 3)], dim=-1).softmax(dim=-1)
        past, own = weights.split([key.shape[2], shape[2]], dim=-1)
        mixed = (past.flatten(2, 3) @ value).transpose(1, 2)  # (B, S·M, H, E)
        own = own.permute(0, 2, 3, 4, 1)[..., None] * own_value[:, :, None]  # (B, S, M, M, H, E)
        return mixed.reshape(shape) + own.sum(3).flatten(-2)

    def _split(self, x: Float[Tensor, "B L I"]) -> Float[Tensor, "B H L E"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _project(x: Float[Tensor, "*rows W"], weights: Float[Tensor, "_ W I"]) -> list[Tensor]:
    """Products of the normalized rows with each of the matrices."""
    normed = rms_normalized(x)
    return [normed @ weight for weight in weights]


def _turn(
    x: Float[Tensor, "*rows I"], phase: Complex[Tensor, "*some P"]
) -> Float[Tensor, "*rows I"]:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * phase).flatten(-2)


def _finish(
    x: Float[Tensor, "*rows W"], mixed: Float[Tensor, "*rows I"], weights: Weights
) -> Float[Tensor, "*rows W"]:
    """Everything after the attention."""
    x = x + mixed @ weights.project_out
    hidden = F.linear(rms_normalized(x), weights.up.T, weights.up_bias)
    return x + F.linear(F.gelu(hidden), weights.down.T, weights.down_bias)
