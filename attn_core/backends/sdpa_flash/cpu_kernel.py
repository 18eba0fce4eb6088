"""What torch's CPU flash kernel gets: decoding with the query heads of a group as queries of one head, additive masks.

The kernel reads a key once for each query head. If each row has one query, the heads of a group differ in nothing else,
so they can share one reading of the keys.

In bfloat16, torch multiplies a single row by a matrix with a loop that takes several times as long as its product of
two rows. So a query that has no other head in its group is computed twice. A processor with tiles (Intel AMX) is the
other way round: torch multiplies a few rows in tiles, which must be filled first, and a single row without them.

Bias, ALiBi, mask and band are one additive tensor. Tables of a band are pure functions of a few numbers, so small ones
are cached. The kernel broadcasts axes of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from attn_core.backends.shared import aten_masks
from attn_core.call.masks import Band
from attn_core.call.observe import bias_copied, mask_converted
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._ops import OpOverload

GROUP_FOR_TILES = 4
"""Query heads of a group from which tiles multiply the group as fast as its heads one by one."""


@cache
def has_tiles() -> bool:
    """Returns whether torch multiplies bfloat16 in tiles on this processor."""
    import torch

    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)  # a private name, which a version may lack
    return bool(supported is not None and supported())


@cache
def kernels() -> tuple[Callable[..., tuple[Tensor, Tensor]], OpOverload]:
    """Returns the forward and the backward op, on ``[batch, heads, seq, dim]``."""
    import torch

    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return torch._scaled_dot_product_flash_attention_for_cpu, backward_op


@lru_cache(maxsize=4096)
def forward_op(spec: AttentionSpec, is_causal: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the forward of a dense call: ``(q, k, v, attn_mask=None) -> (out, lse)``; attn_mask is an additive mask.

    Tensors are ``[batch, heads, seq, dim]``.
    """
    tiles = spec.dtype == "bfloat16" and has_tiles()
    alone = spec.group_size == 1 and spec.dtype == "bfloat16" and not tiles
    # A training call stays as it is: torch saves the kernel's own tensors for the backward.
    plain = spec.q_len != 1 or spec.needs_backward or is_causal
    if not plain and spec.group_size > 1 and not (tiles and spec.group_size < GROUP_FOR_TILES):
        return _by_group(spec)
    op = run_twice if alone and not plain else kernels()[0]
    return partial(op, dropout_p=0.0, is_causal=is_causal, scale=spec.scale)  # no frame of Python


def _by_group(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the forward of one query per row that hands a group's heads to the kernel as rows of one head.

    So the kernel reads each key once instead of once for each head of the group.
    """
    kernel, scale, heads = kernels()[0], spec.scale, (spec.num_kv_heads, spec.group_size)

    def run(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch, all_heads, _, dim = q.shape
        if attn_mask is not None and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.reshape(attn_mask.shape[0], *heads, attn_mask.shape[3])
        # [batch, heads, 1, dim] -> [batch, kv_heads, group, dim] and back
        out, lse = kernel(q.reshape(batch, *heads, dim), k, v, 0.0, False, attn_mask=attn_mask, scale=scale)
        return out.reshape(batch, all_heads, 1, dim), lse.reshape(batch, all_heads, 1)

    return run


def run_twice(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, **options: object
) -> tuple[Tensor, Tensor]:
    """Returns the forward op's results for one query in each row, which it computes twice. Arguments as the op's."""
    # [batch, heads, 1, dim] -> [batch, heads, 2, dim]; the kernel cannot read a query axis of stride 0
    out, lse = kernels()[0](q.repeat(1, 1, 2, 1), k, v, dropout_p, is_causal, **options)
    return out[:, :, :1], lse[:, :, :1]


CACHED_ELEMENTS = 2**14
"""The most elements of a cached table: with BANDS entries in each cache, at most 16 MiB."""
BANDS = 64
Result = TypeVar("Result")


def additive(
    dtype: str,
    device: torch.device,
    mask: Tensor | None,
    bias: Tensor | None,
    edge: Band | None,
    rows: slice,
    keys: slice,
) -> Tensor | None:
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
    if mask is not None and (bias is not None or aten_masks.KEPT_MARK not in mask.__dict__):
        mask_converted()
    if edge is None and mask is None:
        return bias
    zero, hides = _constants(dtype, device)
    if edge is None:
        if bias is None and aten_masks.KEPT_MARK in mask.__dict__:
            return aten_masks.kept_additive(mask, (dtype,), lambda: torch.where(mask, zero, hides))  # type: ignore[arg-type]
        return torch.where(mask, zero if bias is None else bias, hides)  # type: ignore[arg-type]
    inside, added = _band(dtype, device, edge, rows, keys)
    if bias is None:
        if mask is None or aten_masks.KEPT_MARK not in mask.__dict__:
            return added if mask is None else torch.where(mask, added, hides)
        form = dtype, edge, rows.start, rows.stop, keys.start, keys.stop
        return aten_masks.kept_additive(mask, form, lambda: torch.where(mask, added, hides))
    return torch.where(inside if mask is None else inside & mask, bias, hides)


def with_alibi(dtype: str, added: Tensor | None, slopes: Tensor, offset: int, rows: slice, keys: slice) -> Tensor:
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


def empty_rows(added: Tensor) -> Tensor:
    """Returns which rows of an additive mask see no key: bool ``[batch or 1, heads or 1, rows or 1]``."""
    import torch

    return added.amax(dim=-1) == -torch.inf


def _constants(dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns 0 and -inf as tensors without axes, because torch converts numbers to such tensors on every call."""
    return _cached_constants(dtype, device) if aten_masks.makes_plain_tensors() else _new_constants(dtype, device)


def _band(dtype: str, device: torch.device, edge: Band, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """Returns which keys a band shows, bool ``[1, 1, rows, keys]``, and the same as an additive mask."""
    return _table(_cached_band, _new_band, dtype, device, edge, rows, keys)


def _table(
    cached: Callable[..., Result],
    new: Callable[..., Result],
    dtype: str,
    device: torch.device,
    what: Band | int,
    rows: slice,
    keys: slice,
) -> Result:
    """Returns a table of rows and keys, from the cache if it is small."""
    place = (rows.start, rows.stop, keys.start, keys.stop)
    small = (rows.stop - rows.start) * (keys.stop - keys.start) <= CACHED_ELEMENTS
    return (cached if small and aten_masks.makes_plain_tensors() else new)(dtype, device, what, place)


def _new_constants(dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    import torch

    kind = getattr(torch, dtype)
    with torch.inference_mode(False):  # a later training call saves the cached tensors, so they are no inference ones
        return torch.tensor(0.0, dtype=kind, device=device), torch.tensor(-torch.inf, dtype=kind, device=device)


def _new_band(dtype: str, device: torch.device, edge: Band, place: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    import torch

    with torch.inference_mode(False):
        queries = torch.arange(place[0], place[1], device=device)[:, None]
        inside = edge.contains(queries, torch.arange(place[2], place[3], device=device))[None, None]
        return inside, torch.where(inside, *_constants(dtype, device))


def _new_distance(dtype: str, device: torch.device, offset: int, place: tuple[int, int, int, int]) -> Tensor:
    """Returns ``-|i + offset - j|``, ``[1, 1, rows, keys]``."""
    import torch

    with torch.inference_mode(False):
        queries = torch.arange(place[0], place[1], device=device)[:, None] + offset
        distance = (queries - torch.arange(place[2], place[3], device=device)).abs().neg()
        return distance.to(getattr(torch, dtype))[None, None]


_cached_constants = lru_cache(maxsize=BANDS)(_new_constants)
_cached_band = lru_cache(maxsize=BANDS)(_new_band)
_cached_distance = lru_cache(maxsize=BANDS)(_new_distance)
