"""A plain causal Transformer language model in the form of a recurrent cell, for comparison.

Its memory is what such a model keeps of the past: the last tokens, and the hidden state after the
newest one, from which the readout predicts. So it is trained by BPTT, evaluated and sampled like
any other cell, but whole sequences are computed in one parallel pass.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memtrain.config import CellConfig
from memtrain.errors import MemtrainError
from memtrain.models.layers import Block, Stack
from memtrain.shapes import Space, Token, Values

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values (B, H, L, E) of every layer."""


class AttentionCell(nn.Module):
    """Causal attention over the last tokens, at most `config.memory_tokens` of them in each layer.

    A hidden state therefore depends on the last `span` tokens. The memory is one row (1, D): these
    tokens as numbers, 0 where there is none yet and 1 more than the token elsewhere, then the
    hidden state. Step by step it gives what the pass over a whole sequence gives.
    """

    memory_tokens = 1

    def __init__(self, config: CellConfig, space: Space) -> None:
        super().__init__()
        if isinstance(space, Values):
            raise MemtrainError(
                "cell.kind=attention: reads tokens, and the sequences of this task are numbers; "
                "use transformer, gru, lstm or mlp"
            )
        self.context = config.memory_tokens
        self.span = config.layers * (config.memory_tokens - 1) + 1
        self.memory_dim = self.span + config.width
        self.embedding = nn.Embedding(space, config.width)
        self.stack = Stack(
            config.width, config.layers, config.heads, config.head_dim, config.rotary_fraction
        )

    def forward(self, memory: Float[Tensor, "B M D"], token: Token) -> Float[Tensor, "B M D"]:
        """One step: the window is read again, without its oldest token."""
        return self.unroll(token[:, None], memory)[:, -1]

    def unroll(
        self, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"] | None = None
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input in one pass, from a memory or the empty one (None)."""
        if memory is None:
            numbers = F.pad(inputs + 1, (self.span, 0))
            hidden = self._read(inputs)
        else:
            numbers = torch.cat([self._numbers(memory), inputs + 1], dim=1)
            hidden = self._read_masked(numbers[:, 1:])[:, -inputs.shape[1] :]
        windows = numbers.unfold(1, self.span, 1)[:, 1:]  # (B, T, span)
        return _join(windows, hidden)[:, :, None]

    def write(
        self,
        memory: Float[Tensor, "B M D"],
        uniforms: Float[Tensor, "T B"],
        choose: Callable[[Tensor, Tensor], Tensor],
        predict: Callable[[Tensor], Tensor],
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B M D"]]:
        """Sample tokens with a cache of keys and values: the tokens, and the last memory."""
        numbers, cache, tokens = self._numbers(memory), [], []
        there = numbers > 0
        filled = int(there.any(dim=0).sum())  # tokens are at the end of the window
        equal = bool(there[:, self.span - filled :].all())
        if filled:
            self._read_masked(numbers[:, -filled:], cache)
        hidden = memory[:, :, self.span :]
        for place, uniform in enumerate(uniforms, start=filled):
            tokens.append(choose(predict(F.pad(hidden, (self.span, 0))), uniform))
            mask = None
            if not equal:  # rows that have read less do not see what is before their first token
                seen = F.pad(there, (0, len(tokens)), value=True)
                mask = seen[:, None, None, -min(self.context, place + 1) :]
            x = self.embedding(tokens[-1])[:, None]
            hidden = self._layers(x, place, mask, cache)
        written = torch.stack(tokens, dim=1)
        numbers = torch.cat([numbers, written + 1], dim=1)[:, -self.span :]
        return written, _join(numbers, hidden[:, 0])[:, None]

    def _numbers(self, memory: Float[Tensor, "B M D"]) -> Int[Tensor, "B R"]:
        return memory[:, 0, : self.span].round().long()

    def _read(self, inputs: Int[Tensor, "B T"]) -> Float[Tensor, "B T W"]:
        """Hidden states of sequences that begin here."""
        if inputs.shape[1] <= self.context:  # no token is too far back: the faster kernels serve
            return self.stack(self.embedding(inputs), causal=True)
        return self._read_masked(inputs + 1)

    def _read_masked(
        self, numbers: Int[Tensor, "B L"], cache: Cache | None = None
    ) -> Float[Tensor, "B L W"]:
        """Hidden states of tokens, given as in a memory; fills an empty cache."""
        place = torch.arange(numbers.shape[1], device=numbers.device)
        age = place[:, None] - place
        near = (age >= 0) & (age < self.context)
        # A place without a token sees itself: attention to nothing would be NaN.
        mask = (near & (numbers > 0)[:, None]) | (age == 0)
        return self._layers(self.embedding((numbers - 1).clamp(min=0)), 0, mask[:, None], cache)

    def _layers(
        self,
        x: Float[Tensor, "B L W"],
        first: int,
        mask: Bool[Tensor, "#B 1 L _"] | None,
        cache: Cache | None,
    ) -> Float[Tensor, "B L W"]:
        """The stack in plain operations, from position `first`; attends to the cache too."""
        rotary, grown, end = self.stack.rotary, [], first + x.shape[1]
        rotary.reserve(end)
        place = torch.arange(first, end, device=x.device)
        for number, block in enumerate(self.stack.blocks):
            assert isinstance(block, Block)
            query, key, value = block.attention.qkv(block.attention_norm(x))
            query, key = rotary(query, place), rotary(key, place)
            if cache:
                key = torch.cat([cache[number][0], key], dim=2)[:, :, -self.context :]
                value = torch.cat([cache[number][1], value], dim=2)[:, :, -self.context :]
            grown.append((key, value))
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + block.attention.merge(attended)
            x = x + block.mlp(block.mlp_norm(x))
        if cache is not None:
            cache[:] = grown
        return self.stack.norm(x)


def _join(numbers: Int[Tensor, "*rows R"], hidden: Float[Tensor, "*rows W"]) -> Tensor:
    """A memory, which is at least fp32: it holds tokens as numbers."""
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return torch.cat([numbers.to(hidden.dtype), hidden], dim=-1)


class AttentionReadout(nn.Module):
    """Logits of the next token from the hidden state at the end of an AttentionCell's memory."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.space: Space = vocab_size
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(
        self, memory: Float[Tensor, "N M D"], hidden: bool = False
    ) -> Float[Tensor, "N M _"]:
        """Logits, or with `hidden` what the head makes them of."""
        state = memory[..., -self.head.in_features :]
        return state if hidden else self.head(state)

    def with_head(
        self, compute: Callable[[nn.Linear, Tensor], Tensor], hidden: Float[Tensor, "*rows W"]
    ) -> Tensor:
        """`compute(head, hidden)`, as of a Decoder."""
        return compute(self.head, hidden)
