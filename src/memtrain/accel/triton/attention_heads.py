"""Where the heads of an attention lie, and how many of their keys a program can hold.

The heads stay where the projection put them, side by side in the last dimension: queries turned and
scaled, keys turned, values (see `projection`). Sequences here are short (272, 79 and 17 rows at the
paper's size), so one program holds all keys and values of a head.

A length is taken as a power of two and a tail, 272 as 256 + 16: tiles are powers of two, and a
padded one would waste half of the work.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.accel import hopper
from memtrain.accel.triton.common import LOG2_E

LONGEST = 320
"""Keys that a program can hold; longer sequences take the reference."""


@triton.jit
def load_rows(x, rows, stride, limit, MASKED: tl.constexpr, E: tl.constexpr):
    """Rows of one head; those at `limit` and beyond are zero, if there may be any."""
    at = x + rows[:, None] * stride + tl.arange(0, E)
    if MASKED:
        return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    return tl.load(at)


def key_tiles(keys: int, least: int = 16) -> dict[str, int]:
    """A power of two of keys, and the rest of them, taken as `least` or more."""
    if keys <= 32:
        return {"MAIN": max(16, triton.next_power_of_2(keys)), "TAIL": 0}
    main = 1 << (keys.bit_length() - 1)
    rest = keys - main
    tail = max(least, triton.next_power_of_2(rest)) if rest else 0
    return {"MAIN": main, "TAIL": tail} if tail < main else {"MAIN": 2 * main, "TAIL": 0}


def fits(keys: int) -> bool:
    """Whether a program can hold that many keys."""
    return keys <= 32 or sum(key_tiles(keys).values()) <= LONGEST


class Heads:
    """Where queries, keys and values of all heads lie, and what every launch says of them."""

    def __init__(self, query: Tensor | None, rest: Tensor, heads: int) -> None:
        if query is None:  # one projection has all three
            self.query, self.key, self.value = rest.chunk(3, dim=-1)
        else:
            self.query = query
            self.key, self.value = rest.chunk(2, dim=-1)
        self.rows, self.queries, self.inner = self.query.shape
        self.keys = self.key.shape[1]
        self.heads, self.head_dim = heads, self.inner // heads

    @property
    def constants(self) -> dict[str, int]:
        """Counts and sizes, and how far it is from one row to the next."""
        return {
            "H": self.heads,
            "Q": self.queries,
            "K": self.keys,
            "E": self.head_dim,
            "QUERY_STRIDE": self.query.stride(1),
            "KEY_STRIDE": self.key.stride(1),
        }

    def empty_out(self) -> Tensor:
        """Room for the heads' weighted sums, side by side."""
        return self.value.new_empty(self.rows, self.queries, self.inner)

    def empty_log_sum(self) -> Tensor:
        """Room for log2 of the weights' sums."""
        return self.value.new_empty(self.rows, self.heads, self.queries, dtype=torch.float32)


def on_hopper(heads: Heads, causal: bool) -> bool:
    """Whether the kernels in `hopper` serve: they are written for the encoder of the paper's size,
    and in a language of this Triton."""
    shape = heads.queries, heads.keys, heads.head_dim
    parts = heads.query, heads.key, heads.value
    return (
        not causal
        and shape == (272, 272, 64)
        # One projection has all three.
        and len({x.stride(1) for x in parts}) == 1
        and all(x.stride(0) == x.shape[1] * x.stride(1) for x in parts)
        and hopper.serves(*parts)
    )


def score_scale(head_dim: int) -> float:
    """By what scores are scaled."""
    return 1 / math.sqrt(head_dim)


def query_scale(head_dim: int) -> float:
    """What queries carry: the scores' scale, and the step from powers of e to powers of 2."""
    return score_scale(head_dim) * LOG2_E.value
