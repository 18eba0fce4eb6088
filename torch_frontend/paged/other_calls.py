"""Calls of ``attention`` on rows of a cache, in another layout, or on NestedTensors: each becomes a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core.call.cache_rows import OPTIONS, CacheRows
from torch_frontend.dispatch import heads_first, nested, tensor_kinds
from torch_frontend.paged import dense_caches, seen_caches


def attend(
    attention: Callable[..., Any],
    qkv: tuple[Any, ...],
    layout: Any,
    rows: tuple[Any, Any, Any],
    values: tuple[Any, ...],
) -> Any:
    """Runs a call by ``attention`` itself.

    Args:
        qkv, layout: as the caller passed them.
        rows: kv_lengths, kv_starts and cache_index.
        values: of ``OPTIONS``.
    """
    options = dict(zip(OPTIONS, values, strict=True))
    if any([array is not None for array in rows]):
        options["layout"] = layout
        results = seen_caches.attend(qkv, CacheRows(*rows), options)
        if results is not None:
            return results
        with tensor_kinds.mode_around(qkv[0]):
            return dense_caches.attend(attention, qkv, CacheRows(*rows), options)
    if not (isinstance(layout, str) and layout == "bshd"):
        # It calls attention again, so nested tensors are heads-first here once.
        return heads_first.attend_in_layout(attention, layout, qkv, options)
    return nested.attend(attention, qkv, options)
