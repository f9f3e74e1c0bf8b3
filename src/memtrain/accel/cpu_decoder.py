"""The teacher's decoder where there are fewer symbols than futures: an exact saving on a CPU.

In the first block, queries, keys and values of a future input depend on its symbol alone, and its
rotated key on symbol and position. So they are computed once per symbol, and looked up.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding

from memtrain.models.layers import Block, QueryPositions, Rotary
from memtrain.models.teacher import Teacher


class VocabProjectedDecoder:
    """Replaces `Teacher.decode`."""

    def serves(self, teacher: Teacher, memory: Float[Tensor, "N M D"]) -> bool:
        """Whether there are fewer symbols than futures, and no autocast."""
        few = len(teacher.embedding.weight) < len(memory)
        return few and not torch.is_autocast_enabled(memory.device.type)

    def __call__(
        self,
        teacher: Teacher,
        memory: Float[Tensor, "N M D"],
        future_inputs: Int[Tensor, "N K"],
        target_positions: Int[Tensor, "N A"] | None,
        hidden: bool = False,
    ) -> Float[Tensor, "N F _"]:
        """Logits of the K + 1 targets or of those at `target_positions`, or the hidden states."""
        decoder, stack = teacher.decoder, teacher.decoder.stack
        first = memory.shape[1] - 1  # the last memory position predicts the first target
        stack.rotary.reserve(memory.shape[1] + future_inputs.shape[1])
        queries = slice(first, None) if target_positions is None else target_positions + first
        *inner, last = stack.blocks
        rows = _Rows(decoder.from_memory(memory), teacher.embedding.weight, future_inputs)
        if not inner:
            x, update = rows.first_block(last, stack.rotary, queries)
        else:
            x, update = rows.first_block(inner[0], stack.rotary, None)
            for block in inner[1:]:
                x, update = block(x, update, stack.rotary, None, True)
            x, update = last(x, update, stack.rotary, queries, True)
        x = stack.norm(x + update)
        return x if hidden else decoder.head(x)


class _Rows:
    """[memory, future inputs] as indices into one table: memory tokens first, then symbols."""

    def __init__(
        self,
        memory: Float[Tensor, "N M W"],
        symbols: Float[Tensor, "V W"],
        future_inputs: Int[Tensor, "N K"],
    ) -> None:
        self.memory_shape, self.symbols = memory.shape[:2], len(symbols)
        self.future_inputs = future_inputs
        self.table = torch.cat([memory.flatten(0, 1), symbols])  # (R, W)
        count = memory.shape[0] * memory.shape[1]
        self.memories = torch.arange(count, device=memory.device).view(self.memory_shape)
        self.index = torch.cat([self.memories, count + future_inputs], dim=1)  # (N, L)

    def first_block(
        self, block: nn.Module, rotary: Rotary, queries: QueryPositions
    ) -> tuple[Float[Tensor, "N A W"], Float[Tensor, "N A W"]]:
        """The stream after the first block at the query positions, and its update."""
        assert isinstance(block, Block)
        attention = block.attention
        normed = block.attention_norm(self.table)
        query, key, value = attention.project_in(normed).chunk(3, dim=-1)  # each (R, I)
        positions = torch.arange(self.index.shape[1], device=self.index.device)
        at, index = positions, self.index
        if queries is not None:
            at = positions[queries]
            shared = isinstance(queries, slice)
            index = self.index[:, queries] if shared else self.index.gather(1, queries)
        mixed = F.scaled_dot_product_attention(
            rotary(attention.split_heads(embedding(index, query)), at),
            attention.split_heads(self._keys(key, attention.heads, rotary, positions)),
            attention.split_heads(embedding(self.index, value)),
            attn_mask=(positions <= at[..., None]).unsqueeze(-3),
        )
        return block.finish(embedding(index, self.table), attention.merge(mixed))

    def _keys(
        self, key: Float[Tensor, "R I"], heads: int, rotary: Rotary, positions: Int[Tensor, " L"]
    ) -> Float[Tensor, "N L I"]:
        """Rotated keys: of each memory token at its position, of each symbol at all positions."""
        count, tokens = self.memory_shape
        own, others = key.split([count * tokens, self.symbols])
        own = own.view(count, tokens, heads, -1).transpose(1, 2)
        own = rotary(own, positions[:tokens]).transpose(1, 2).flatten(0, 1).flatten(1)
        future = positions[tokens:]
        others = others.view(self.symbols, heads, 1, -1).expand(-1, -1, len(future), -1)
        others = rotary(others, future).permute(2, 0, 1, 3).flatten(0, 1).flatten(1)  # (K·V, I)
        index = count * tokens + self.symbols * (future - tokens) + self.future_inputs
        return embedding(torch.cat([self.memories, index], dim=1), torch.cat([own, others]))
