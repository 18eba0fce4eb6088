"""q, k and v as e4m3 with one factor for each (batch row or document, kv head), in plain torch operations.

The largest magnitude of a group becomes 448, the largest that e4m3 holds: a relative error of up to 2^-4 for each
element, and of up to 2^-10 of the largest for small ones. Nothing is read back from the device.
"""

from __future__ import annotations

from typing import Any

LARGEST = 448.0
"""The largest finite e4m3 (float8_e4m3fn)."""
SMALLEST = 2.0**-100
"""The smallest factor: a group of zeros is divided by this, not by 0."""


def quantised(tensor: Any, kv_heads: int, cu_seqlens: Any = None) -> tuple[Any, Any]:
    """The tensor as float8_e4m3fn, and the float32 factors that give its values back, ``[batch, kv_heads]``.

    NaN and Inf have no say in a factor, so that they do not reach other rows; both become NaN.

    Args:
        tensor: ``[batch, length, heads, dim]``, or ``[tokens, heads, dim]`` with ``cu_seqlens`` (int32, ``[documents +
            1]``), for which the factors are ``[documents, kv_heads]``. Heads of one kv head share its factor.
    """
    grouped = tensor.unflatten(-2, (kv_heads, -1))  # [..., heads, dim] -> [..., kv_heads, group, dim]
    finite = grouped.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    if cu_seqlens is None:
        factors = _factors(finite.amax((1, 3, 4)))
        of_rows = factors[:, None]  # [batch, kv_heads] -> [batch, length, kv_heads]
    else:
        factors, of_rows = _by_document(finite.amax((2, 3)), cu_seqlens)
    scaled = grouped * of_rows.reciprocal()[..., None, None]  # float32, as the factors are
    scaled.fmod_(2 * LARGEST)  # changes no finite value, but makes NaN of Inf, which some casts take for 448
    return scaled.to(_e4m3()).flatten(-3, -2), factors


def _by_document(largest: Any, cu_seqlens: Any) -> tuple[Any, Any]:
    """Factors of documents and of their tokens from each token's largest: ``[tokens, kv_heads]``."""
    import torch

    tokens, kv_heads = largest.shape
    documents = cu_seqlens.shape[0] - 1
    places = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:], places, right=True)
    # One row more for tokens past the last offset: what offsets that lie leave out touches no document.
    found = largest.new_zeros(documents + 1, kv_heads, dtype=torch.float32)
    found.scatter_reduce_(0, document[:, None].expand(tokens, kv_heads), largest.float(), "amax")
    factors = _factors(found)
    return factors[:documents], factors[document]


def _factors(largest: Any) -> Any:
    return (largest.float() / LARGEST).clamp_min(SMALLEST)


def _e4m3() -> Any:
    import torch

    return torch.float8_e4m3fn
