"""The projection to queries, keys and values, turned by their positions before it is written.

Turned where they are read, queries and keys would be read in halves, and written once more for the
backward pass. Here they are turned while the product's sums are still in registers: the columns
i and i + E/2 of a head lie in the same thread. The reference is `nn.blocks.Rotary.forward`.

Tiles come and go through tensor descriptors, as in `mlp`.
"""

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.accel.triton.launch import Launch, on_hopper

# A program has BR rows of BO columns, whole heads that are all queries, all keys or all values.
# Programs that follow each other take the same rows, which are then read from memory once.


@triton.jit
def _turned(x, c, s, BR: tl.constexpr, BO: tl.constexpr, E: tl.constexpr):
    """The heads in x, (BR, BO), turned by the angles whose cosines and sines are (BR, E/2)."""
    halves = tl.reshape(x, (BR, BO // E, 2, E // 2))
    left, right = tl.split(tl.permute(halves, (0, 1, 3, 2)))
    c, s = c[:, None, :], s[:, None, :]
    turned = tl.join(left * c - right * s, right * c + left * s)
    return tl.reshape(tl.permute(turned, (0, 1, 3, 2)), (BR, BO))


@triton.jit(do_not_specialize=["first"])
def _project(
    x,
    weight,
    out,
    cosine,
    sine,
    first,
    scale,
    LENGTH: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    E: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
):
    """out = x W^T, its first QUERIES columns turned and scaled, the KEYS after them turned."""
    column_tiles: tl.constexpr = OUTER // BO
    column = tl.program_id(0) % column_tiles * BO
    turned = column < QUERIES + KEYS
    factor = tl.where(column < QUERIES, scale, 1.0)
    row = tl.program_id(0) // column_tiles * BR
    # Plain loads before the product: under way while it is taken.
    position = first + (row + tl.arange(0, BR)) % LENGTH
    angle = position[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    c = tl.load(cosine + angle, mask=turned, other=1.0)
    s = tl.load(sine + angle, mask=turned, other=0.0)
    if BI >= INNER:
        total = tl.dot(x.load([row, 0]), weight.load([column, 0]).T)
    else:
        total = tl.zeros((BR, BO), tl.float32)
        for start in range(0, INNER, BI):
            total = tl.dot(x.load([row, start]), weight.load([column, start]).T, total)
    if turned:
        total = _turned(total, c.to(tl.float32) * factor, s.to(tl.float32) * factor, BR, BO, E)
    out.store([row, column], total.to(out.dtype))


# ---------------------------------------------------------------------------------------- launch


def tiles(rows: int, inner: int, columns: int, element_size: int) -> dict[str, int]:
    """Sizes of a tile and how it is run (see `mlp.tiles`); columns change their kind every so many.

    Large products are bound by what the second cache can give: large tiles ask less of it. With few
    rows, small ones fill the device.
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


def run_projection(
    x: Tensor,
    weight: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    head_dim: int,
    length: int,
    first: int,
    query_columns: int,
    key_columns: int,
    scale: float,
) -> Tensor:
    """x W^T, (R, O), for the rows (R, I) of sequences of one length and a weight (O, I).

    The first `query_columns` columns are turned by the angles of positions `first` and on, and
    scaled; the `key_columns` after them are turned; others are left as they are.
    """
    rows, inner = x.shape
    columns = math.gcd(query_columns, key_columns, len(weight))
    out = x.new_empty(rows, len(weight))
    if head_dim == 64 and on_hopper(x, weight, columns):
        import memtrain.accel.hopper.qkv as projection

        projection.run_projection(
            x,
            weight,
            out,
            cosine,
            sine,
            head_dim=head_dim,
            length=length,
            first=first,
            query_columns=query_columns,
            key_columns=key_columns,
            scale=scale,
        )
        return out
    launch = Launch(x, len(weight), tiles(rows, inner, columns, x.element_size()))
    _project[launch.grid](
        TensorDescriptor.from_tensor(x, [launch.BR, launch.BI]),
        TensorDescriptor.from_tensor(weight, [launch.BO, launch.BI]),
        TensorDescriptor.from_tensor(out, [launch.BR, launch.BO]),
        cosine,
        sine,
        first,
        scale,
        LENGTH=length,
        QUERIES=query_columns,
        KEYS=key_columns,
        E=head_dim,
        **launch.constants,
    )
    return out
