"""Products of scores, weights and values in which a NaN or Inf reaches only the results of rows and keys that see it.

Scores and weights are ``[batch, kv_heads, group, rows, keys]``.
"""

from __future__ import annotations

import math
from typing import Any


def products(rows: Any, matrix: Any, out: Any = None) -> Any:
    """``[batch, kv_heads, group, rows, a]`` times ``[batch, kv_heads, a, b]``; bmm has the least work around it.

    Args:
        out: ``[batch * kv_heads, group * rows, b]`` to write into, or None.
    """
    import torch

    batch, heads, group, height, width = rows.shape
    product = torch.bmm(rows.reshape(batch * heads, group * height, width), matrix.flatten(0, 1), out=out)
    return product.view(batch, heads, group, height, matrix.shape[3])


def sum_over_keys(weights: Any, values: Any, hidden: Any) -> Any:
    """Sums over keys ``[batch, kv_heads, keys, dim]`` -> ``[batch, kv_heads, group, rows, dim]``.

    A value that is not finite makes exactly the rows that see it NaN.
    """
    if _harmless(values, hidden):
        return products(weights, values)
    seen, broken = _visibility(weights, hidden), ~values.isfinite()
    reached = seen @ broken[:, :, None].to(seen.dtype) > 0
    return sum_over_keys(weights, values.masked_fill(broken, 0.0), None).masked_fill(reached, float("nan"))


def sum_over_rows(weights: Any, values: Any, hidden: Any) -> Any:
    """Sums over group and rows ``[batch, kv_heads, group, rows, dim]`` -> ``[batch, kv_heads, keys, dim]``.

    A value that is not finite makes exactly the keys that are seen from its row NaN.
    """
    if _harmless(values, hidden):
        return weights.flatten(2, 3).mT @ values.flatten(2, 3)
    seen, broken = _visibility(weights, hidden), ~values.isfinite()
    reached = (seen.mT @ broken.to(seen.dtype) > 0).any(dim=2)
    return sum_over_rows(weights, values.masked_fill(broken, 0.0), None).masked_fill(reached, float("nan"))


def _harmless(values: Any, hidden: Any) -> bool:
    """Returns whether a plain matrix product is right. It is not if a hidden value is NaN or infinite: 0 * NaN is NaN.

    On CUDA, reading the values would synchronise, so the answer is False whenever something is hidden.
    """
    if hidden is None or values.device.type != "cpu":
        return hidden is None
    return math.isfinite(values.sum()) or bool(values.isfinite().all())  # a finite sum has no NaN or Inf in it


def _visibility(weights: Any, hidden: Any) -> Any:
    """Returns 1 where visible, 0 where hidden: ``[batch or 1, kv_heads or 1, group or 1, rows, keys]``."""
    return (~hidden).to(weights.dtype).expand(*hidden.shape[:3], *weights.shape[3:])
