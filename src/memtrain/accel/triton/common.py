"""What kernels share: GELU and its slope (torch's erf takes four times the instructions)."""

import triton
import triton.language as tl

HIDE = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether a loop's number of turns is kept from the compiler: a loop of one it takes apart, and
Triton 3.6 then reads beyond shared memory. The interpreter wants to know it."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_DENSITY_AT_ZERO = tl.constexpr(-1.3257480647361595)


@triton.jit
def _tail(distance):
    """The normal distribution's mass beyond a distance d >= 0, that is erfc(d / sqrt(2)) / 2.

    2^p(d) with a polynomial p that falls without end, fitted for the smallest greatest error of
    the result times max(1, d). GELU is then off by at most 8e-7, no more than torch's in fp32 (1e-6
    for large x), at a quarter of erf's instructions.
    """
    p = -0.000500261027 * distance + 0.00728238747
    p = p * distance - 0.0523432605
    p = p * distance - 0.459414065
    p = p * distance - 1.151052
    p = p * distance - 1.0000019
    return tl.exp2(p)


@triton.jit
def gelu(x):
    distance = tl.abs(x)
    return tl.maximum(x, 0.0) - distance * _tail(distance)


@triton.jit
def gelu_slope(x):
    tail = _tail(tl.abs(x))
    density = tl.exp2((-0.5 * LOG2_E) * (x * x) + LOG2_DENSITY_AT_ZERO)
    return tl.where(x < 0.0, tail, 1.0 - tail) + x * density
