"""Dense caches with a length per row: kv_lengths, kv_starts and cache_index of ``attention``, for torch tensors.

``attn_core.call.cache_rows`` says what they mean, and which of three forms a call takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from attn_core.call import cache_rows, checks
from attn_core.call.arguments import Arrays, build_spec
from attn_core.call.cache_rows import CacheRows
from attn_core.call.key_ranges import check_values
from attn_core.call.layouts import check_layout
from attn_core.call.mask_objects import is_object
from attn_core.call.options import ON_PAGES, Options, check_options, check_traced_options, requested_names
from attn_core.errors import DeviceError, DTypeError, SpecError
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import Selection, Target, override
from attn_core.selection.dense_caches import read_pages, runs_packed
from torch_frontend.dispatch import autocast, nested, plan, sdpa_flags, tensor_kinds, transforms, value_checks
from torch_frontend.dispatch.heads_first import all_exchanged, exchanged
from torch_frontend.paged import tables
from torch_frontend.paged.attention import explain_paged, paged_attention

Tensor = torch.Tensor
Keywords = dict[str, Any]
Window = tuple[int | None, int | None]
# Dynamo would trace how an expression is built. It depends on constants alone, so Dynamo takes the result.
vars(cache_rows.slopes_of_rows).update(_dynamo_marked_constant=True)


def attend(attention: Callable[..., Any], qkv: tuple[Any, ...], rows: CacheRows, options: Keywords) -> Any:
    """Runs ``attention`` on the keys of each row of a cache.

    Args:
        qkv, rows: as the caller passed them.
        options: all other arguments of ``attention``, by name.
    """
    with tensor_kinds.mode_around(qkv[0]):
        return _attend(attention, qkv, rows, options)


def _attend(attention: Callable[..., Any], qkv: tuple[Any, ...], rows: CacheRows, options: Keywords) -> Any:
    heads_first = check_layout(options["layout"]) == "bhsd"
    q, k, v = all_exchanged(qkv) if heads_first else qkv
    rows, window = _checked((q, k, v), rows, options)
    if _on_pages((q, k, v), window, options, None):
        q, k, v = autocast.in_autocast(q, k, v)
        if not torch.compiler.is_compiling() and checks.enabled() and not transforms.is_one_op(q):
            value_checks.check_cache(*_as_ranges(q, k, v, rows, window, options))
        if are_documents((q, k, v), rows, options):
            packed, others = as_documents(q, k, v, rows, options)
            results = _in_rows_of(attention(*packed, **others), q, options)
        else:
            results = from_pages((q, k, v), rows, window, options)
    else:
        tensors, others = _as_ranges(q, k, v, rows, window, options)
        results = attention(*tensors, **others)
    if not heads_first:
        return results
    return (exchanged(results[0]), *results[1:]) if isinstance(results, tuple) else exchanged(results)


def explain(
    explain: Callable[..., Selection],
    qkv: tuple[Any, ...],
    rows: CacheRows,
    options: Keywords,
    needs_backward: bool | None,
) -> Selection:
    """Returns what would run the form that the call takes.

    Args:
        explain: the frontend's, for a call in the form of key ranges. The others are those of ``attend``.
    """
    q, k, v = all_exchanged(qkv) if check_layout(options["layout"]) == "bhsd" else qkv
    rows, window = _checked((q, k, v), rows, options)
    if not _on_pages((q, k, v), window, options, needs_backward):
        tensors, others = _as_ranges(q, k, v, rows, window, options)
        return explain(*tensors, **others, needs_backward=needs_backward)
    q, k, v = (tensor.detach() for tensor in autocast.in_autocast(q, k, v))
    if are_documents((q, k, v), rows, options):
        packed, others = as_documents(q, k, v, rows, options)
        return explain(*packed, **others, needs_backward=needs_backward)
    return explain_paged(q.flatten(0, 1), k, v, **_on_pool(q, k, rows, window, options))


def _checked(qkv: tuple[Any, ...], rows: CacheRows, options: Keywords) -> tuple[CacheRows, Window]:
    """Checks every argument; returns the rows as tensors on q's device, and the window as a pair.

    Values on the host are checked. A compiled program, a trace and a transform clamp them.
    """
    for name, tensor in zip("qkv", qkv, strict=True):
        if nested.has_jagged(tensor):
            raise SpecError(f"{name}: expected a plain tensor with {rows.first}, got a NestedTensor, which has lengths")
        plan.check_tensor(name, tensor)
    q, k, v = qkv
    if is_object(options["mask"], options["bias"]):
        raise SpecError(f"mask: expected a bool tensor with {rows.first}, got an object that says where diagonals lie")
    for name, array in zip(rows._fields, rows):
        if array is not None and not isinstance(array, np.ndarray):
            plan.check_tensor(name, array)
    cache_rows.check_arguments(rows, {"q": q.shape, "k": k.shape, "v": v.shape}, options)
    compiling = torch.compiler.is_compiling()
    call = Options.of(options)
    call = check_traced_options(call) if compiling else check_options(call)
    window: Window = call.window  # type: ignore[assignment]
    if isinstance(options["alibi_slopes"], Tensor):
        plan.check_gradient_free("alibi_slopes", options["alibi_slopes"])
    if compiling or transforms.is_one_op(q):
        moved = CacheRows(*(tensor_kinds.to_device_of(q, a) if isinstance(a, np.ndarray) else a for a in rows))
        _check_devices(q, moved)
        return cache_rows.clamped(moved, k.shape[1], k.shape[0]), window
    _check_tensors(q, k, v, options, call, rows.cache_index is not None)
    on_host = CacheRows(*(array if _is_on_host(array) else None for array in rows))
    cache_rows.check_values(on_host, k.shape[1], k.shape[0])
    moved = CacheRows(*(torch.as_tensor(a, device=q.device) if isinstance(a, np.ndarray) else a for a in rows))
    _check_devices(q, moved)
    return moved, window


def _check_devices(q: Tensor, rows: CacheRows) -> None:
    for name, array in zip(rows._fields, rows):
        if array is not None and array.device != q.device:
            raise DeviceError(f"{name}: expected the device of q ({q.device}), got {array.device}; move it there")


def _is_on_host(array: Any) -> bool:
    return isinstance(array, np.ndarray) or (array is not None and array.is_cpu)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, options: Keywords, call: Options, by_index: bool) -> None:
    """Raises the error of a call on rows of their own, because the errors of pages would name other arguments.

    by_index: whether cache_index selects the rows, of a cache that may have more of them.
    """
    named = {name: options[name] for name in ("mask", "bias", "alibi_slopes", "sinks")}
    for name, tensor in named.items():
        if tensor is not None:
            plan.check_tensor(name, tensor)
    tensor_kinds.check_data(q, k=k, v=v, **named)
    q, k, v, named["bias"] = autocast.in_autocast(q, k, v, named["bias"])
    entries = tuple([None if t is None else (t.shape, t.dtype, t.device) for t in (q, k, v, *named.values())])
    check_metadata(entries, call, by_index)


@lru_cache(maxsize=1024)
def check_metadata(entries: tuple[plan.Metadata | None, ...], call: Options, by_index: bool) -> None:
    """Checks (shape, dtype, device) of q, k, v, mask, bias, slopes and sinks; see ``_check_tensors``."""
    facts = [None if entry is None else plan.facts(*entry) for entry in entries]
    arrays = Arrays(*facts)  # type: ignore[arg-type]
    batch = arrays.q.shape[:1]
    if by_index:
        arrays = arrays._replace(**{n: f._replace(shape=batch + f.shape[1:]) for n, f in zip("kv", arrays[1:3])})
    build_spec(arrays, call)


def _on_pages(qkv: tuple[Tensor, ...], window: Window, options: Keywords, needs_backward: bool | None) -> bool:
    """Returns whether the call takes the form of pages.

    needs_backward: as ``explain`` has it; None: as the tensors say.
    """
    q, k, _ = qkv
    if not cache_rows.takes_pages((*q.shape[:2], k.shape[1], k.shape[0]), window, options):
        return False
    if needs_backward is None:
        tensors = (*qkv, options["sinks"])
        needs_backward = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
    if needs_backward or transforms.are_observing() or sdpa_flags.now() is not None:  # pages heed no sdpa_kernel
        return False
    compiling = torch.compiler.is_compiling()
    if not compiling and tensor_kinds.are_jit_traces_active() is not None:  # it also runs with tensors of training
        return False
    names = requested_names(options["backend"]) or (None if compiling else override.requested())
    return read_pages(names, plan.device_name(q.device))


def _on_pool(q: Tensor, k: Tensor, rows: CacheRows, window: Window, options: Keywords) -> Keywords:
    """Returns the keywords of the call on a pool: each row of the cache is a page."""
    (batch, count), device = q.shape[:2], q.device
    index = rows.cache_index
    if index is None:
        table = tables.rows_as_table(batch, device)
    else:
        table = index[:, None]
    lengths = rows.kv_lengths
    if lengths is None:
        lengths = torch.full((batch,), k.shape[1], dtype=torch.int32, device=device)
    names = (*ON_PAGES, "backend", "sinks", "alibi_slopes")
    keywords = {name: options[name] for name in names} | {"window": window, "kv_starts": rows.kv_starts}
    if count != 1:
        keywords["cu_seqlens_q"] = tables.equal_offsets(batch, count, device)
        keywords["max_len_q"] = count
    return {**keywords, "block_table": table, "seq_lens": lengths}


def from_pages(qkv: tuple[Any, ...], rows: CacheRows, window: Window, options: Keywords) -> Any:
    """Runs a checked call in the form of pages; returns its results as ``attention`` does."""
    q, k, v = qkv
    results = paged_attention(q.flatten(0, 1), k, v, **_on_pool(q, k, rows, window, options))
    return _in_rows_of(results, q, options)


def _in_rows_of(results: Any, q: Tensor, options: Keywords) -> Any:
    return in_rows(results if options["return_lse"] else (results, None), q, options["return_lse"])


def in_rows(results: tuple[Tensor, Any], q: Tensor, return_lse: bool) -> Any:
    """Returns the results of the form of pages as those of rows of q: out, or (out, lse)."""
    out, lse = results
    (batch, tokens), shape = q.shape[:2], out.shape[1:]
    out = out.view(batch, tokens, *shape)  # [batch * q_len, heads, dim] -> [batch, q_len, heads, dim]
    # [heads, batch * q_len] -> [batch, heads, q_len]
    return (out, lse.view(-1, batch, tokens).transpose(0, 1)) if return_lse else out


def _as_ranges(
    q: Tensor, k: Tensor, v: Tensor, rows: CacheRows, window: Window, options: Keywords
) -> tuple[tuple[Tensor, Tensor, Tensor], Keywords]:
    """Returns the tensors and the keywords of ``attention`` for the same call with key ranges."""
    device, lengths = q.device, (q.shape[1], k.shape[1])
    rows = cache_rows.clamped(rows, k.shape[1], k.shape[0])
    if rows.cache_index is not None:
        k, v = (tensor.index_select(0, rows.cache_index) for tensor in (k, v))
    top_left = options["alignment"] == "top_left"
    edges = window[0], 0 if options["causal"] else window[1]
    key = torch.arange(lengths[1], dtype=torch.int32, device=device)
    start, stop, inside = cache_rows.queries_of_keys(key, rows, lengths, edges, top_left)
    start, stop = start[:, None, :, None], stop[:, None, :, None]  # [batch, 1, kv_len, 1]
    theirs = _their_ranges(q, options["key_ranges"])
    if theirs is not None:
        start, stop = start.maximum(theirs[..., 0]), stop.minimum(theirs[..., 1])
        stop = stop.maximum(start)
    outside = ~inside[:, :, None, None]
    k, v = (tensor.masked_fill(outside, 0.0) for tensor in (k, v))
    changed: Keywords = {"key_ranges": torch.stack((start, stop), -1), "causal": False, "window": None}
    if options["alibi_slopes"] is not None and not top_left:
        slopes = options["alibi_slopes"].detach().to(torch.promote_types(q.dtype, torch.float32))
        length = torch.full((len(q),), lengths[1], device=device) if rows.kv_lengths is None else rows.kv_lengths
        arrays = slopes, (length - lengths[0]).int()
        changed |= {"alibi_slopes": None, "score_mod": TracedFunction(cache_rows.slopes_of_rows(slopes.dim()), arrays)}
    dropped = ("layout", *cache_rows.EXCLUDED)
    return (q, k, v), {name: value for name, value in (options | changed).items() if name not in dropped}


def _their_ranges(q: Tensor, key_ranges: Any) -> Tensor | None:
    """Returns the caller's key ranges as a tensor on q's device, with values checked if they are on the host."""
    if key_ranges is None:
        return None
    if str(key_ranges.dtype).removeprefix("torch.") != "int32":
        raise DTypeError(f"key_ranges: expected dtype int32, got {key_ranges.dtype}; cast it to int32")
    if not torch.compiler.is_compiling() and not transforms.is_one_op(q) and _is_on_host(key_ranges):
        check_values(np.asarray(key_ranges), q.shape[1])
    return tensor_kinds.to_device_of(q, key_ranges) if isinstance(key_ranges, np.ndarray) else key_ranges


def are_documents(qkv: tuple[Tensor, Tensor, Tensor], rows: CacheRows, options: Keywords) -> bool:
    """Returns whether a call in the form of pages runs as packed documents instead, see ``runs_packed``."""
    q, k, v = qkv
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(q):
        return False
    if any([each.stride(0) != each.shape[1] * each.stride(1) for each in (k, v)]):  # packing would copy the cache
        return False
    tensors = (q, k, v, None, None, options["alibi_slopes"], options["sinks"])
    arrays = Arrays(*(None if t is None else plan.facts(t.shape, t.dtype, t.device) for t in tensors))  # type: ignore[arg-type]
    names = requested_names(options["backend"]) or override.requested()
    plain = Options.of(options)
    return runs_packed(rows, arrays, check_options(plain), Target.here("torch", plan.device_name(q.device)), names)


def as_documents(
    q: Tensor, k: Tensor, v: Tensor, rows: CacheRows, options: Keywords
) -> tuple[tuple[Tensor, ...], Keywords]:
    """Returns the tensors and the keywords of ``attention`` for the same call on documents, see ``cache_rows``."""
    (batch, count), kv_len = q.shape[:2], k.shape[1]
    first = torch.arange(0, batch * kv_len, kv_len, dtype=torch.int32, device=q.device)
    queries = tables.equal_offsets(batch, count, q.device).repeat_interleave(2)
    return cache_rows.as_documents(torch, (q, k, v), rows, (first, queries), options)
