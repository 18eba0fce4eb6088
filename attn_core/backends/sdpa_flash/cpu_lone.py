"""One query of each row with ``invariant`` on torch's CPU flash kernel, such as in decoding.

The query sees every key, so the query heads of a group can be the rows of one call, which reads the keys once. With
"prefix" it has the bits that it has in a prompt (``cpu_tiles.py``): one call on the keys of its own tile, and one on
all keys before. They have as many rows as ``cpu_rows`` finds to be enough. With "batch" it is one call on all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from attn_core.backends.sdpa_flash.containment import valueless
from attn_core.backends.sdpa_flash.cpu_invariant import is_native
from attn_core.backends.sdpa_flash.cpu_rows import ROWS, TILE, Shape, call, hides_behind, rows_of, zero
from attn_core.backends.sdpa_flash.cpu_same_bits import rows_of_group, width_of
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec


def sees_every_key(spec: AttentionSpec) -> bool:
    """Returns whether each row of a dense call, or each sequence in pages, has one query, which sees every key."""
    tables = spec.mask_shape, spec.bias_shape, spec.alibi_shape, spec.key_ranges_shape
    if spec.sinks or any(tables):
        return False
    if spec.paged is None:
        return not spec.packed and spec.q_len == 1 and band(spec).hides_nothing(1, spec.kv_len)
    to_the_end = spec.alignment == "bottom_right" or not spec.causal
    return spec.q_len == spec.documents and to_the_end and tuple(spec.window) in ((None, None), (None, 0))


def forward(
    promise: str, q: Any, k: Any, v: Any, scale: float | None, wants_lse: bool = True
) -> tuple[Any, Any] | None:
    """Returns (out, lse) of dense rows; None if no small call has the bits of a prompt.

    Args:
        promise: the value of ``invariant``.
        wants_lse: else lse may be anything.
        q: ``[batch, 1, heads, dim]``. k, v: ``[batch, keys, kv_heads, dim]``, contiguous but for the first axis.
    """
    rows = None if isinstance(q, valueless()) else rows_for(promise, q, k)
    if rows is None:
        return None
    keys, kv_heads = k.shape[1:3]
    grouped = in_rows(q, kv_heads, rows)
    place = tile_before(keys) if promise == "prefix" else keys
    parts = []
    if place < keys:
        own_k, own_v = _own_keys(place, k, v)
        parts.append(attend(grouped, own_k, own_v, scale, [keys - place]))
    if place:
        k, v = (k, v) if place == keys else (k[:, :place], v[:, :place])
        parts.append(attend(grouped, k, v, scale))
    out, lse = parts[0] if len(parts) == 1 else merged(*parts[0], *parts[1], wants_lse)
    return of_heads(out, lse, q, q.shape)


@lru_cache(maxsize=4096)
def shortcut(spec: AttentionSpec) -> Callable[[Any, Any, Any], tuple[Any, Any] | None] | None:
    """Returns ``forward`` for a dense spec as a function of q, k and v in any layout; None for other calls."""
    if spec.packed or not sees_every_key(spec) or spec.empty:
        return None
    promise, scale, wants_lse = spec.invariant or "", spec.scale, spec.return_lse or spec.needs_backward

    def run(q: Any, k: Any, v: Any) -> tuple[Any, Any] | None:
        if not is_native(spec) or width_of(spec) != spec.head_dim:
            return None
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):  # strides change bits
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return forward(promise, q, k, v, scale, wants_lse)

    return run


def rows_for(promise: str, q: Any, k: Any) -> int | None:
    """Returns the rows of a kv head's call; None if no number of rows has the bits of a prompt."""
    import torch

    heads, kv_heads, dim = q.shape[-2], k.shape[-2], k.shape[-1]
    shape = Shape(str(q.dtype).removeprefix("torch."), heads, kv_heads, dim, torch.get_num_threads())
    if promise == "prefix":
        return rows_of(shape)
    rows = rows_of_group(shape)
    # torch multiplies a single row in bfloat16 by a loop that takes several times as long as its product of two rows.
    return max(rows, 2) if q.dtype == torch.bfloat16 else rows


def in_rows(q: Any, kv_heads: int, rows: int) -> Any:
    """Returns q ``[batch, ..., heads, dim]`` of one query as ``[batch, kv_heads, rows, dim]``; what it lacks is 0."""
    grouped = q.reshape(q.shape[0], kv_heads, -1, q.shape[-1])
    if grouped.shape[2] == rows:
        return grouped
    result = grouped.new_zeros((*grouped.shape[:2], rows, q.shape[-1]))
    result[:, :, : grouped.shape[2]] = grouped
    return result


def tile_before(keys: int) -> int:
    """Returns the first position of the tile of the last of so many keys."""
    return (keys - 1) // TILE * TILE


def height_of(keys: int) -> int:
    """Returns the keys of a call on so many keys of a tile: 32, 64 or 128, because the library is slower with 96."""
    return next(height for height in (ROWS, 2 * ROWS, TILE) if keys <= height)


def _own_keys(place: int, *tensors: Any) -> Iterator[Any]:
    """Yields the last keys of ``[batch, keys, kv_heads, dim]`` from a place on, as a tile with 0 behind them."""
    import torch

    keys = tensors[0].shape[1] - place
    more = height_of(keys) - keys
    batch, _, *heads = tensors[0].shape
    zeros = zero(tensors[0].dtype).expand(batch, more, *heads) if more else None
    for tensor in tensors:
        yield tensor[:, place:] if zeros is None else torch.cat((tensor[:, place:], zeros), 1)


def padded(tokens: Any, lead: int, length: int) -> Any:
    """Returns ``[batch, tokens, heads, dim]`` with so many tokens, 0 before ``lead`` and behind the end."""
    if tokens.shape[1] == length:
        return tokens
    result = tokens.new_zeros((tokens.shape[0], length, *tokens.shape[2:]))
    result[:, lead : lead + tokens.shape[1]] = tokens
    return result


def attend(grouped: Any, k: Any, v: Any, scale: float | None, seen: list[int] | None = None) -> tuple[Any, Any]:
    """Returns (out, lse) of the kernel for ``[batch, kv_heads, rows, dim]``.

    Args:
        k, v: ``[batch, keys, kv_heads, dim]``, finite behind the seen ones.
        seen: how many keys each row sees, or all rows; None for every key.
    """
    import torch

    keys, mask = k.shape[1], None
    if seen is not None and min(seen) < keys:
        mask = hides_behind(seen, keys, "float64" if grouped.dtype == torch.float64 else "float32")
    alone = grouped.shape[0] * grouped.shape[1] == 1 and torch.get_num_threads() > 1
    return call(grouped, k.transpose(1, 2), v.transpose(1, 2), scale, mask, alone)


def of_heads(out: Any, lse: Any, q: Any, shape: Any) -> tuple[Any, Any]:
    """Returns out of this shape in q's dtype, and lse ``[batch, heads, ...]``, without what ``in_rows`` added."""
    group = q.shape[-2] // out.shape[1]
    if group != out.shape[2]:
        out, lse = out[:, :, :group], lse[:, :, :group]
    if out.dtype != q.dtype:
        out = out.to(q.dtype)
    return out.reshape(shape), lse.reshape(shape[0], shape[-2], *shape[1:-2])


def merged(out: Any, lse: Any, more: Any, more_lse: Any, wants_lse: bool = True) -> tuple[Any, Any]:
    """Returns (out, lse) of all keys from results of some and of others, which it may overwrite, in the dtype of lse.

    Only operations with one rounding, and exp and log, have the same bits at every place of a tensor.

    Args:
        out, more: ``[batch, heads, rows, dim]``. lse, more_lse: ``[batch, heads, rows]``.
        wants_lse: else lse may be anything.
    """
    import torch

    weight_of_more = (lse - more_lse).exp_().add_(1.0).reciprocal_()
    weight = 1.0 - weight_of_more
    if out.dtype != lse.dtype:
        out, more = out.to(lse.dtype), more.to(lse.dtype)
    out.mul_(weight[..., None]).add_(more.mul_(weight_of_more[..., None]))
    if wants_lse:  # by the larger weight, whose logarithm is exact enough
        lse = torch.maximum(lse, more_lse).sub_(torch.maximum(weight, weight_of_more).log_())
    return out, lse
