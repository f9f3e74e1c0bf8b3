"""Products with what stands around them folded in, for Transformer blocks without autograd.

A norm's gain lies in the weights (`InferenceStack` puts it there), so that a product reads its
rows as they are and applies the norm's scale of each row to the result. For that it sums the rows'
squares on the way (PARTS 0), or reads the sums (PARTS, R) that the product which made the rows
has left (MEASURE), one of each block of its columns: with many rows the registers are worth more.
Products are taken in the weights' precision and summed in fp32.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from memtrain.nn.kernels.functions import LOG2_E, gelu


@triton.jit
def _load_bias(bias, column, OUTER: tl.constexpr):
    return tl.load(bias + column, mask=column < OUTER, other=0.0)[None, :]


@triton.jit
def _load_residual(residual, source, column, OUTER: tl.constexpr):
    at = residual + source[:, None] * OUTER + column[None, :]
    return tl.load(at, mask=(column < OUTER)[None, :], other=0.0)


@triton.jit
def _finish(
    total,
    square,
    shift,
    base,
    out,
    measured,
    row,
    column,
    rows,
    epsilon,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    MEASURE: tl.constexpr,
    BO: tl.constexpr,
):
    """Everything after the product, and the store."""
    if NORM:
        total *= tl.rsqrt(square / INNER + epsilon)[:, None]
    total += shift
    if GELU:
        total = gelu(total)
    total += base
    there = (row < rows)[:, None] & (column < OUTER)[None, :]
    at = out + row[:, None].to(tl.int64) * OUTER + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there)
    if MEASURE:
        square = tl.sum(tl.where(there, total * total, 0.0), 1)
        block = tl.program_id(0) % tl.cdiv(OUTER, BO)
        tl.store(measured + block * rows + row, square, mask=row < rows)


@triton.jit
def _source(row, rows, length, kept, first):
    """Where kept rows stand among all; of rows that are not there the first, to need no mask."""
    row = tl.where(row < rows, row, 0)
    return ((row // kept) * length + first + row % kept).to(tl.int64)


@triton.jit
def _wrapped(column, OUTER: tl.constexpr, BO: tl.constexpr):
    """Columns that are not there read others': no mask either."""
    if OUTER % BO == 0:
        return column
    else:
        return column % OUTER


@triton.jit
def _squares(part):
    """Sums of squares along the last dimension."""
    wide = part.to(tl.float32)
    return tl.sum(wide * wide, len(part.shape) - 1)


@triton.jit
def _squares_before(x_at, inner, INNER: tl.constexpr, BI: tl.constexpr):
    """The rows' sums of squares, in a loop of their own.

    For rows that a product takes as they are. What a loop reads for a product and for something
    else, Triton 3.6 gives one buffer too few: it is filled anew while the product still runs.
    """
    first = tl.load(x_at, mask=(inner < INNER)[None, :], other=0.0)
    total = _squares(first)
    for start in range(BI, INNER, BI):
        inside = (start + inner < INNER)[None, :]
        total += _squares(tl.load(x_at + start, mask=inside, other=0.0))
    return total


@triton.jit
def _sum_of_parts(squares, row, rows, PARTS: tl.constexpr):
    """The rows' sums of squares from those that the product before this one has left."""
    total = tl.load(squares + row)
    for part in tl.static_range(1, PARTS):
        total += tl.load(squares + part * rows + row)
    return total


@triton.jit
def linear(
    x,
    weight,
    bias,
    residual,
    out,
    squares,
    measured,
    rows,
    length,
    kept,
    first,
    epsilon,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    MEASURE: tl.constexpr,
    CHAINED: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
):
    """x W^T at the kept positions of every sequence, in tiles."""
    across: tl.constexpr = (OUTER + BO - 1) // BO
    row = tl.program_id(0) // across * BR + tl.arange(0, BR)
    column = tl.program_id(0) % across * BO + tl.arange(0, BO)
    source = _source(row, rows, length, kept, first)
    if CHAINED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    total = tl.zeros((BR, BO), tl.float32)
    square = tl.zeros((BR,), tl.float32)
    inner = tl.arange(0, BI)
    x_at = x + source[:, None] * INNER + inner[None, :]
    w_at = weight + _wrapped(column, OUTER, BO)[None, :] * INNER + inner[:, None]
    beside: tl.constexpr = x.dtype.element_ty != weight.dtype.element_ty
    if NORM and PARTS == 0 and not beside:
        square += _squares_before(x_at, inner, INNER, BI)
    for start in range(0, INNER, BI):
        if INNER % BI == 0:
            part = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            inside = start + inner < INNER
            part = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
        if NORM and PARTS == 0 and beside:
            square += _squares(part)
        total = tl.dot(part.to(w.dtype), w, total)
    if NORM and PARTS > 0:
        square += _sum_of_parts(squares, source, rows, PARTS)
    shift = _load_bias(bias, column, OUTER) if BIAS else 0.0
    base = _load_residual(residual, source, column, OUTER).to(tl.float32) if RESIDUAL else 0.0
    _finish(
        total,
        square,
        shift,
        base,
        out,
        measured,
        row,
        column,
        rows,
        epsilon,
        INNER,
        OUTER,
        NORM,
        GELU,
        MEASURE,
        BO,
    )


@triton.jit
def linear_few(
    x,
    weight,
    bias,
    residual,
    out,
    squares,
    measured,
    rows,
    length,
    kept,
    first,
    epsilon,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    MEASURE: tl.constexpr,
    CHAINED: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """`linear` for few rows, where latency is all: every load at once, each warp its own part of
    the sum. The weights depend on no other kernel, so they are asked for before it has ended."""
    across: tl.constexpr = (OUTER + BO - 1) // BO
    row = tl.program_id(0) // across * BR + tl.arange(0, BR)
    column = tl.program_id(0) % across * BO + tl.arange(0, BO)
    source = _source(row, rows, length, kept, first)
    slice_of = tl.arange(0, SPLIT)[:, None, None] * BI
    deep = slice_of + tl.arange(0, BI)[None, :, None]  # (S, I, 1)
    flat = slice_of + tl.arange(0, BI)[None, None, :]  # (S, 1, I)
    w_at = weight + _wrapped(column, OUTER, BO)[None, None, :] * INNER + deep
    x_at = x + source[None, :, None] * INNER + flat
    if CHAINED:
        cuda.gdc_launch_dependents()
    w = tl.load(w_at, mask=deep < INNER, other=0.0)
    shift = _load_bias(bias, column, OUTER) if BIAS else 0.0
    if CHAINED:
        cuda.gdc_wait()
    part = tl.load(x_at, mask=flat < INNER, other=0.0)
    base = _load_residual(residual, source, column, OUTER).to(tl.float32) if RESIDUAL else 0.0
    square = tl.zeros((BR,), tl.float32)
    if NORM and PARTS == 0:
        square += tl.sum(_squares(part), 0)
    if NORM and PARTS > 0:
        square += _sum_of_parts(squares, source, rows, PARTS)
    total = tl.sum(tl.dot(part.to(w.dtype), w), 0)
    _finish(
        total,
        square,
        shift,
        base,
        out,
        measured,
        row,
        column,
        rows,
        epsilon,
        INNER,
        OUTER,
        NORM,
        GELU,
        MEASURE,
        BO,
    )


# ------------------------------------------------------------------------------------- attention


@triton.jit
def _turn(x, c, s, R: tl.constexpr, E: tl.constexpr):
    """Rows of a head whose pairs stand side by side, turned by the angles of their positions."""
    left, right = tl.split(tl.reshape(x, (R, E // 2, 2)))
    return tl.reshape(tl.join(left * c - right * s, right * c + left * s), (R, E))


@triton.jit
def _mix(q, k, v, local, L: tl.constexpr, CAUSAL: tl.constexpr):
    """What positions read in their own sequence; q carries the scale of base-2 scores."""
    seen = (local // L)[:, None] == (local // L)[None, :]
    if CAUSAL:
        seen = seen & (local[None, :] <= local[:, None])
    score = tl.where(seen, tl.dot(q, tl.trans(k)), -1e30)
    weight = tl.exp2(score - tl.max(score, 1)[:, None])
    return tl.dot(weight.to(v.dtype), v) * (1 / tl.sum(weight, 1))[:, None]


@triton.jit
def attend(
    x,
    weight,
    out,
    squares,
    cosine,
    sine,
    rows,
    scale,
    epsilon,
    INNER: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
):
    """Norm, projection and attention of one head for GROUP whole sequences."""
    local = tl.arange(0, BR)
    row = (tl.program_id(0) // H).to(tl.int64) * (GROUP * L) + local
    there = (local < GROUP * L) & (row < rows)
    head, column = tl.program_id(0) % H, tl.arange(0, E)
    inner = tl.arange(0, BI)
    angle = (local % L)[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    source = tl.where(there, row, 0)  # where no row is, the first: no mask
    x_at = x + source[:, None] * INNER + inner[None, :]
    own = weight + head * (E * INNER) + column[None, :] * INNER + inner[:, None]
    q, k, v = (
        tl.zeros((BR, E), tl.float32),
        tl.zeros((BR, E), tl.float32),
        tl.zeros((BR, E), tl.float32),
    )
    square = tl.zeros((BR,), tl.float32)
    if CHAINED:
        cuda.gdc_launch_dependents()
    if BI >= INNER:  # everything at once; the weights before the kernel in front has ended
        inside = (inner < INNER)[:, None]
        wq = tl.load(own, mask=inside, other=0.0)
        wk = tl.load(own + H * E * INNER, mask=inside, other=0.0)
        wv = tl.load(own + 2 * H * E * INNER, mask=inside, other=0.0)
        c, s = tl.load(cosine + angle), tl.load(sine + angle)
        if CHAINED:
            cuda.gdc_wait()
        part = tl.load(x_at, mask=(inner < INNER)[None, :], other=0.0)
        if PARTS == 0:
            square += _squares(part)
        part = part.to(wq.dtype)
        q, k, v = tl.dot(part, wq, q), tl.dot(part, wk, k), tl.dot(part, wv, v)
    else:
        if CHAINED:
            cuda.gdc_wait()
        beside: tl.constexpr = x.dtype.element_ty != weight.dtype.element_ty
        if PARTS == 0 and not beside:
            square += _squares_before(x_at, inner, INNER, BI)
        for start in range(0, INNER, BI):
            at = own + start
            if INNER % BI == 0:
                part, wq = tl.load(x_at + start), tl.load(at)
                wk, wv = tl.load(at + H * E * INNER), tl.load(at + 2 * H * E * INNER)
            else:
                inside = start + inner < INNER
                part = tl.load(x_at + start, mask=inside[None, :], other=0.0)
                wq = tl.load(at, mask=inside[:, None], other=0.0)
                wk = tl.load(at + H * E * INNER, mask=inside[:, None], other=0.0)
                wv = tl.load(at + 2 * H * E * INNER, mask=inside[:, None], other=0.0)
            if PARTS == 0 and beside:
                square += _squares(part)
            part = part.to(wq.dtype)
            q, k, v = tl.dot(part, wq, q), tl.dot(part, wk, k), tl.dot(part, wv, v)
    if PARTS > 0:
        square += _sum_of_parts(squares, source, rows, PARTS)
    kind = weight.dtype.element_ty
    level = tl.rsqrt(square / INNER + epsilon)[:, None]
    v = (v * level).to(kind)
    if BI < INNER:  # not before: they would take registers from the loop
        c, s = tl.load(cosine + angle), tl.load(sine + angle)
    q = _turn(q * (level * (scale * LOG2_E)), c, s, BR, E).to(kind)
    k = _turn(k * level, c, s, BR, E).to(kind)
    mixed = _mix(q, k, v, local, L, CAUSAL)
    at = out + row[:, None] * (H * E) + head * E + column[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def group_attention(
    qkv,
    out,
    squares,
    cosine,
    sine,
    rows,
    scale,
    epsilon,
    INNER: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
    BR: tl.constexpr,
):
    """One head of GROUP whole sequences whose projections lie in qkv, still to be normed if there
    are parts of squares of what was projected."""
    local = tl.arange(0, BR)
    row = (tl.program_id(0) // H).to(tl.int64) * (GROUP * L) + local
    there = ((local < GROUP * L) & (row < rows))[:, None]
    head, column = tl.program_id(0) % H, tl.arange(0, E)
    at = qkv + row[:, None] * (3 * H * E) + head * E + column[None, :]
    angle = (local % L)[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    c, s = tl.load(cosine + angle), tl.load(sine + angle)
    if CHAINED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    q = tl.load(at, mask=there, other=0.0).to(tl.float32) * (scale * LOG2_E)
    k = tl.load(at + H * E, mask=there, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * H * E, mask=there, other=0.0)
    if PARTS > 0:
        square = _sum_of_parts(squares, tl.where(row < rows, row, 0), rows, PARTS)
        level = tl.rsqrt(square / INNER + epsilon)[:, None]
        q, k, v = q * level, k * level, (v * level).to(v.dtype)
    q = _turn(q, c, s, BR, E).to(v.dtype)
    k = _turn(k, c, s, BR, E).to(v.dtype)
    mixed = _mix(q, k, v, local, L, CAUSAL)
    at = out + row[:, None] * (H * E) + head * E + column[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=there)
