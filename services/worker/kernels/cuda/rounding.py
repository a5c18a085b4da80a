# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803, RET505, SIM300 - Triton's compiler wants static branches in full
"""Exact conversions, including denormals and the largest finite numbers.

bfloat16 is converted by its bits, with the results of the device's conversion instructions.
Triton's interpreter, which truncates and loses denormals, then gives the same numbers.
"""

import triton
import triton.language as tl


@triton.jit
def nearest(x):
    """Rounds to an integer, ties to even, for |x| < 2²²."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def widen(x):
    """float16, bfloat16 or float32 → float32."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Finite float32 → the nearest finite of DTYPE, ties to even."""
    if DTYPE == tl.bfloat16:
        x = tl.minimum(tl.maximum(x, -3.3895313892515355e38), 3.3895313892515355e38)
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.float16:
        return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    else:
        return tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def narrow_up(x, short, DTYPE: tl.constexpr):
    """Float32 ≥ 0 → the least DTYPE that is not smaller than x; in float32 the next larger number
    if x was rounded down (`short`), so that a range of denormals keeps a nonzero step."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True) + 0xFFFF
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.float16:
        rounded = x.to(tl.float16)
        below = rounded.to(tl.float32) < x
        bits = rounded.to(tl.int16, bitcast=True) + below.to(tl.int16)
        return bits.to(tl.float16, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True) + short.to(tl.int32)
        return bits.to(tl.float32, bitcast=True)
