"""Decoding with torch's CPU flash kernel: the query heads of a group become the queries of one head.

The kernel reads a key once for each query head. If each row has one query, the heads of a group differ in nothing else,
so they can share one reading of the keys.

In bfloat16, torch multiplies a single row by a matrix with a loop that takes several times as long as its product of
two rows. So a query that has no other head in its group is computed twice. A processor with tiles (Intel AMX) is the
other way round: torch multiplies a few rows in tiles, which must be filled first, and a single row without them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

from attn_core.call.spec import AttentionSpec

GROUP_FOR_TILES = 4
"""Query heads of a group from which tiles multiply the group as fast as its heads one by one."""


@cache
def has_tiles() -> bool:
    """Returns whether torch multiplies bfloat16 in tiles on this processor."""
    import torch

    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)  # a private name, which a version may lack
    return bool(supported is not None and supported())


@cache
def kernels() -> tuple[Any, Any]:
    """Returns the forward and the backward op, on ``[batch, heads, seq, dim]``."""
    import torch

    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return torch._scaled_dot_product_flash_attention_for_cpu, backward_op


@lru_cache(maxsize=4096)
def forward_op(spec: AttentionSpec, is_causal: bool = False) -> Callable[..., tuple[Any, Any]]:
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


def _by_group(spec: AttentionSpec) -> Callable[..., tuple[Any, Any]]:
    kernel, scale, heads = kernels()[0], spec.scale, (spec.num_kv_heads, spec.group_size)

    def run(q: Any, k: Any, v: Any, attn_mask: Any = None) -> tuple[Any, Any]:
        batch, all_heads, _, dim = q.shape
        if attn_mask is not None and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.reshape(attn_mask.shape[0], *heads, attn_mask.shape[3])
        # [batch, heads, 1, dim] -> [batch, kv_heads, group, dim] and back
        out, lse = kernel(q.reshape(batch, *heads, dim), k, v, 0.0, False, attn_mask=attn_mask, scale=scale)
        return out.reshape(batch, all_heads, 1, dim), lse.reshape(batch, all_heads, 1)

    return run


def run_twice(q: Any, k: Any, v: Any, dropout_p: float, is_causal: bool, **options: Any) -> tuple[Any, Any]:
    """Returns the forward op's results for one query in each row, which it computes twice. Arguments as the op's."""
    # [batch, heads, 1, dim] -> [batch, heads, 2, dim]; the kernel cannot read a query axis of stride 0
    out, lse = kernels()[0](q.repeat(1, 1, 2, 1), k, v, dropout_p, is_causal, **options)
    return out[:, :, :1], lse[:, :, :1]
