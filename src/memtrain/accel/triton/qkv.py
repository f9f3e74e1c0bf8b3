"""The projection to queries, keys and values, rotated by their positions before it is written.

Rotation happens while the product's sums are still in registers, where columns i and i + E/2 of a
head lie in the same thread. Rotating when reading them instead would read queries and keys in
halves, and write them once more for the backward pass. The reference is
`models.layers.Rotary.forward`. Tiles are loaded and stored through tensor descriptors, as in `mlp`.
"""

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.accel.triton.attention import query_scale
from memtrain.accel.triton.common import MatmulLaunch, hopper_serves_matmul

# A program computes BR rows of BO columns: whole heads that are all queries, all keys or all
# values. Consecutive programs share their rows, which are then read from memory once.


@triton.jit
def _rotated(x, c, s, BR: tl.constexpr, BO: tl.constexpr, E: tl.constexpr):
    """The heads in x, (BR, BO), rotated by angles with these cosines and sines, (BR, E/2)."""
    halves = tl.reshape(x, (BR, BO // E, 2, E // 2))
    left, right = tl.split(tl.permute(halves, (0, 1, 3, 2)))
    c, s = c[:, None, :], s[:, None, :]
    rotated = tl.join(left * c - right * s, right * c + left * s)
    return tl.reshape(tl.permute(rotated, (0, 1, 3, 2)), (BR, BO))


@triton.jit(do_not_specialize=["first"])
def _qkv(
    x, weight, out, cosine, sine, first, scale,
    LENGTH: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, E: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """out = x W^T, with the first QUERIES columns rotated and scaled and the next KEYS rotated."""
    column_tiles: tl.constexpr = OUTER // BO
    column = tl.program_id(0) % column_tiles * BO
    is_rotated = column < QUERIES + KEYS
    factor = tl.where(column < QUERIES, scale, 1.0)
    row = tl.program_id(0) // column_tiles * BR
    # Plain loads are issued before the product, to overlap with it.
    position = first + (row + tl.arange(0, BR)) % LENGTH
    angle = position[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    c = tl.load(cosine + angle, mask=is_rotated, other=1.0)
    s = tl.load(sine + angle, mask=is_rotated, other=0.0)
    if BI >= INNER:
        total = tl.dot(x.load([row, 0]), weight.load([column, 0]).T)
    else:
        total = tl.zeros((BR, BO), tl.float32)
        for start in range(0, INNER, BI):
            total = tl.dot(x.load([row, start]), weight.load([column, start]).T, total)
    if is_rotated:
        total = _rotated(total, c.to(tl.float32) * factor, s.to(tl.float32) * factor, BR, BO, E)
    out.store([row, column], total.to(out.dtype))


def qkv_tiles(rows: int, inner: int, columns: int, element_size: int) -> dict[str, int]:
    """Tile sizes and launch options (see `mlp_tiles`).

    Large products are limited by the L2 cache's bandwidth, of which large tiles need less. With few
    rows, small tiles fill the device. A tile must not cross multiples of `columns`.
    """
    most = 64 if element_size == 2 else 32
    tile = {
        "BO": math.gcd(columns, 128),
        "BI": min(most, max(16, triton.next_power_of_2(inner))),
        "num_stages": 3,
    }
    if rows <= 4096 or element_size > 2:
        return tile | {"BR": 64, "num_warps": 4}
    return tile | {"BR": 128, "num_warps": 8 if tile["BO"] == 128 else 4}


def run_qkv(
    x: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor, heads: int, first: int, parts: str
) -> Tensor:
    """Those of rotated and scaled queries, rotated keys, and values named in `parts`, (N, L, _).

    Args:
        x: Sequences, (N, L, I).
        weight: The projections to these parts, (O, I).
        cosine: A table over positions, (P, E/2), like `sine`.
        first: The position of each sequence's first row.
        parts: For example "query key value".
    """
    rows = x.flatten(0, -2).contiguous()
    part_columns = len(weight) // len(parts.split())
    head_dim = part_columns // heads
    scale = query_scale(head_dim)
    out = rows.new_empty(len(rows), len(weight))
    constants = {
        "LENGTH": x.shape[1],
        "QUERIES": part_columns * ("query" in parts),
        "KEYS": part_columns * ("key" in parts),
        "E": head_dim,
    }
    columns = math.gcd(constants["QUERIES"], constants["KEYS"], len(weight))
    if head_dim == 64 and hopper_serves_matmul(rows, weight, columns):
        from memtrain.accel.hopper.linear import hopper_qkv

        hopper_qkv(rows, weight, out, cosine, sine, first, scale, constants)
        return out.unflatten(0, x.shape[:2])
    launch = MatmulLaunch(rows, len(weight), qkv_tiles(*rows.shape, columns, x.element_size()))
    _qkv[launch.grid](
        TensorDescriptor.from_tensor(rows, [launch.BR, launch.BI]),
        TensorDescriptor.from_tensor(weight, [launch.BO, launch.BI]),
        TensorDescriptor.from_tensor(out, [launch.BR, launch.BO]),
        cosine, sine, first, scale, **constants, **launch.constants,
    )  # fmt: skip
    return out.unflatten(0, x.shape[:2])
