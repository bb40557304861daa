"""The rule of NVFP4: what every backend computes, bit for bit. Storage: `te_core.quantized`.

All arithmetic is float32, each operation rounded by itself (nothing is contracted), subnormals kept. A copy is a matrix
of lines: the rows of x, or, columnwise, its columns. Each line is cut into pieces of 16 values; values beyond the edge
are zeros. x is not rounded before, except by the transform.

Amax of a copy: max |value| that is not NaN, over the copy or (`row_scaled`) over each line. It gives
    S = min(bound * 6 / amax, float32 max), or 1 where that is 0 (amax is infinite) or amax is 0;  D = 1 / S
Scale of a block (a piece; `tiled`, the 16 x 16 tile), with amax16 the same maximum over the block, 0 if there is none:
    s = e4m3(min(amax16 * (S * float32(1/6)), float32 max)), saturating at 448, nearest even
Data: v = clamp(value * min(1 / (s * D), float32 max), -6, 6), rounded to E2M1. To nearest: to even, which puts the
ties at 0.25, 1.25, 2.5 and 5 down and those at 0.75, 1.75 and 3.5 up. The sign of a zero is kept; NaN becomes +6.
And back: value * ((s * amax) * float32(1 / (6 * bound))); with amax from 7.6e35 on s * amax may overflow.

Transform (columnwise copy only): x is rounded to bf16 if it is not, its rows filled up with zeros to a multiple of 16.
The values a[0..15] of a piece become bf16(y), y = a @ (diag(signs) @ H16 / 4), H16 of Sylvester, the signs
+ + + - + - - - - - - + - + - -. By butterflies: u[i] = a[i] * (signs[i] / 4), then for h = 1, 2, 4, 8 and each pair
(i, i + h): u[i], u[i + h] = u[i] + u[i + h], u[i] - u[i + h]. A zero of the result is positive, whichever sub-sums met.
The amax is that of the transformed copy. What lies beyond the last row of x is then not zero: the rows are mixed.

Stochastic: with r the random byte of the element, step = 0.5, 1 or 2 for |v| below 2, 4 or from there on,
t = |v| + (r / 256) * step; |v| becomes t rounded down to E2M1. Byte i of a stream belongs to element i of the copy
as stored, line * (padded length of a line) + column; it is byte i % 4 (lowest first) of word i // 4 of the Philox
stream (seed, offset, site) of `te_core.ops.elementwise`, so one draw of four words serves one piece. The columnwise
copy takes site ^ 0x40000000: the errors of the two copies are independent. Scales are rounded to nearest.

Four over six: instead of s there are two, e4m3(min(base, float32 max)) and e4m3(min(1.5 * base, float32 max)), with
base = (amax16 / 6) * S. The block is rounded with both; the second is taken if its error is lower (NaN is not). An
error is the sum of |d| ("MAE") or d * d ("MSE") over the block, d = ((e2m1 * s) * amax) / (6 * bound) - value. Pairs of
neighbours are added, then pairs of those, and so on (16 values, 8, 4, 2, 1); in a tile so over each row of x, then over
the 16 rows.

An amax epsilon and powers of two play no part in this format.
"""

from __future__ import annotations

from te_core.ops.declare import rules
from te_core.quantized import Cast


@rules("""
    must cast.four_over_six in (None, "MAE", "MSE"): None, MAE or MSE; choose an allowed four_over_six
    must cast.format.bound in (448, 256): 448 or 256; choose an allowed bound
    must not (cast.four_over_six and (cast.transform or cast.stochastic)): four_over_six with rounding to nearest,
        untransformed; leave one of them out
    must not (cast.format.row_scaled and (cast.transform or cast.stochastic or cast.format.tiled)): an amax for each row
        with 1x16 blocks, rounded to nearest, untransformed; leave one of them out
""")
def check(op: str, cast: Cast) -> None:
    """Of the options of this format, some exclude each other."""
