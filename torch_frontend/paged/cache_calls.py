"""Eager calls on rows of a cache without gradients by the table of prepared calls, see ``dispatch.prepared``."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call import cache_rows
from attn_core.call.arguments import Arrays
from attn_core.call.cache_rows import CacheRows
from attn_core.call.options import Options, check_options, requested_names
from attn_core.selection import Target
from attn_core.selection.dense_caches import read_pages, runs_packed
from torch_frontend.dispatch import plan
from torch_frontend.dispatch.eager_calls import OPTIONS
from torch_frontend.dispatch.prepared import Prepared, Request, find
from torch_frontend.paged import paged_calls, tables
from torch_frontend.paged.dense_caches import Window, check_metadata, from_pages, in_rows

Tensor = torch.Tensor
_ABSENT: dict[str, Any] = {
    **dict.fromkeys(("mask", "bias", "key_ranges", "mask_mod", "score_mod", "seq_info", "dropout_rng")),
    **{"aux": (), "return_max_logit": False},
}
"""The arguments that a prepared call does not have."""


def attend(
    q: Any,
    k: Any,
    v: Any,
    tables: tuple[Any, Any, Any, Any],
    seq_info: Any,
    key_ranges: Any,
    rows: CacheRows,
    options: tuple[Any, ...],
    backend: Any,
) -> Any:
    """Returns the results of a call as ``attention`` does; None if the general path must run it.

    Args:
        tables: mask, bias, alibi_slopes and sinks.
        options: the values of ``eager_calls.OPTIONS``; the other arguments are those of ``attention``.
    """
    mask, bias, alibi_slopes, sinks = tables
    if not (mask is bias is seq_info is key_ranges is None):
        return None
    others = (*rows, sinks, alibi_slopes)
    run = find(_prepare, q, k, v, others, options, backend)
    return None if run is None else run(q, k, v, *others)


def _prepare(request: Request) -> Prepared | None:
    """Prepares a call in the form of pages: by its backend's fast path, or by ``paged_attention``."""
    q, k, v, *arrays, sinks, slopes = request.entries
    assert q is not None and k is not None and v is not None
    named: dict[str, Any] = dict(zip(OPTIONS, request.options, strict=True))
    if request.needs or named.pop("layout") != "bshd" or named["dropout"] != 0.0:
        return None
    if any([entry is not None and entry[2] != q[2] for entry in request.entries]):
        return None
    rows = CacheRows(*(entry and plan.facts(*entry) for entry in arrays))
    given = named | _ABSENT | {"alibi_slopes": slopes}
    cache_rows.check_arguments(rows, {"q": q[0], "k": k[0], "v": v[0]}, given)
    call, names = check_options(Options(**named)), requested_names(request.requested)
    window: Window = call.window  # type: ignore[assignment]
    check_metadata((q, k, v, None, None, slopes, sinks), call, rows.cache_index is not None)
    slots = plan.facts(*q), plan.facts(*k), plan.facts(*v), None, None, slopes and plan.facts(*slopes)
    device = plan.device_name(q[2])
    if runs_packed(rows, Arrays(*slots, sinks and plan.facts(*sinks)), call, Target.here("torch", device), names):
        return None
    sizes = (*q[0][:2], k[0][1], k[0][0])
    if not (cache_rows.takes_pages(sizes, window, given) and read_pages(names, device)):
        return None
    on_host = q[2].type == "cpu"
    paged = None if rows.kv_starts is not None or slopes is not None else _paged(request, call, window, names)
    keywords = {**named, "backend": request.requested}

    def build(paged_run: paged_calls.Run | None) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, lengths: Any, starts: Any, index: Any, sinks: Any, slopes: Any) -> Any:
            rows = CacheRows(lengths, starts, index)
            if on_host:
                cache_rows.check_values(rows, k.shape[1], k.shape[0])
            results = None if paged_run is None else _run(paged_run, q, k, v, rows, sinks)
            if results is not None:
                return in_rows(results, q, call.return_lse)
            return from_pages((q, k, v), rows, window, {**keywords, "sinks": sinks, "alibi_slopes": slopes})

        return run

    # Pages would call a tensor without its memory by another name.
    reads: Any = "all" if on_host or paged is None else None
    return Prepared(build(paged and paged.run), lambda: build(paged and paged.in_ranges()), reads)


def _run(run: paged_calls.Run, q: Tensor, k: Tensor, v: Tensor, rows: CacheRows, sinks: Tensor | None) -> Any:
    """Runs a prepared call in the form of pages; returns (out, lse), or None if the general path must run it."""
    device, (batch, tokens, *_) = q.device, q.shape
    index, lengths = rows.cache_index, rows.kv_lengths
    table = tables.rows_as_table(batch, device) if index is None else index.unsqueeze(1)
    if lengths is None:
        lengths = torch.full((batch,), k.shape[1], dtype=torch.int32, device=device)
    more = () if tokens == 1 else (tables.equal_offsets(batch, tokens, device), None, None)
    return run(q.flatten(0, 1), k, v, table, lengths, sinks, *more)


def _paged(request: Request, call: Options, window: Window, names: tuple[str, ...] | None) -> Prepared | None:
    """Prepares a checked call in the form of pages; None if its backend has no fast path for it."""
    q, k, v, _, _, _, sinks, _ = request.entries
    assert q is not None
    ((batch, tokens, *heads), dtype, device), number = q, torch.int32
    table, lengths, offsets = [(torch.Size(shape), number, device) for shape in ((batch, 1), (batch,), (batch + 1,))]
    entries = ((torch.Size((batch * tokens, *heads)), dtype, device), k, v, table, lengths, sinks)
    options = (call.causal, window, call.softcap, call.scale, call.deterministic, call.return_lse)
    if tokens == 1:
        return paged_calls.prepare(entries, (*options, None, call.invariant), names)
    return paged_calls.prepare((*entries, offsets, None, None), (*options, tokens, call.invariant), names)
