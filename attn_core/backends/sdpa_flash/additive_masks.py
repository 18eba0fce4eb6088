"""Additive masks for torch's CPU flash kernel: bias, mask and band as one tensor.

A band's mask is a pure function of a few numbers, so small ones are cached. The kernel broadcasts a mask's axes of 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.call.masks import Band

CACHED_ELEMENTS = 2**14
"""The most elements of a cached band mask: with BANDS of them, at most 8 MiB."""
BANDS = 64


def additive(dtype: str, device: Any, mask: Any, bias: Any, edge: Band | None, rows: slice, keys: slice) -> Any:
    """Returns bias, mask and band as one additive tensor of ``dtype``, or None if there are none.

    Args:
        mask, bias: ``[batch or 1, heads or 1, rows or 1, keys or 1]``, those of these rows and keys, or None.
        edge: the band, which counts rows and keys of the whole call, or None.

    Returns:
        ``[batch or 1, heads or 1, rows or 1, keys or 1]``, -inf where hidden.
    """
    import torch

    zero, hides = _constants(dtype, device)
    if bias is not None:
        bias = bias.to(getattr(torch, dtype))
    if edge is None:
        if mask is None:
            return bias
        return torch.where(mask, zero if bias is None else bias, hides)
    inside, added = _band(dtype, device, edge, rows, keys)
    if bias is None:
        return added if mask is None else torch.where(mask, added, hides)
    return torch.where(inside if mask is None else inside & mask, bias, hides)


def empty_rows(added: Any) -> Any:
    """Returns which rows of an additive mask see no key: bool ``[batch or 1, heads or 1, rows or 1]``."""
    import torch

    return added.amax(dim=-1) == -torch.inf


def _constants(dtype: str, device: Any) -> tuple[Any, Any]:
    """Returns 0 and -inf as tensors without axes, because torch converts numbers to such tensors on every call."""
    return _cached_constants(dtype, device) if _may_cache() else _new_constants(dtype, device)


def _band(dtype: str, device: Any, edge: Band, rows: slice, keys: slice) -> tuple[Any, Any]:
    """Returns which keys a band shows, bool ``[1, 1, rows, keys]``, and the same as an additive mask."""
    place = (rows.start, rows.stop, keys.start, keys.stop)
    small = (rows.stop - rows.start) * (keys.stop - keys.start) <= CACHED_ELEMENTS
    return (_cached_band if small and _may_cache() else _new_band)(dtype, device, edge, place)


def _may_cache() -> bool:
    """Returns whether no mode is active: under one, a new tensor may have no data."""
    import torch

    return torch._C._len_torch_dispatch_stack() == 0


def _new_constants(dtype: str, device: Any) -> tuple[Any, Any]:
    import torch

    kind = getattr(torch, dtype)
    with torch.inference_mode(False):  # a later training call saves the cached tensors, so they are no inference ones
        return torch.tensor(0.0, dtype=kind, device=device), torch.tensor(-torch.inf, dtype=kind, device=device)


def _new_band(dtype: str, device: Any, edge: Band, place: tuple[int, int, int, int]) -> tuple[Any, Any]:
    import torch

    with torch.inference_mode(False):
        queries = torch.arange(place[0], place[1], device=device)[:, None]
        inside = edge.contains(queries, torch.arange(place[2], place[3], device=device))[None, None]
        return inside, torch.where(inside, *_constants(dtype, device))


_cached_constants = lru_cache(maxsize=BANDS)(_new_constants)
_cached_band = lru_cache(maxsize=BANDS)(_new_band)
