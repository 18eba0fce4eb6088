"""The running maximum of a row's logits, with which Triton kernels rescale their sums.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def raise_maximum(top, other):
    """Returns the new running maximum, the base to subtract, and the factor that rescales the sums so far.

    The base is 0 instead of -inf, because -inf - -inf is NaN. All values are base-2 logarithms.
    """
    new = tl.maximum(top, other)
    base = tl.where(new == float("-inf"), 0.0, new)
    return new, base, tl.exp2(top - base)
