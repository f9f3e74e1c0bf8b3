"""The teacher: an encoder from the past to a memory, a decoder from a memory to the future.

`teacher.encode(inputs, steps)` gives the memories after the given steps. The bidirectional encoder
(the paper's) reads one window per memory, the causal one reads a sequence once for all memories.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memtrain.config import TeacherConfig
from memtrain.config.validation import config_from
from memtrain.errors import MemtrainError
from memtrain.models.layers import (
    Embedding,
    Lookup,
    Replaceable,
    Stack,
    ValueEmbedding,
    make_embedding,
    normalize_memory,
    projection,
    residual,
)
from memtrain.shapes import Inputs, Values, describe_space, named, space_of

MAX_ROWS = 2048
"""Tokens and registers in one pass of the causal encoder."""


class EncoderOutput(NamedTuple):
    """The result of an encoder."""

    memory: Float[Tensor, "B S M D"]
    tokens: Float[Tensor, "B T W"] | None
    """Hidden states of the tokens before the last block, if tokens do not see the future."""


def _stack(config: TeacherConfig, layers: int) -> Stack:
    return Stack(config.width, layers, config.heads, config.head_dim, config.rotary_fraction)


def _check_sizes(memory_dim: int, memory_tokens: int = 1) -> int:
    """The width of a memory token, if these sizes are whole numbers above 0."""
    sizes = {"memory_tokens": memory_tokens, "memory_dim": memory_dim}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise MemtrainError(f"{name}={size!r}: must be a whole number above 0; {name}=...")
    return memory_dim


def _embed(embedding: Embedding, lookup: Lookup, inputs: Tensor) -> Tensor:
    """Embed tokens by the lookup, numbers by their own module."""
    if isinstance(embedding, ValueEmbedding):
        return residual(embedding(inputs))
    return lookup(embedding.weight, inputs)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class BidirectionalEncoder(nn.Module):
    """Full attention over [context, registers]; the registers become the memory."""

    def __init__(self, config: TeacherConfig, memory_tokens: int, memory_dim: int) -> None:
        super().__init__()
        self.context_length = config.context_length
        self.void = nn.Parameter(torch.randn(config.width)) if config.padding == "void" else None
        self.registers = nn.Parameter(torch.randn(memory_tokens, config.width))
        self.lookup = Lookup()
        self.stack = _stack(config, config.encoder_layers)
        self.to_memory = projection(config.width, memory_dim)

    def forward(
        self,
        inputs: Inputs,
        steps: Int[Tensor, "B S"],
        embedding: Embedding,
    ) -> EncoderOutput:
        """Memories after `steps`, each from the window of context that ends there."""
        window = self.context_length
        if self.void is None:  # masked padding has no effect, so no more than needed
            window = min(window, inputs.shape[1])
        positions = steps[:, :, None] + torch.arange(1 - window, 1, device=inputs.device)
        present = (positions >= 0).flatten(0, 1)  # (N, C); the rest is padding
        rows = torch.arange(len(inputs), device=inputs.device)[:, None, None]
        at, count = (rows, positions.clamp(min=0)), len(self.registers)
        mask = None
        if self.void is None:
            # RoPE is relative, so left padding needs only a mask.
            mask = torch.cat([present, present.new_ones(len(present), count)], dim=1)
        if isinstance(embedding, ValueEmbedding):
            context = residual(embedding(inputs))[at].flatten(0, 1)  # (N, C, W)
            if self.void is not None:
                context = context.where(present[..., None], self.void.to(context.dtype))
            registers = self.registers.to(context.dtype).expand(len(context), -1, -1)
            x = torch.cat([context, registers], dim=1)
        else:
            x = self._look_up(inputs[at].flatten(0, 1), present, embedding.weight)
        memory = self.to_memory(self.stack(x, queries=slice(-count, None), mask=mask))
        return EncoderOutput(memory.unflatten(0, steps.shape), None)

    def _look_up(
        self,
        context: Int[Tensor, "N C"],
        present: Bool[Tensor, "N C"],
        symbols: Float[Tensor, "V W"],
    ) -> Float[Tensor, "N L W"]:
        """Embedded tokens and registers, from one lookup table of symbols, registers and void."""
        count = len(self.registers)
        tables = [symbols, self.registers.to(symbols.dtype)]
        registers = torch.arange(len(symbols), len(symbols) + count, device=context.device)
        registers = registers.expand(len(context), -1)
        if self.void is not None:
            tables.append(self.void.to(symbols.dtype)[None])
            context = context.where(present, len(symbols) + count)
        return self.lookup(torch.cat(tables), torch.cat([context, registers], dim=1))


class CausalEncoder(nn.Module):
    """All memories of a sequence from one pass over its tokens and the registers of all steps.

    Tokens attend causally, at most `context_length` back in every layer. The registers of step t
    attend to the tokens that step t may see and to one another; nothing attends to the registers
    of another step. So the memory after t equals that of a pass over the tokens 0..t alone.
    """

    def __init__(self, config: TeacherConfig, memory_tokens: int, memory_dim: int) -> None:
        super().__init__()
        self.context_length = config.context_length
        self.registers = nn.Parameter(torch.randn(memory_tokens, config.width))
        self.lookup = Lookup()
        self.stack = _stack(config, config.encoder_layers)
        self.to_memory = projection(config.width, memory_dim)

    def forward(
        self,
        inputs: Inputs,
        steps: Int[Tensor, "B S"],
        embedding: Embedding,
    ) -> EncoderOutput:
        """Memories after `steps`, which are split into chunks where they are many.

        Most entries of the attention mask are False when every step has registers, so a chunk has
        at most MAX_ROWS rows, or as many registers as there are tokens.
        """
        length = inputs.shape[1]
        chunk = max(1, max(MAX_ROWS - length, length) // len(self.registers))
        outputs = [self._encode(inputs, some, embedding) for some in steps.split(chunk, dim=1)]
        memories = [output.memory for output in outputs]
        memory = memories[0] if len(memories) == 1 else torch.cat(memories, dim=1)
        return EncoderOutput(memory, outputs[0].tokens)

    def _encode(
        self, inputs: Inputs, steps: Int[Tensor, "B S"], embedding: Embedding
    ) -> EncoderOutput:
        length, count = inputs.shape[1], len(self.registers)
        tokens = _embed(embedding, self.lookup, inputs)
        registers = self.registers.to(tokens.dtype).repeat(len(steps), steps.shape[1], 1)
        x, update = residual(torch.cat([tokens, registers], dim=1)), None  # (B, T+S·M, W)
        time = torch.arange(length, device=inputs.device).expand(len(inputs), -1)
        after = steps[..., None] + 1 + torch.arange(count, device=steps.device)  # (B, S, M)
        positions = torch.cat([time, after.flatten(1)], dim=1)
        mask = self._mask(time, steps)
        self.stack.rotary.reserve(length + count)
        *inner, last = self.stack.blocks
        for block in inner:
            x, update = block(x, update, self.stack.rotary, mask=mask, positions=positions)
        x = x if update is None else x + update
        out = last(
            x,
            None,
            self.stack.rotary,
            queries=slice(length, None),
            mask=mask[:, length:],
            positions=positions,
        )
        memory = self.to_memory(self.stack.end(*out)).unflatten(1, (steps.shape[1], count))
        return EncoderOutput(memory, x[:, :length])

    def _mask(self, time: Int[Tensor, "B T"], steps: Int[Tensor, "B S"]) -> Bool[Tensor, "B L L"]:
        """Which rows (keys) each row (query) sees, of tokens followed by registers."""
        count = len(self.registers)
        last = torch.cat([time, steps.repeat_interleave(count, dim=1)], dim=1)  # (B, L)
        age = last[:, :, None] - time[:, None]  # (B, L, T)
        past = (age >= 0) & (age < self.context_length)
        step = torch.arange(steps.shape[1], device=steps.device).repeat_interleave(count)
        same_step = F.pad(step[:, None] == step, (0, 0, time.shape[1], 0))  # (L, S·M)
        return torch.cat([past, same_step.expand(len(steps), -1, -1)], dim=2)


ENCODERS = {"bidirectional": BidirectionalEncoder, "causal": CausalEncoder}


class Decoder(nn.Module):
    """Attention over [memory, future inputs], to the logits of the future targets.

    Causal, it is the teacher's decoder; with no future inputs it is the RNN's readout, and then
    it may also be bidirectional.

    Example: `Decoder(vocab_size=256, memory_dim=64, width=64, decoder_layers=1)`
    """

    def __init__(
        self,
        config: TeacherConfig | None = None,
        vocab_size: int = 0,
        memory_dim: int = 0,
        *,
        causal: bool = True,
        values: Values | None = None,
        **sizes: Any,
    ) -> None:
        """
        Args:
            config: the sizes, or give them by name.
            vocab_size: the number of tokens, V, if targets are tokens.
            memory_dim: width of a memory token, D; by default the inner width.
            causal: whether a position sees only those before it.
            values: what targets are, if they are numbers.
            sizes: fields of TeacherConfig; those of the encoder are not used.
        """
        super().__init__()
        config = config_from(TeacherConfig, config, sizes)
        memory_dim = _check_sizes(memory_dim or config.width)
        self.space = space = space_of(vocab_size, values)
        self.causal = causal
        self.memory_dim = memory_dim
        self.from_memory = projection(memory_dim, config.width)
        self.stack = _stack(config, config.decoder_layers)
        if isinstance(space, Values):
            self.head = nn.Linear(config.width, space.outputs)
        else:
            self.head = nn.Linear(config.width, space, bias=config.head_bias)

    def forward(
        self,
        memory: Float[Tensor, "N M D"],
        future: Float[Tensor, "N K W"] | None = None,
        target_positions: Int[Tensor, "N A"] | None = None,
        hidden: bool = False,
    ) -> Float[Tensor, "N F _"]:
        """Logits of F = K + 1 targets (the first from the memory alone), or of some of them.

        With `hidden`, the hidden states of width W of which the head makes the logits.
        """
        x = self.from_memory(memory)
        first = x.shape[1] - 1  # the last memory position predicts the first target
        if future is not None:
            x = torch.cat([x, future.to(x.dtype)], dim=1)  # (N, M+K, W)
        queries = slice(first, None) if target_positions is None else target_positions + first
        head = None if hidden else self.head
        return self.stack(x, queries=queries, causal=self.causal, head=head)

    def to_logits(
        self, x: Float[Tensor, "*rows W"], hidden: bool = False
    ) -> Float[Tensor, "*rows _"]:
        """Apply the final norm and head to hidden states of another stack; with `hidden`, the norm
        alone."""
        x = self.stack.norm(x)
        return x if hidden else self.head(x)

    def with_head(
        self, compute: Callable[[nn.Linear, Tensor], Tensor], hidden: Float[Tensor, "*rows W"]
    ) -> Tensor:
        """`compute(head, hidden)`: with sharded weights, only a method finds the head whole."""
        return compute(self.head, hidden)


class Teacher(Replaceable):
    """Encoder and decoder over one shared embedding.

    Example: `Teacher(vocab_size=256, memory_tokens=4, width=64, encoder_layers=2)`; sizes that are
    left out are the paper's.
    """

    def __init__(
        self,
        config: TeacherConfig | None = None,
        vocab_size: int = 0,
        memory_tokens: int = 16,
        memory_dim: int = 0,
        *,
        values: Values | None = None,
        **sizes: Any,
    ) -> None:
        """
        Args:
            config: the sizes, or give them by name.
            vocab_size: the number of tokens, V, if sequences are tokens.
            memory_tokens: tokens per memory, M, as many as the cell's.
            memory_dim: width of a memory token, D, that of the cell; by default the inner width.
            values: what sequences are, if they are numbers.
            sizes: fields of TeacherConfig.
        """
        super().__init__()
        self.config = config = config_from(TeacherConfig, config, sizes)
        memory_dim = _check_sizes(memory_dim or config.width, memory_tokens)
        self.space = space = space_of(vocab_size, values)
        self.memory_tokens, self.memory_dim = memory_tokens, memory_dim
        self.embedding = make_embedding(space, config.width)
        self.lookup = Lookup()
        self.encoder = ENCODERS[config.encoder](config, memory_tokens, memory_dim)
        self.decoder = Decoder(config, memory_dim=memory_dim, **named(space))

    def __repr__(self) -> str:
        memory, size = f"{self.memory_tokens} x {self.memory_dim}", count_parameters(self)
        return (
            f"<Teacher: {self.config.encoder} encoder of width {self.config.width}, memory "
            f"{memory}, {describe_space(self.space)}, {size:,} parameters>"
        )

    @property
    def vocab_size(self) -> int:
        """The number of tokens; 0 if sequences are numbers."""
        return 0 if isinstance(self.space, Values) else self.space

    @property
    def receptive_field(self) -> int:
        """How many tokens back a memory depends on; every layer of the causal encoder adds some."""
        layers = self.config.encoder_layers if self.config.encoder == "causal" else 1
        return layers * (self.config.context_length - 1)

    def encode(
        self, inputs: Inputs, steps: Int[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B S M D"]:
        """The memories after the given steps of each sequence, or after every step.

        Step -1 is before the first input: its memory is the empty one.

        Example: `teacher.encode(inputs)[:, -1]` is the memory of the whole sequence.
        """
        if steps is None:
            steps = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[:2])
        return self._memory(self.encoder(inputs, steps, self.embedding), steps)

    def encode_with_logits(
        self, inputs: Inputs, steps: Int[Tensor, "B S"], hidden: bool = False
    ) -> tuple[Float[Tensor, "B S M D"], Float[Tensor, "B T _"]]:
        """`encode`, and the logits of every token's target from the causal encoder's hidden states
        before its last block, through the decoder's norm and head; with `hidden`, without the head.
        """
        read = self.encoder(inputs, steps, self.embedding)
        assert read.tokens is not None, "the bidirectional encoder's tokens see the future"
        return self._memory(read, steps), self.decoder.to_logits(read.tokens, hidden)

    def _memory(self, read: EncoderOutput, steps: Int[Tensor, "B S"]) -> Float[Tensor, "B S M D"]:
        memory = normalize_memory(read.memory) if self.config.normalize_memory else read.memory
        return memory.where((steps >= 0)[..., None, None], 0)

    def decode(
        self,
        memory: Float[Tensor, "N M D"],
        future_inputs: Int[Tensor, "N K"] | Float[Tensor, "N K X"],
        target_positions: Int[Tensor, "N A"] | None = None,
        hidden: bool = False,
    ) -> Float[Tensor, "N F _"]:
        """Logits of the K + 1 targets that follow the memory, the k-th after k inputs.

        With `target_positions`, only of those targets; the last block skips all others. With
        `hidden`, the hidden states of which the decoder's head makes the logits.
        """
        if self.fast is not None and self.fast.serves(self, memory):
            return self.fast(self, memory, future_inputs, target_positions, hidden)
        future = _embed(self.embedding, self.lookup, future_inputs)
        return self.decoder(memory, future, target_positions, hidden)

    def predict(self, memory: Float[Tensor, "N M D"]) -> Float[Tensor, "N V"]:
        """Logits of the next target alone."""
        return self.decoder(memory)[:, 0]
