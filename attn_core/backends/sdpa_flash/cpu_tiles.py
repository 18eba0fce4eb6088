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
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from attn_core.backends.sdpa_flash import cpu_lone
from attn_core.backends.sdpa_flash.containment import are_finite
from attn_core.backends.sdpa_flash.cpu_lone import merged, padded
from attn_core.backends.sdpa_flash.cpu_packed import runs
from attn_core.backends.sdpa_flash.cpu_rows import ROWS, TILE, Shape, groups_a_prompt
from attn_core.backends.sdpa_flash.cpu_same_bits import keeps_heights, kernels_of
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

Kernel = Callable[..., tuple[Any, Any]]
"""Takes q, k and v ``[batch, heads, rows, dim]`` and whether it is causal; returns out, and lse without dim."""


class Part(NamedTuple):
    """Rows of a batch, or neighbouring documents of equal lengths, as views.

    q, k, v, out: ``[batch, tokens, heads, dim]``. lse: ``[batch, heads, queries]``.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """Returns (out, lse) of a causal call, dense or packed, whose q, k and v are contiguous."""
    import torch

    q, k, v = (tensor.detach() for tensor in inputs[:3])
    out, lse = q.new_empty(spec.out_shape), q.new_empty(spec.lse_shape, dtype=getattr(torch, spec.lse_dtype))
    op, finite = kernels_of(spec)[0], are_finite(k, v)

    def kernel(q: Any, k: Any, v: Any, is_causal: bool) -> tuple[Any, Any]:
        return op(q, k, v, 0.0, is_causal, scale=spec.scale)  # type: ignore[no-any-return]

    parts = list(_documents(spec, inputs, Part(q, k, v, out, lse))) if spec.packed else [Part(q, k, v, out, lse)]
    if sum(part.lse.numel() for part in parts) != lse.numel():  # tokens in no document see no key
        out.zero_()
        lse.fill_(-math.inf)
    shape = Shape(spec.dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.get_num_threads())
    for part in parts:
        lone = cpu_lone.forward("prefix", *part[:3], spec.scale) if part.q.shape[1] == 1 and part.k.shape[1] else None
        if lone is not None:
            part.out.copy_(lone[0])
            part.lse.copy_(lone[1])
        else:
            _attend(kernel if finite else _containing(kernel), part, shape)
    return out, lse


def _documents(spec: AttentionSpec, inputs: Inputs, whole: Part) -> Iterator[Part]:
    for run in runs(spec, inputs):
        places = run.rows, run.keys, run.keys, run.rows
        q, k, v, out = (
            each[place].unflatten(0, (run.number, -1)) for each, place in zip(whole[:4], places, strict=True)
        )
        yield Part(q, k, v, out, whole.lse[:, run.rows].unflatten(1, (run.number, -1)).transpose(0, 1))


def _attend(kernel: Kernel, part: Part, shape: Shape) -> None:
    """Writes a part's out and lse."""
    q, k, v, out, lse = part
    keys, shift = k.shape[1], k.shape[1] - q.shape[1]  # a query's position is its number + shift
    if shift < 0:  # the first queries see no key
        out[:, :-shift], lse[:, :, :-shift] = 0.0, -math.inf
        q, out, lse, shift = q[:, -shift:], out[:, -shift:], lse[:, :, -shift:], 0
    base = shift // TILE * TILE
    height = ROWS if keeps_heights(shape) else TILE
    rows, own_out, own_lse = _on_own_keys(kernel, q, k[:, base:], v[:, base:], shift - base, height)
    out, k, v = (each.transpose(1, 2) for each in (out, k, v))  # [batch, heads, tokens, dim]
    for number, place in enumerate(range(base, keys, TILE)):
        first, last = max(shift, place), min(keys, place + TILE)
        here, target = slice(first - place, last - place), slice(first - shift, last - shift)
        own = own_out[number][:, :, here], own_lse[number][:, :, here]
        if place:
            skipped = here.start // ROWS * ROWS  # blocks without queries
            queries = rows[number][:, :, skipped:]
            heads = (k.shape[1], -1) if groups_a_prompt(shape) else (queries.shape[1], 1)
            more, more_lse = _by_group(kernel, queries, k[:, :, :place], v[:, :, :place], heads)
            there = slice(here.start - skipped, here.stop - skipped)
            own = tuple(each.unflatten(1, heads) for each in own)
            results = merged(*own, more[:, :, :, there], more_lse[:, :, :, there])
            out[:, :, target].unflatten(1, heads).copy_(results[0])
            lse[:, :, target].unflatten(1, heads).copy_(results[1])
        else:
            out[:, :, target], lse[:, :, target] = own


def _by_group(kernel: Kernel, q: Any, k: Any, v: Any, heads: tuple[int, int]) -> tuple[Any, Any]:
    """Returns (out, lse) ``[batch, *heads, rows, dim]`` of queries that see every key.

    Args:
        heads: how many heads of the call there are, and how many heads of q become the rows of each.
    """
    rows = q.shape[2]
    out, lse = kernel(q.unflatten(1, heads).flatten(2, 3), k, v, False)
    return out.unflatten(2, (-1, rows)), lse.unflatten(2, (-1, rows))


def _on_own_keys(
    kernel: Kernel, q: Any, k: Any, v: Any, lead: int, height: int
) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns q, out and lse of each tile; whole tiles are one call. The first TILE has ``lead`` rows before q, and the
    last one as many as its tokens need, a multiple of ``height``."""
    batch = q.shape[0]
    if lead:
        q = padded(q, lead, lead + q.shape[1])
    whole, results = q.shape[1] // TILE, ([], [], [])  # type: ignore[var-annotated]
    if whole:
        views = [
            each[:, : whole * TILE].unflatten(1, (whole, TILE)).flatten(0, 1).transpose(1, 2) for each in (q, k, v)
        ]
        for tiles, each in zip(results, (views[0], *kernel(*views, True)), strict=True):
            tiles.extend(each.unflatten(0, (batch, whole)).unbind(1))
    left = q.shape[1] - whole * TILE
    if left:
        length = -(-left // height) * height
        last = [padded(each[:, whole * TILE :], 0, length).transpose(1, 2) for each in (q, k, v)]
        for tiles, each in zip(results, (last[0], *kernel(*last, True)), strict=True):
            tiles.append(each)
    return results


def _containing(kernel: Kernel) -> Kernel:
    """Returns a kernel in which no query meets a NaN in a key or value that it does not see.

    The kernel multiplies a hidden value by the weight 0, which is NaN for a NaN. So the queries between two such keys
    run with 0 in all later keys.
    """
    import torch

    def run(q: Any, k: Any, v: Any, is_causal: bool) -> tuple[Any, Any]:
        if not is_causal:
            return kernel(q, k, v, False)
        broken = ~(k.isfinite() & v.isfinite()).all(3).all(1).all(0)  # [keys]
        place, results = torch.arange(k.shape[2], device=k.device)[:, None], []
        for first, last in pairwise([0, *broken.nonzero().flatten().tolist(), k.shape[2]]):
            out, lse = kernel(q, *(torch.where(place < last, each, 0.0) for each in (k, v)), True)
            results.append((out[:, :, first:last], lse[:, :, first:last]))
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)

    return run
