"""Attention inside a tile of whole short sequences: turned by their positions, then mixed."""

import triton
import triton.language as tl


@triton.jit
def turn(x, c, s, R: tl.constexpr, E: tl.constexpr):
    """Rows of a head whose pairs stand side by side, turned by the angles of their positions."""
    left, right = tl.split(tl.reshape(x, (R, E // 2, 2)))
    return tl.reshape(tl.join(left * c - right * s, right * c + left * s), (R, E))


@triton.jit
def mix(q, k, v, local, L: tl.constexpr, CAUSAL: tl.constexpr):
    """What positions read in their own sequence; q carries the scale of base-2 scores."""
    seen = (local // L)[:, None] == (local // L)[None, :]
    if CAUSAL:
        seen = seen & (local[None, :] <= local[:, None])
    score = tl.where(seen, tl.dot(q, tl.trans(k)), -1e30)
    weight = tl.exp2(score - tl.max(score, 1)[:, None])
    return tl.dot(weight.to(v.dtype), v) * (1 / tl.sum(weight, 1))[:, None]
