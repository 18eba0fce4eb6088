"""Additive masks for torch's CPU flash kernel: bias, ALiBi, mask and band as one tensor.

Tables of a band are pure functions of a few numbers, so small ones are cached. The kernel broadcasts axes of 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.backends.shared import kept_masks
from attn_core.call.masks import Band
from attn_core.call.observe import bias_copied, mask_converted

CACHED_ELEMENTS = 2**14
"""The most elements of a cached table: with BANDS entries in each cache, at most 16 MiB."""
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

    if bias is not None and bias.dtype is not getattr(torch, dtype):
        if rows.start == 0:  # once for all blocks of a call
            bias_copied()
        bias = bias.to(getattr(torch, dtype))
    if mask is not None and (bias is not None or kept_masks.MARK not in mask.__dict__):
        mask_converted()
    if edge is None and mask is None:
        return bias
    zero, hides = _constants(dtype, device)
    if edge is None:
        if bias is None and kept_masks.MARK in mask.__dict__:
            return kept_masks.additive_of(mask, (dtype,), lambda: torch.where(mask, zero, hides))
        return torch.where(mask, zero if bias is None else bias, hides)
    inside, added = _band(dtype, device, edge, rows, keys)
    if bias is None:
        if mask is None or kept_masks.MARK not in mask.__dict__:
            return added if mask is None else torch.where(mask, added, hides)
        form = dtype, edge, rows.start, rows.stop, keys.start, keys.stop
        return kept_masks.additive_of(mask, form, lambda: torch.where(mask, added, hides))
    return torch.where(inside if mask is None else inside & mask, bias, hides)


def with_alibi(dtype: str, added: Any, slopes: Any, offset: int, rows: slice, keys: slice) -> Any:
    """Adds ``-slope * |i + offset - j|`` to an additive mask, or to nothing if it is None.

    Args:
        slopes: ``[heads]`` or ``[batch, heads]``.

    Returns:
        ``[batch or 1, heads, rows, keys]``.
    """
    import torch

    slopes = slopes.to(getattr(torch, dtype)).reshape(-1, slopes.shape[-1], 1, 1)
    distance = _table(_cached_distance, _new_distance, dtype, slopes.device, offset, rows, keys)
    return slopes * distance if added is None else torch.addcmul(added, slopes, distance)


def empty_rows(added: Any) -> Any:
    """Returns which rows of an additive mask see no key: bool ``[batch or 1, heads or 1, rows or 1]``."""
    import torch

    return added.amax(dim=-1) == -torch.inf


def _constants(dtype: str, device: Any) -> tuple[Any, Any]:
    """Returns 0 and -inf as tensors without axes, because torch converts numbers to such tensors on every call."""
    return _cached_constants(dtype, device) if _may_cache() else _new_constants(dtype, device)


def _band(dtype: str, device: Any, edge: Band, rows: slice, keys: slice) -> tuple[Any, Any]:
    """Returns which keys a band shows, bool ``[1, 1, rows, keys]``, and the same as an additive mask."""
    return _table(_cached_band, _new_band, dtype, device, edge, rows, keys)  # type: ignore[no-any-return]


def _table(cached: Any, new: Any, dtype: str, device: Any, what: Any, rows: slice, keys: slice) -> Any:
    """Returns a table of rows and keys, from the cache if it is small."""
    place = (rows.start, rows.stop, keys.start, keys.stop)
    small = (rows.stop - rows.start) * (keys.stop - keys.start) <= CACHED_ELEMENTS
    return (cached if small and _may_cache() else new)(dtype, device, what, place)


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


def _new_distance(dtype: str, device: Any, offset: int, place: tuple[int, int, int, int]) -> Any:
    """Returns ``-|i + offset - j|``, ``[1, 1, rows, keys]``."""
    import torch

    with torch.inference_mode(False):
        queries = torch.arange(place[0], place[1], device=device)[:, None] + offset
        distance = (queries - torch.arange(place[2], place[3], device=device)).abs().neg()
        return distance.to(getattr(torch, dtype))[None, None]


_cached_constants = lru_cache(maxsize=BANDS)(_new_constants)
_cached_band = lru_cache(maxsize=BANDS)(_new_band)
_cached_distance = lru_cache(maxsize=BANDS)(_new_distance)
