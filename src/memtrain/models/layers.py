"""Pre-norm Transformer blocks with rotary positions, and the embeddings of tokens and numbers.

A module's attribute `fast` is None or a faster version of its computation, attached by
accel/fast_paths.py.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from memtrain.errors import MemtrainError
from memtrain.shapes import Space, Values

RMS_EPSILON = 1e-6
"""The same for all precisions; torch's default depends on the input's."""
Mask = Bool[Tensor, "N L"] | Bool[Tensor, "N K L"] | None
"""Positions that all queries of a row may attend to, or those of each query."""
QueryPositions = slice | Tensor | None
"""Query positions: a slice for all rows, an index (N, K) per row, or None for all positions."""


def refuse_second_derivatives(part: str, remedy: str = "") -> None:
    """Called in a backward pass that autograd cannot differentiate.

    torch's `once_differentiable` notices only gradients that arrive with a graph: with
    create_graph=True it would leave a part of a second derivative out, without an error.
    """
    if torch.is_grad_enabled():
        raise MemtrainError(
            f"create_graph=True: {part} has no second derivatives; "
            + (remedy or "set rnn.fast to None, or engine.fast off: plain PyTorch has them")
        )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every part is in the mode in which it was."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # By train(), which a part may override; parts come after those that contain them.
        for part, training in modes.items():
            if part.training != training:
                part.train(training)


class Replaceable(nn.Module):
    """A module with a faster replacement of some of its work, made for one device.

    Attributes:
        fast: the replacement, attached by `accel/fast_paths.py`; None on plain PyTorch.
    """

    fast: Any = None

    def _apply(self, fn: Any, recurse: bool = True) -> "Replaceable":
        """What `to`, `cpu` and `cuda` call: on another device the replacement cannot serve."""
        before = _device_of(self)
        super()._apply(fn, recurse)
        if _device_of(self) != before:
            self.fast = None
        return self


def _device_of(module: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in module.parameters()), None)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al.), read from tables that grow on demand.

    `fraction` of a head's channels are rotated: the first pairs, with the frequencies of a head of
    that many channels.
    """

    cosine: Tensor
    sine: Tensor
    half_cosine: Tensor
    half_sine: Tensor

    def __init__(
        self,
        head_dim: int,
        fraction: float = 1.0,
        positions: int = 512,
        base: float = 10_000.0,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotated = round(head_dim * fraction)
        """How many channels of a head are rotated."""
        self.base = base
        # Tables, not formulas: inside a compiled graph sin and cos would be computed per element.
        self.fill(positions, torch.get_default_device())

    def fill(self, positions: int, device: torch.device) -> None:
        """Write the tables of positions 0..positions-1."""
        half = torch.arange(0, self.rotated, 2, dtype=torch.float64) / self.rotated
        angle = torch.arange(positions, dtype=torch.float64)[:, None] / self.base**half
        # The other pairs have angle 0, so that every kernel that reads the tables supports them.
        angle = F.pad(angle, (0, (self.head_dim - self.rotated) // 2))
        self.register_buffer("cosine", angle.cos().float().to(device), persistent=False)
        self.register_buffer("sine", angle.sin().float().to(device), persistent=False)
        self.register_buffer("half_cosine", self.cosine.half(), persistent=False)
        self.register_buffer("half_sine", self.sine.half(), persistent=False)

    def tables(self, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines to rotate rows of this precision; 16 bits for 16-bit rows.

        fp16 for bf16 too: it has more digits, and angles do not need the range.
        """
        if kind.itemsize == 2:
            return self.half_cosine, self.half_sine
        return self.cosine, self.sine

    def phase(self, positions: int, kind: torch.dtype) -> Complex[Tensor, "L 1 1 P"]:
        """The angles of positions 0..positions-1 as complex numbers, to rotate pairs of `kind`."""
        cosine, sine = self.cosine[:positions].to(kind), self.sine[:positions].to(kind)
        return torch.complex(cosine, sine)[:, None, None]

    def reserve(self, positions: int) -> None:
        """Make sure that positions 0..positions-1 are in the tables."""
        if positions > len(self.cosine):
            self.fill(max(positions, 2 * len(self.cosine)), self.cosine.device)

    def forward(
        self, x: Float[Tensor, "*rows H L E"], positions: Int[Tensor, "*some L"]
    ) -> Float[Tensor, "*rows H L E"]:
        """Rotate the pairs (i, i + P) of every head, P = E/2, by their position's angles."""
        cosine = self.cosine[positions].to(x.dtype)  # (..., L, P)
        sine = self.sine[positions].to(x.dtype)
        if positions.dim() > 1:  # one heads axis between the rows and the positions
            cosine, sine = cosine.unsqueeze(-3), sine.unsqueeze(-3)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm with its weight cast to the input's precision, which the fused kernel needs."""

    def forward(self, x: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows W"]:
        assert self.weight is not None
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), RMS_EPSILON)


class Attention(nn.Module):
    """Multi-head attention; its inner width, heads · head_dim, may differ from the outer one."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.project_in = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.project_out = nn.Linear(heads * head_dim, width, bias=False)

    def qkv(
        self, x: Float[Tensor, "*rows L W"]
    ) -> tuple[
        Float[Tensor, "*rows H L E"], Float[Tensor, "*rows H L E"], Float[Tensor, "*rows H L E"]
    ]:
        """Queries, keys and values of every head."""
        query, key, value = self._split(self.project_in(x))
        return query, key, value

    def split_heads(self, projected: Float[Tensor, "*rows L I"]) -> Float[Tensor, "*rows H L E"]:
        """Split one of the three into heads."""
        return projected.unflatten(-1, (self.heads, self.head_dim)).transpose(-2, -3)

    def _split(self, projected: Float[Tensor, "*rows L _"]) -> list[Float[Tensor, "*rows H L E"]]:
        inner = self.heads * self.head_dim
        return [self.split_heads(part) for part in projected.split(inner, dim=-1)]

    def merge(self, x: Float[Tensor, "*rows H L E"]) -> Float[Tensor, "*rows L W"]:
        """Concatenate the heads and project to the outer width."""
        return self.project_out(x.transpose(-2, -3).flatten(-2))

    def forward(
        self,
        x: Float[Tensor, "N L W"],
        rotary: Rotary,
        queries: QueryPositions = None,
        causal: bool = False,
        mask: Mask = None,
        positions: Int[Tensor, "N L"] | None = None,
    ) -> Float[Tensor, "N K W"]:
        """Attention from the query positions to all positions, or to those that `mask` allows."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        query_positions = positions
        if queries is None:
            query, key, value = self.qkv(x)
        else:
            query_weight, rest = self._weights()
            (query,) = self._split(F.linear(gather_positions(x, queries), query_weight))
            key, value = self._split(F.linear(x, rest))
            query_positions = positions[..., queries]  # (K), or (N, K)
        allowed = None
        if mask is not None:
            allowed = mask[:, None, None] if mask.dim() == 2 else mask[:, None]  # (N, 1, _, L)
        if causal:
            past = (positions <= query_positions[..., None]).unsqueeze(-3)  # (..., 1, K, L)
            allowed = past if allowed is None else allowed & past
        mixed = F.scaled_dot_product_attention(
            rotary(query, query_positions), rotary(key, positions), value, attn_mask=allowed
        )
        return self.merge(mixed)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """The projection to queries, and that to keys and values."""
        inner = self.heads * self.head_dim
        query, rest = self.project_in.weight.split([inner, 2 * inner])
        return query, rest


class Block(Replaceable):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The last sum is left to the next block, which can compute it and its norm in one pass.
    """

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads, head_dim)
        self.mlp_norm = RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self,
        x: Float[Tensor, "N L W"],
        update: Float[Tensor, "N L W"] | None,
        rotary: Rotary,
        queries: QueryPositions = None,
        causal: bool = False,
        mask: Mask = None,
        positions: Int[Tensor, "N L"] | None = None,
    ) -> tuple[Float[Tensor, "N K W"], Float[Tensor, "N K W"]]:
        """The stream at the query positions, and its update; keys and values come from all."""
        if (
            self.fast is not None
            and mask is None
            and not isinstance(queries, Tensor)
            and self.fast.serves(x.shape[1])
        ):
            x, attended = self.fast.attend(x, update, rotary, queries, causal)
        else:
            x = x if update is None else x + update
            attended = self.attention(
                self.attention_norm(x), rotary, queries, causal, mask, positions
            )
        return self.finish(x if queries is None else gather_positions(x, queries), attended)

    def finish(
        self, x: Float[Tensor, "*rows L W"], attended: Float[Tensor, "*rows L W"]
    ) -> tuple[Float[Tensor, "*rows L W"], Float[Tensor, "*rows L W"]]:
        """Everything after attention: the stream and its update."""
        if self.fast is not None:
            return self.fast.finish(x, attended)
        x = x + attended
        return x, self.mlp(self.mlp_norm(x))


class Stack(Replaceable):
    """Blocks that share one table of rotary positions, and a last norm."""

    def __init__(
        self, width: int, layers: int, heads: int, head_dim: int, rotary_fraction: float = 1.0
    ) -> None:
        super().__init__()
        self.rotary = Rotary(head_dim, rotary_fraction)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim) for _ in range(layers))
        self.norm = RMSNorm(width)

    def forward(
        self,
        x: Float[Tensor, "N L W"],
        *,
        queries: QueryPositions = None,
        causal: bool = False,
        mask: Bool[Tensor, "N L"] | None = None,
        head: nn.Linear | None = None,
    ) -> Float[Tensor, "N K _"]:
        """Run all blocks and return the query positions.

        Args:
            queries: the positions that the caller needs, the same for all rows or per row (N, K).
                The last block computes only these.
            causal: let a position see only itself and earlier ones.
            mask: positions that may be attended to (True).
            head: a linear layer to apply to the result.
        """
        self.rotary.reserve(x.shape[1])
        if (
            self.fast is not None
            and mask is None
            and not isinstance(queries, Tensor)
            and not torch.is_grad_enabled()
            and self.fast.serves(x)
        ):
            return self.fast(x, queries or slice(None), causal, head)
        x, update = residual(x), None
        *inner, last = self.blocks
        for block in inner:
            x, update = block(x, update, self.rotary, None, causal, mask)
        x, update = last(x, update, self.rotary, queries, causal, mask)
        x = self.end(x, update)
        return x if head is None else head(x)

    def end(
        self, x: Float[Tensor, "N K W"], update: Float[Tensor, "N K W"]
    ) -> Float[Tensor, "N K W"]:
        """The last sum and its norm, in fp32 at least."""
        last = self.blocks[-1]
        assert isinstance(last, Block)
        if last.fast is not None:
            return last.fast.end(self.norm, x, update)
        x = x + update
        return self.norm(x.float() if x.dtype.itemsize == 2 else x)


def residual(x: Tensor) -> Tensor:
    """The residual stream in autocast's precision: in fp32, moving it would dominate."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def gather_positions(
    x: Float[Tensor, "#N L W"] | Bool[Tensor, "#N L W"], queries: slice | Tensor
) -> Tensor:
    """The rows of `x` at the query positions."""
    if isinstance(queries, slice):
        return x[:, queries]
    rows = torch.arange(len(queries), device=queries.device)[:, None]
    return x.expand(len(queries), -1, -1)[rows, queries]


def projection(inner: int, outer: int) -> nn.Module:
    """A linear map between two widths, or the identity if they are equal."""
    return nn.Identity() if inner == outer else nn.Linear(inner, outer, bias=False)


def normalize_memory(memory: Float[Tensor, "*rows M D"]) -> Float[Tensor, "*rows M D"]:
    """Scale every memory token to RMS 1, without weights (architecture appendix)."""
    return F.rms_norm(memory, (memory.shape[-1],), eps=RMS_EPSILON)


MOST_SYMBOLS = 1024
"""Up to this many symbols, a product with one-hot tokens is faster than sorting them."""

TableGradient = Callable[[Tensor, Tensor, int], Tensor]
"""Sums rows (N, W) by token (N) into (V, W)."""


def table_gradient(
    tokens: Int[Tensor, " N"], gradient: Float[Tensor, "N W"], symbols: int
) -> Float[Tensor, "V W"]:
    """Sum rows by token, as a product with one-hot tokens."""
    hot = torch.arange(symbols, device=tokens.device)[:, None] == tokens  # (V, N)
    return hot.to(gradient.dtype) @ gradient


class _Lookup(torch.autograd.Function):
    """Embedding lookup. torch's own gradient sorts the tokens on a GPU, in a dozen kernels."""

    @staticmethod
    def forward(ctx, table: Tensor, tokens: Tensor, of_table: TableGradient) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.symbols, ctx.of_table = len(table), of_table
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        return ctx.of_table(tokens.flatten(), gradient.flatten(0, -2), ctx.symbols), None, None


class Lookup(Replaceable):
    """Embedding lookup, in the precision of the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.fast: TableGradient | None = None

    def forward(
        self, table: Float[Tensor, "V W"], tokens: Int[Tensor, "*rows"]
    ) -> Float[Tensor, "*rows W"]:
        table = residual(table)
        if table.device.type == "cuda" and len(table) <= MOST_SYMBOLS:
            return _Lookup.apply(table, tokens, self.fast or table_gradient)
        return F.embedding(tokens, table)


class ValueEmbedding(nn.Module):
    """Embeds numbers (*rows, X) as vectors: an MLP of the numbers and of which are missing (NaN).

    One linear map would not do: a block normalizes its input, so that only the direction of a
    vector counts, and a line has few directions.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.numbers = nn.Linear(2 * features, width)
        self.mix = nn.Linear(width, width)
        nn.init.normal_(self.numbers.weight, std=1 / math.sqrt(features))
        nn.init.normal_(self.numbers.bias)
        nn.init.normal_(self.mix.weight, std=2 / math.sqrt(width))

    @property
    def weight(self) -> Tensor:
        """The last matrix, whose precision and device are those of the result."""
        return self.mix.weight

    def forward(self, values: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows W"]:
        missing = values.isnan()
        both = torch.cat([values.where(~missing, 0), missing.to(values.dtype)], dim=-1)
        return self.mix(F.gelu(self.numbers(both.to(self.numbers.weight.dtype))))


Embedding = nn.Embedding | ValueEmbedding


def make_embedding(space: Space, width: int) -> Embedding:
    """The embedding of tokens or of values."""
    if isinstance(space, Values):
        return ValueEmbedding(space.features, width)
    return nn.Embedding(space, width)
