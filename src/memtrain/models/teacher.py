"""The teacher: an encoder that turns the past into a memory, a decoder that tells the future.

Both encoders answer one call, `teacher.encode(inputs, steps)`: the memories after the given
steps. They differ in what they read: the bidirectional one (the paper's) reads a window of its
own for every memory, the causal one reads the sequence once for all memories.
"""

import math
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.config import TeacherConfig
from memtrain.models.layers import Block, Lookup, Stack, normalize_memory, projection


class EncoderOutput(NamedTuple):
    """What an encoder makes of a sequence."""

    memory: Float[Tensor, "B S M D"]
    tokens: Float[Tensor, "B T W"] | None
    """What stands at each token before the last block, of tokens that do not see the future."""


class BidirectionalEncoder(nn.Module):
    """[context, registers] through full attention; the registers come out as the memory."""

    def __init__(self, config: TeacherConfig, memory_tokens: int, memory_dim: int) -> None:
        super().__init__()
        self.context_length = config.context_length
        self.void = nn.Parameter(torch.randn(config.width)) if config.padding == "void" else None
        self.registers = nn.Parameter(torch.randn(memory_tokens, config.width))
        self.lookup = Lookup()
        self.stack = Stack(config.width, config.encoder_layers, config.heads, config.head_dim)
        self.to_memory = projection(config.width, memory_dim)

    def forward(
        self,
        inputs: Int[Tensor, "B T"],
        steps: Int[Tensor, "B S"],
        embedding: nn.Embedding,
    ) -> EncoderOutput:
        """Memories after `steps`, each from the window of context that ends there."""
        window = self.context_length
        if self.void is None:  # masked padding changes nothing, so less of it will do
            window = min(window, inputs.shape[1])
        positions = steps[:, :, None] + torch.arange(1 - window, 1, device=inputs.device)
        present = (positions >= 0).flatten(0, 1)  # (N, C): what lies before is padding
        rows = torch.arange(len(inputs), device=inputs.device)[:, None, None]
        context = inputs[rows, positions.clamp(min=0)].flatten(0, 1)
        count = len(self.registers)
        # One table for all that stands in a row: symbols, registers, the void.
        symbols = embedding.weight
        tables = [symbols, self.registers.to(symbols.dtype)]
        registers = torch.arange(len(symbols), len(symbols) + count, device=inputs.device)
        registers = registers.expand(len(context), -1)
        mask = None
        if self.void is None:
            # RoPE is relative, so left padding needs a mask and nothing more.
            mask = torch.cat([present, present.new_ones(len(context), count)], dim=1)
        else:
            tables.append(self.void.to(symbols.dtype)[None])
            context = context.where(present, len(symbols) + count)
        x = self.lookup(torch.cat(tables), torch.cat([context, registers], dim=1))  # (N, C+M, W)
        memory = self.to_memory(self.stack(x, queries=slice(-count, None), mask=mask))
        return EncoderOutput(memory.unflatten(0, steps.shape), None)


@runtime_checkable
class FastCausal(Protocol):
    """What an engine may put in the place of the reference, `CausalEncoder.forward`."""

    def serves(
        self, encoder: "CausalEncoder", inputs: Tensor, steps: Tensor, embedding: nn.Embedding
    ) -> bool: ...

    def __call__(
        self, encoder: "CausalEncoder", inputs: Tensor, steps: Tensor, embedding: nn.Embedding
    ) -> EncoderOutput: ...


class CausalEncoder(nn.Module):
    """All memories of a sequence in one pass.

    Tokens attend causally, at most `context_length` back in every layer. The registers of step t
    attend to the tokens that step t may see and to one another; nothing attends to the registers
    of another step. So the memory after t is what a run on the tokens 0..t alone would give.
    """

    def __init__(self, config: TeacherConfig, memory_tokens: int, memory_dim: int) -> None:
        super().__init__()
        self.context_length = config.context_length
        self.registers = nn.Parameter(torch.randn(memory_tokens, config.width))
        self.lookup = Lookup()
        self.stack = Stack(config.width, config.encoder_layers, config.heads, config.head_dim)
        self.to_memory = projection(config.width, memory_dim)
        self.fast: FastCausal | None = None

    def forward(
        self,
        inputs: Int[Tensor, "B T"],
        steps: Int[Tensor, "B S"],
        embedding: nn.Embedding,
    ) -> EncoderOutput:
        """Memories after `steps`."""
        if self.fast is not None and self.fast.serves(self, inputs, steps, embedding):
            return self.fast(self, inputs, steps, embedding)
        length, count = inputs.shape[1], len(self.registers)
        device = inputs.device
        self.stack.rotary.reserve(length + count)
        time = torch.arange(length, device=device)
        age = time[:, None] - time  # (T, T): how far back a key lies
        token_mask = (age >= 0) & (age < self.context_length)
        register_mask = token_mask[steps][:, None, :, None]  # (B, 1, S, 1, T)
        register_positions = steps[..., None] + 1 + torch.arange(count, device=device)  # (B, S, M)

        tokens = self.lookup(embedding.weight, inputs)
        registers = self.registers.to(tokens.dtype).expand(*steps.shape, -1, -1)  # (B, S, M, W)
        *inner, last = self.stack.blocks
        for block in inner:
            tokens, registers = self._layer(
                block, tokens, registers, time, register_positions, token_mask, register_mask
            )
        _, registers = self._layer(
            last, tokens, registers, time, register_positions, None, register_mask
        )
        return EncoderOutput(self.to_memory(self.stack.norm(registers)), tokens)

    def _layer(
        self,
        block: nn.Module,
        tokens: Float[Tensor, "B T W"],
        registers: Float[Tensor, "B S M W"],
        time: Int[Tensor, " T"],
        register_positions: Int[Tensor, "B S M"],
        token_mask: Tensor | None,
        register_mask: Tensor,
    ) -> tuple[Float[Tensor, "B T W"], Float[Tensor, "B S M W"]]:
        """One block over tokens and registers; without a token mask the tokens are left alone."""
        assert isinstance(block, Block)
        rotary = self.stack.rotary
        query, key, value = block.attention.qkv(block.attention_norm(tokens))
        key = rotary(key, time)
        own_query, own_key, own_value = block.attention.qkv(block.attention_norm(registers))
        # Scaling the queries is cheaper than scaling the scores.
        own_query = rotary(own_query, register_positions) / math.sqrt(block.attention.head_dim)
        own_key = rotary(own_key, register_positions)

        past = torch.einsum("bshme,bhte->bhsmt", own_query, key)
        own = torch.einsum("bshme,bshne->bhsmn", own_query, own_key)
        past = past.masked_fill(~register_mask, float("-inf"))
        weights = torch.cat([past, own], dim=-1).softmax(dim=-1)
        past, own = weights.split([key.shape[-2], own_key.shape[-2]], dim=-1)
        mixed = torch.einsum("bhsmt,bhte->bshme", past, value)
        mixed = mixed + torch.einsum("bhsmn,bshne->bshme", own, own_value)
        registers = torch.add(*block.finish(registers, block.attention.merge(mixed)))

        if token_mask is not None:
            mixed = nn.functional.scaled_dot_product_attention(
                rotary(query, time), key, value, attn_mask=token_mask
            )
            tokens = torch.add(*block.finish(tokens, block.attention.merge(mixed)))
        return tokens, registers


ENCODERS = {"bidirectional": BidirectionalEncoder, "causal": CausalEncoder}


class Decoder(nn.Module):
    """[memory, future inputs] through attention to the logits of the future targets.

    Causal, it is the teacher's decoder; with no future inputs it is the RNN's readout, and then
    it may also be bidirectional.
    """

    def __init__(
        self, config: TeacherConfig, vocab_size: int, memory_dim: int, *, causal: bool = True
    ) -> None:
        super().__init__()
        self.causal = causal
        self.from_memory = projection(memory_dim, config.width)
        self.stack = Stack(config.width, config.decoder_layers, config.heads, config.head_dim)
        self.head = nn.Linear(config.width, vocab_size, bias=False)

    def forward(
        self,
        memory: Float[Tensor, "N M D"],
        future: Float[Tensor, "N K W"] | None = None,
        target_positions: Int[Tensor, "N A"] | None = None,
    ) -> Float[Tensor, "N F V"]:
        """Logits of F = K + 1 targets, the first from the memory alone; or of `asked` ones."""
        x = self.from_memory(memory)
        first = x.shape[1] - 1  # the last memory position predicts the first target
        if future is not None:
            x = torch.cat([x, future.to(x.dtype)], dim=1)  # (N, M+K, W)
        queries = slice(first, None) if target_positions is None else target_positions + first
        return self.stack(x, queries=queries, causal=self.causal, head=self.head)

    def to_logits(self, x: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows V"]:
        """Logits of what another stack has left."""
        return self.head(self.stack.norm(x))


@runtime_checkable
class FastDecode(Protocol):
    """What an engine may put in the place of the reference, `Teacher.decode`."""

    def serves(self, teacher: "Teacher", memory: Tensor) -> bool: ...

    def __call__(
        self,
        teacher: "Teacher",
        memory: Tensor,
        future_inputs: Tensor,
        target_positions: Tensor | None,
    ) -> Tensor: ...


class Teacher(nn.Module):
    """Encoder and decoder over one shared embedding."""

    def __init__(
        self, config: TeacherConfig, vocab_size: int, memory_tokens: int, memory_dim: int
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.lookup = Lookup()
        self.encoder = ENCODERS[config.encoder](config, memory_tokens, memory_dim)
        self.decoder = Decoder(config, vocab_size, memory_dim)
        self.fast: FastDecode | None = None

    @property
    def receptive_field(self) -> int:
        """How many tokens before a step its memory may depend on; of the causal encoder, every
        layer looks back anew."""
        layers = self.config.encoder_layers if self.config.encoder == "causal" else 1
        return layers * (self.config.context_length - 1)

    def encode(
        self, inputs: Int[Tensor, "B T"], steps: Int[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B S M D"]:
        """The memories after the given steps of each sequence, or after every step.

        Step -1 is before the first input: its memory is the empty one.

        Example: `teacher.encode(inputs)[:, -1]` is the memory of the whole sequence.
        """
        if steps is None:
            steps = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape)
        return self._memory(self.encoder(inputs, steps, self.embedding), steps)

    def encode_with_logits(
        self, inputs: Int[Tensor, "B T"], steps: Int[Tensor, "B S"]
    ) -> tuple[Float[Tensor, "B S M D"], Float[Tensor, "B T V"]]:
        """`encode`, and the logits of every token's target as the causal encoder's blocks but the
        last can tell it, through the decoder's norm and head."""
        read = self.encoder(inputs, steps, self.embedding)
        assert read.tokens is not None, "the bidirectional encoder's tokens see the future"
        return self._memory(read, steps), self.decoder.to_logits(read.tokens)

    def _memory(self, read: EncoderOutput, steps: Int[Tensor, "B S"]) -> Float[Tensor, "B S M D"]:
        memory = normalize_memory(read.memory) if self.config.normalize_memory else read.memory
        return memory.where((steps >= 0)[..., None, None], 0)

    def decode(
        self,
        memory: Float[Tensor, "N M D"],
        future_inputs: Int[Tensor, "N K"],
        target_positions: Int[Tensor, "N A"] | None = None,
    ) -> Float[Tensor, "N F V"]:
        """Logits of the K + 1 targets that follow the memory; the k-th has read k inputs.

        With `asked`, only of those targets: what the last block need not compute, it does not.
        """
        if self.fast is not None and self.fast.serves(self, memory):
            return self.fast(self, memory, future_inputs, target_positions)
        future = self.lookup(self.embedding.weight, future_inputs)
        return self.decoder(memory, future, target_positions)

    def predict(self, memory: Float[Tensor, "N M D"]) -> Float[Tensor, "N V"]:
        """Logits of the next target alone."""
        return self.decoder(memory)[:, 0]
