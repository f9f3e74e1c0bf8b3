"""Pre-norm Transformer blocks with rotary positions: the one architecture everything here uses."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotary position embedding (Su et al.), read from tables that grow when asked for more."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, head_dim: int, positions: int = 512, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        # Tables, not formulas: inside a compiled graph sin and cos would be computed per element.
        self._fill(positions, torch.device("cpu"))

    def _fill(self, positions: int, device: torch.device) -> None:
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angle = torch.arange(positions, dtype=torch.float64)[:, None] / self.base**half
        self.register_buffer("cosine", angle.cos().float().to(device), persistent=False)
        self.register_buffer("sine", angle.sin().float().to(device), persistent=False)

    def reserve(self, positions: int) -> None:
        """Make sure that positions 0..positions-1 are in the tables."""
        if positions > len(self.cosine):
            self._fill(max(positions, 2 * len(self.cosine)), self.cosine.device)

    def forward(
        self, x: Float[Tensor, "*rows H L E"], positions: Int[Tensor, "*some L"]
    ) -> Float[Tensor, "*rows H L E"]:
        """Turn the pairs (i, i + E/2) of every head by their position's angles."""
        cosine = self.cosine[positions].to(x.dtype)  # (..., L, E/2)
        sine = self.sine[positions].to(x.dtype)
        if positions.dim() > 1:  # one heads axis between the rows and the positions
            cosine, sine = cosine.unsqueeze(-3), sine.unsqueeze(-3)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class Attention(nn.Module):
    """Multi-head attention whose inner width, heads · head_dim, is free of the outer one."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.project_in = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.project_out = nn.Linear(heads * head_dim, width, bias=False)

    def heads_of(
        self, x: Float[Tensor, "*rows L W"]
    ) -> tuple[
        Float[Tensor, "*rows H L E"], Float[Tensor, "*rows H L E"], Float[Tensor, "*rows H L E"]
    ]:
        """Queries, keys and values of every head."""
        split = self.project_in(x).unflatten(-1, (3, self.heads, self.head_dim))
        query, key, value = split.unbind(-3)  # each (..., L, H, E)
        return query.transpose(-2, -3), key.transpose(-2, -3), value.transpose(-2, -3)

    def merge(self, x: Float[Tensor, "*rows H L E"]) -> Float[Tensor, "*rows L W"]:
        """The heads side by side, projected back to the outer width."""
        return self.project_out(x.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, head_dim)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self,
        x: Float[Tensor, "N L W"],
        rotary: Rotary,
        positions: Int[Tensor, " L"],
        mask: Bool[Tensor, "#N 1 K L"] | None,
        keep: slice,
    ) -> Float[Tensor, "N K W"]:
        """The block's output at the positions to keep; keys and values come from all."""
        query, key, value = self.attention.heads_of(self.attention_norm(x))
        query = rotary(query[:, :, keep], positions[keep])
        key = rotary(key, positions)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.finish(x[:, keep], mixed)

    def finish(
        self, x: Float[Tensor, "*rows L W"], mixed: Float[Tensor, "*rows H L E"]
    ) -> Float[Tensor, "*rows L W"]:
        """Everything after the attention's weighted sum."""
        x = x + self.attention.merge(mixed)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """Blocks that share one table of rotary positions, and a last norm."""

    def __init__(self, width: int, layers: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.rotary = Rotary(head_dim)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(
        self,
        x: Float[Tensor, "N L W"],
        *,
        keep: slice,
        causal: bool = False,
        mask: Bool[Tensor, "N L"] | None = None,
    ) -> Float[Tensor, "N K W"]:
        """Run all blocks and return the positions to keep.

        Args:
            x: the rows to mix.
            keep: the positions that the caller reads. The last block computes only these: an
                exact saving.
            causal: let a position see itself and what stands before it only.
            mask: positions that may be seen (True) by anyone.
        """
        length = x.shape[1]
        self.rotary.reserve(length)
        positions = torch.arange(length, device=x.device)
        seen = mask[:, None, None, :].expand(-1, 1, length, length) if mask is not None else None
        if causal and length > 1:
            lower = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            seen = lower[None, None] if seen is None else seen & lower
        *inner, last = self.blocks
        for block in inner:
            x = block(x, self.rotary, positions, seen, slice(None))
        seen = seen[:, :, keep] if seen is not None else None
        return self.norm(last(x, self.rotary, positions, seen, keep))


def projection(inner: int, outer: int) -> nn.Module:
    """A linear map between two widths, or nothing where they are the same."""
    return nn.Identity() if inner == outer else nn.Linear(inner, outer, bias=False)


def normalize_memory(memory: Float[Tensor, "*rows M D"]) -> Float[Tensor, "*rows M D"]:
    """Scale every memory token to RMS 1, without weights (architecture appendix)."""
    return F.rms_norm(memory, (memory.shape[-1],))
