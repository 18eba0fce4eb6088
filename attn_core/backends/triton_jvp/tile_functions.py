"""Functions of tiles that the forward-mode kernel calls. This module imports triton, so only the kernel imports it."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(at, rows, channels, ALL_ROWS: tl.constexpr, ALL_CHANNELS: tl.constexpr):
    """Loads a tile ``[rows, channels]``; what does not exist is 0. Only an axis that may be too long is masked."""
    if ALL_ROWS and ALL_CHANNELS:
        return tl.load(at)
    if ALL_ROWS:
        return tl.load(at, mask=channels[None, :], other=0.0)
    if ALL_CHANNELS:
        return tl.load(at, mask=rows[:, None], other=0.0)
    return tl.load(at, mask=rows[:, None] & channels[None, :], other=0.0)


@triton.jit
def tanh_and_slope(x, ACCURATE: tl.constexpr):
    """Returns tanh(x) and its slope ``1 - tanh^2``, which loses no digits for large x.

    ACCURATE: also keep float32's digits near 0, which a difference of exponentials loses.
    """
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2_E))  # between 0 and 1, whatever x is
    share = 1.0 / (1.0 + decay)
    tanh = (1.0 - decay) * share
    if ACCURATE:  # the first terms of the series of tanh
        square = x * x
        series = 62.0 / 2835.0 - square * (1382.0 / 155925.0)
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * series)))
        tanh = tl.where(size < 0.25, size * series, tanh)
    return tl.where(x < 0.0, -tanh, tanh), 4.0 * decay * share * share


@triton.jit
def raise_maximum(top, other):
    """Returns the new running maximum, the base to subtract, and the factor that rescales the sums so far.

    The base is 0 instead of -inf, because -inf - -inf is NaN. All values are base-2 logarithms.
    """
    new = tl.maximum(top, other)
    base = tl.where(new == float("-inf"), 0.0, new)
    return new, base, tl.exp2(top - base)


@triton.jit
def document_at(offsets, document, tokens):
    """Returns the first token of a document and their number; for offsets that lie, of some document in the tokens."""
    first = tl.minimum(tl.maximum(tl.load(offsets + document), 0), tokens)
    return first, tl.minimum(tl.maximum(tl.load(offsets + document + 1), first), tokens) - first
