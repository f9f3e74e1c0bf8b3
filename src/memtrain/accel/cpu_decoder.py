"""The teacher's decoder where there are fewer symbols than futures: an exact saving on a CPU.

What the first block projects of a future input hangs on its symbol alone, and its turned key on
symbol and position. So symbols are projected and turned, and futures look the results up.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from memtrain.models.layers import Block, QueryPositions, Rotary
from memtrain.models.teacher import Teacher


class VocabProjectedDecoder:
    """Stands in for `Teacher.decode`."""

    def serves(self, teacher: Teacher, memory: Float[Tensor, "N M D"]) -> bool:
        few = len(teacher.embedding.weight) < len(memory)
        return few and not torch.is_autocast_enabled(memory.device.type)

    def __call__(
        self,
        teacher: Teacher,
        memory: Float[Tensor, "N M D"],
        future_inputs: Int[Tensor, "N K"],
        asked: Int[Tensor, "N A"] | None,
    ) -> Float[Tensor, "N F V"]:
        """Logits of the K + 1 targets, or of those that are asked for."""
        decoder, stack = teacher.decoder, teacher.decoder.stack
        tokens = memory.shape[1]
        stack.rotary.reserve(tokens + future_inputs.shape[1])
        keep = slice(tokens - 1, None) if asked is None else asked + (tokens - 1)
        *inner, last = stack.blocks
        futures = _Futures(decoder.from_memory(memory), teacher.embedding.weight, future_inputs)
        if not inner:
            x, update = futures.through(last, stack.rotary, keep)
        else:
            x, update = futures.through(inner[0], stack.rotary, None)
            for block in inner[1:]:
                x, update = block(x, update, stack.rotary, None, True)
            x, update = last(x, update, stack.rotary, keep, True)
        return decoder.head(stack.norm(x + update))


class _Futures:
    """[memory, future inputs] as rows of one table, memories first, then symbols."""

    def __init__(
        self,
        memory: Float[Tensor, "N M W"],
        symbols: Float[Tensor, "V W"],
        future_inputs: Int[Tensor, "N K"],
    ) -> None:
        self.memory_shape, self.symbols = memory.shape[:2], len(symbols)
        self.future_inputs = future_inputs
        self.rows = torch.cat([memory.flatten(0, 1), symbols])  # (R, W)
        count = memory.shape[0] * memory.shape[1]
        self.memories = torch.arange(count, device=memory.device).view(self.memory_shape)
        self.index = torch.cat([self.memories, count + future_inputs], dim=1)  # (N, L)

    def through(
        self, block: torch.nn.Module, rotary: Rotary, keep: QueryPositions
    ) -> tuple[Float[Tensor, "N A W"], Float[Tensor, "N A W"]]:
        """The stream after the first block at the positions to keep, and its update."""
        assert isinstance(block, Block)
        attention = block.attention
        normed = block.attention_norm(self.rows)
        query, key, value = attention.project_in(normed).chunk(3, dim=-1)  # each (R, I)
        positions = torch.arange(self.index.shape[1], device=self.index.device)
        asking, asked = positions, self.index
        if keep is not None:
            asking = positions[keep]
            one_for_all = isinstance(keep, slice)
            asked = self.index[:, keep] if one_for_all else self.index.gather(1, keep)
        past = (positions <= asking[..., None]).unsqueeze(-3)
        mixed = F.scaled_dot_product_attention(
            rotary(attention.split_heads(embedding(asked, query)), asking),
            attention.split_heads(self._keys(key, attention.heads, rotary, positions)),
            attention.split_heads(embedding(self.index, value)),
            attn_mask=past,
        )
        return block.finish(embedding(asked, self.rows), attention.merge(mixed))

    def _keys(
        self, key: Float[Tensor, "R I"], heads: int, rotary: Rotary, positions: Int[Tensor, " L"]
    ) -> Float[Tensor, "N L I"]:
        """Turned keys: of each memory's tokens where they stand, of each symbol everywhere."""
        count, tokens = self.memory_shape
        own, others = key.split([count * tokens, self.symbols])
        own = own.view(count, tokens, heads, -1).transpose(1, 2)
        own = rotary(own, positions[:tokens]).transpose(1, 2).flatten(0, 1).flatten(1)
        later = positions[tokens:]
        others = others.view(self.symbols, heads, 1, -1).expand(-1, -1, len(later), -1)
        others = rotary(others, later)  # (V, H, K, E)
        others = others.permute(2, 0, 1, 3).flatten(0, 1).flatten(1)  # (K·V, I)
        index = count * tokens + self.symbols * (later - tokens) + self.future_inputs
        return embedding(torch.cat([self.memories, index], dim=1), torch.cat([own, others]))
