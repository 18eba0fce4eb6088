"""The reference for rotary embeddings, in float64, and the bound of a kernel's error."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def rotate(x: Array, cos: Array, sin: Array, positions: Array, interleaved: bool) -> Array:
    """Returns x turned by the angles of its positions, in float64.

    Each pair of channels is one complex number, and its angle is another: the rotation is their product.

    Args:
        x: ``[..., heads, head_dim]``. cos, sin: ``[max_positions, rotary_dim / 2]``. positions: ``[...]``.
        interleaved: whether a pair is two neighbours, or a channel of each half.
    """
    half = cos.shape[1]
    first, second = _channels(half, interleaved)
    result = np.array(x, np.float64)
    angle = (cos.astype(np.float64) + 1j * sin.astype(np.float64))[positions][..., None, :]  # [..., 1, rotary_dim / 2]
    turned = np.asarray((result[..., first] + 1j * result[..., second]) * angle)
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def bound(x: Array, cos: Array, sin: Array, positions: Array, interleaved: bool, unit: float) -> Array:
    """Returns the largest error of each element of ``rotate`` if it is computed in float32 and rounded once.

    Args:
        unit: the unit roundoff of the result's dtype.
    """
    first, second = _channels(cos.shape[1], interleaved)
    size = np.abs(np.float64(x))
    c, s = (np.abs(np.float64(table))[positions][..., None, :] for table in (cos, sin))
    one, other = size[..., first].copy(), size[..., second].copy()
    size[..., first], size[..., second] = one * c + other * s, other * c + one * s
    # Two products and a sum, each rounded in float32; then the result, which is no larger than the sum of the sizes.
    return size * (3 * 2.0**-24 + unit) * (1 + 2.0**-10) + np.finfo(np.float32).tiny


def _channels(half: int, interleaved: bool) -> tuple[slice, slice]:
    """Returns the first and the second channels of all pairs."""
    if interleaved:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)
