"""Causal attention whose bits do not depend on the cut of a prompt: torch's CPU flash kernel on tiles at fixed places.

A document's positions are cut into tiles of TILE, counted from its first key. A tile of queries is two calls of the
kernel: one on its own keys, with the kernel's causal, and one on all keys before the tile, of which it sees every one.
Their results are merged by their log-sum-exp. So a query meets the same keys in the same calls in a whole prompt, in a
chunk of it and alone. What is missing in a tile is 0: queries, whose results are dropped, and keys behind the end of
the document, which no query sees.

The kernel computes the queries of so short a call in blocks of ROWS, one by one, so a call may leave out whole blocks.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from attn_core.backends.sdpa_flash.containment import are_finite
from attn_core.backends.sdpa_flash.cpu_kernel import kernels_of
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

TILE = 128
"""Positions of a tile. The kernel computes more queries at once in a call of 192 or more."""
ROWS = 32


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """Returns (out, lse) of a dense causal call whose q, k and v the kernel can read."""
    import torch

    q, k, v = (tensor.detach() for tensor in inputs[:3])
    shift = spec.kv_len - spec.q_len  # of a query's position
    start = max(shift, 0)
    if shift < 0:
        q = q[:, -shift:]  # the first queries see no key
    if not q.shape[1]:
        return _empty(spec, q)
    base = start // TILE * TILE
    first = (start - base) // ROWS * ROWS  # in the first tile, of the first block with queries
    rows = _padded(q, start - base, -(-(spec.kv_len - base) // ROWS) * ROWS)
    own = [_padded(tensor[:, base:], 0, rows.shape[1]) for tensor in (k, v)]
    out, lse = _diagonals(spec, rows, *own)
    before = []
    for place in range(base or TILE, spec.kv_len, TILE):
        begin = max(place - base, first)
        here = rows[:, begin : place - base + TILE].transpose(1, 2)
        keys = (tensor[:, :place].transpose(1, 2) for tensor in (k, v))
        before.append(kernels_of(spec)[0](here, *keys, 0.0, False, scale=spec.scale))
    if before:
        begin = first if base else TILE
        parts = [torch.cat(each, 2) if len(before) > 1 else each[0] for each in zip(*before, strict=True)]
        _merge(out[:, begin:].transpose(1, 2), lse[:, :, begin:], *parts)
    return _only_queries(spec, out, lse, start - base)


def _padded(tokens: Any, lead: int, length: int) -> Any:
    """Returns ``[batch, tokens, heads, dim]`` with so many tokens, 0 before ``lead`` and behind the end."""
    if tokens.shape[1] == length:
        return tokens
    padded = tokens.new_zeros((tokens.shape[0], length, *tokens.shape[2:]))
    padded[:, lead : lead + tokens.shape[1]] = tokens
    return padded


def _diagonals(spec: AttentionSpec, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Returns out ``[batch, rows, heads, dim]`` and lse ``[batch, heads, rows]`` of tiles on their own keys."""
    import torch

    batch, rows = q.shape[:2]
    whole, results = rows // TILE, []
    if whole:
        tiles = (each[:, : whole * TILE].unflatten(1, (whole, TILE)).flatten(0, 1) for each in (q, k, v))
        out, lse = _diagonal(spec, *tiles)
        # [batch * tiles, heads, TILE] -> [batch, heads, tiles * TILE]
        lse = lse.unflatten(0, (batch, whole)).transpose(1, 2).flatten(2)
        results.append((out.unflatten(0, (batch, whole)).flatten(1, 2), lse))
    if rows > whole * TILE:
        results.append(_diagonal(spec, *(each[:, whole * TILE :] for each in (q, k, v))))
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 2)


def _diagonal(spec: AttentionSpec, *tensors: Any) -> tuple[Any, Any]:
    """Returns out ``[tiles, rows, heads, dim]`` and lse ``[tiles, heads, rows]``.

    The kernel multiplies a hidden value by the weight 0, which is NaN for a NaN. So if there are some, the queries
    between two of them run with 0 in all later keys.
    """
    import torch

    q, k, v = tensors

    def run(k: Any, v: Any) -> tuple[Any, Any]:
        views = (each.transpose(1, 2) for each in (q, k, v))
        out, lse = kernels_of(spec)[0](*views, 0.0, True, scale=spec.scale)
        return out.transpose(1, 2), lse

    if are_finite(k, v):
        return run(k, v)
    broken = ~(k.isfinite() & v.isfinite()).all(0).all(1).all(1)  # [rows]
    results = []
    for first, last in pairwise([0, *broken.nonzero().flatten().tolist(), k.shape[1]]):
        shown = torch.arange(k.shape[1])[:, None, None] < last
        out, lse = run(*(torch.where(shown, each, 0.0) for each in (k, v)))
        results.append((out[:, first:last], lse[:, :, first:last]))
    return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 2)


def _merge(out: Any, lse: Any, more: Any, more_lse: Any) -> None:
    """Merges results of other keys into ``[batch, heads, rows, dim]`` and ``[batch, heads, rows]``.

    Only operations with one rounding, and exp and log, have the same bits at every place of a tensor.
    """
    import torch

    top = torch.maximum(lse, more_lse)
    weight, weight_of_more = lse.sub_(top).exp_(), more_lse.sub_(top).exp_()
    total = weight + weight_of_more
    out.mul_(weight.div_(total)[..., None]).add_(more.mul_(weight_of_more.div_(total)[..., None]))
    torch.add(total.log_(), top, out=lse)


def _only_queries(spec: AttentionSpec, out: Any, lse: Any, lead: int) -> tuple[Any, Any]:
    """Returns results of padded rows, of which the first query is at ``lead``, for the queries of the call."""
    count = min(spec.q_len, spec.kv_len)
    out, lse = out[:, lead : lead + count], lse[:, :, lead : lead + count]
    if count == spec.q_len:
        return out.contiguous(), lse.contiguous()
    whole, whole_lse = _empty(spec, out)
    whole[:, spec.q_len - count :], whole_lse[:, :, spec.q_len - count :] = out, lse
    return whole, whole_lse


def _empty(spec: AttentionSpec, q: Any) -> tuple[Any, Any]:
    """Returns (out, lse) of rows that see no key."""
    return q.new_zeros(spec.out_shape), q.new_full(spec.lse_shape, -math.inf)
