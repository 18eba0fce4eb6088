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
from attn_core.call.arguments import build_spec, check_one_place
from attn_core.call.cache_rows import CacheRows
from attn_core.call.key_ranges import check_values
from attn_core.call.kinds import check_int32
from attn_core.call.options import Options, check_layout, check_options, check_traced_options, requested_names
from attn_core.errors import SpecError
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import Selection, override
from attn_core.selection.dense_caches import Form, form_of, read_pages
from torch_frontend.dispatch import autocast, layouts, plan, sdpa_flags, tensor_kinds, transforms, value_checks
from torch_frontend.dispatch.eager_calls import OPTIONS
from torch_frontend.dispatch.layouts import all_exchanged, first_exchanged
from torch_frontend.dispatch.mask_objects import is_object
from torch_frontend.dispatch.plan import Results
from torch_frontend.dispatch.prepared import Prepared, Request
from torch_frontend.paged import paged_calls, tables
from torch_frontend.paged.attention import explain_paged, paged_attention

Tensor = torch.Tensor
Keywords = dict[str, Any]
Call = tuple[tuple[Tensor, ...], Keywords]
"""The tensors and the keywords of a call."""
_is_compiling = torch.compiler.is_compiling
# Dynamo would trace how an expression is built, and how a backend is loaded. Both depend on constants alone, so Dynamo
# takes the result.
vars(cache_rows.slopes_of_rows).update(_dynamo_marked_constant=True)
vars(read_pages).update(_dynamo_marked_constant=True)


def attend(
    attention: Callable[..., Results],
    qkv: tuple[Tensor, Tensor, Tensor],
    rows: CacheRows,
    options: Keywords,
    *,
    shifted: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Runs ``attention`` on the keys of each row of a cache.

    Args:
        qkv, rows: as the caller passed them.
        options: all other arguments of ``attention``, by name.
        shifted: as ``cache_rows.value_check`` has it.
    """
    with tensor_kinds.mode_around(qkv[0]):
        heads_first = check_layout(options["layout"]) == "bhsd"
        q, k, v = all_exchanged(qkv) if heads_first else qkv
        rows, options = _checked((q, k, v), rows, options, shifted=shifted)
        form, (q, k, v) = _form((q, k, v), rows, options, None)
        if form != "ranges" and not _is_compiling() and checks.enabled() and not transforms.is_one_op(q):
            value_checks.check_cache(*_as_ranges(q, k, v, rows, options))
        tensors, keywords = _FORMS[form](q, k, v, rows, options)
        results = (paged_attention if form == "pages" else attention)(*tensors, **keywords)
        results = results if form == "ranges" else _in_rows_of(results, q, options)
        return first_exchanged(results) if heads_first else results


def explain(
    explain: Callable[..., Selection],
    qkv: tuple[Tensor, Tensor, Tensor],
    rows: CacheRows,
    options: Keywords,
    needs_backward: bool | None,
) -> Selection:
    """Returns what would run the form that the call takes.

    Args:
        explain: the frontend's, for a call in another form than that of pages. The others are those of ``attend``.
    """
    q, k, v = all_exchanged(qkv) if check_layout(options["layout"]) == "bhsd" else qkv
    rows, options = _checked((q, k, v), rows, options)
    form, (q, k, v) = _form((q, k, v), rows, options, needs_backward)
    if form != "ranges":
        q, k, v = (tensor.detach() for tensor in (q, k, v))
    tensors, keywords = _FORMS[form](q, k, v, rows, options)
    if form == "pages":
        return explain_paged(*tensors, **keywords)
    return explain(*tensors, **keywords, needs_backward=needs_backward)


def _checked(
    qkv: tuple[Tensor, Tensor, Tensor], rows: CacheRows, options: Keywords, *, shifted: bool = False
) -> tuple[CacheRows, Keywords]:
    """Checks every argument; returns the rows as tensors on q's device, and the options with the window as a pair.

    Values on the host are checked. A compiled program, a trace and a transform clamp them.
    """
    for name, tensor in zip("qkv", qkv, strict=True):
        if layouts.has_jagged(tensor):
            raise SpecError(f"{name}: expected a plain tensor with {rows.first}, got a NestedTensor, which has lengths")
        plan.check_tensor(name, tensor)
    q, k, v = qkv
    if is_object(options["mask"], options["bias"]):
        raise SpecError(f"mask: expected a bool tensor with {rows.first}, got an object that says where diagonals lie")
    for name, array in zip(rows._fields, rows):
        if array is not None and not isinstance(array, np.ndarray):
            plan.check_tensor(name, array)
    cache_rows.check_arguments(rows, {"q": q.shape, "k": k.shape, "v": v.shape}, options)
    call = (check_traced_options if _is_compiling() else check_options)(Options.of(options))
    options = options | {"window": call.window}
    if isinstance(options["alibi_slopes"], Tensor):
        plan.check_gradient_free("alibi_slopes", options["alibi_slopes"])
    if _is_compiling() or transforms.is_one_op(q):
        moved = CacheRows(*(tensor_kinds.to_device_of(q, a) if isinstance(a, np.ndarray) else a for a in rows))
        check_one_place({"q": q, **dict(zip(moved._fields, moved))}, "q")
        return cache_rows.clamped(moved, k.shape[1], k.shape[0]), options
    _check_tensors(q, k, v, options, call, rows.cache_index is not None)
    on_host = CacheRows(*(array if _is_on_host(array) else None for array in rows))
    check = cache_rows.value_check(q.shape[1], k.shape[1], options, shifted=shifted)
    check(on_host, k.shape[1], k.shape[0])
    moved = CacheRows(*(torch.as_tensor(a, device=q.device) if isinstance(a, np.ndarray) else a for a in rows))
    check_one_place({"q": q, **dict(zip(moved._fields, moved))}, "q")
    return moved, options


def _is_on_host(array: Tensor | np.ndarray | None) -> bool:
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
    arrays = plan.arrays_of(entries)
    batch = arrays.q.shape[:1]
    if by_index:
        k, v = (each._replace(shape=batch + each.shape[1:]) for each in (arrays.k, arrays.v))
        arrays = arrays._replace(k=k, v=v)
    build_spec(arrays, call)


def _form(
    qkv: tuple[Tensor, Tensor, Tensor], rows: CacheRows, options: Keywords, needs_backward: bool | None
) -> tuple[Form, tuple[Tensor, Tensor, Tensor]]:
    """Returns the form that a checked call takes, and its tensors, cast as autocast says unless it is that of ranges.

    needs_backward: as ``explain`` has it; None: as the tensors say.
    """
    q, k, v = qkv
    if needs_backward is None:
        tensors = (*qkv, options["sinks"])
        needs_backward = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
    if needs_backward or transforms.are_observing() or sdpa_flags.now() is not None:  # pages heed no sdpa_kernel
        return "ranges", qkv
    # A trace also runs with tensors of training.
    if not _is_compiling() and tensor_kinds.are_jit_traces_active() is not None:
        return "ranges", qkv
    cast, arrays = autocast.in_autocast(q, k, v), None
    is_traced = _is_compiling() or tensor_kinds.is_watched(q)
    # Packing would copy a cache whose rows do not lie end to end.
    if not is_traced and all([each.stride(0) == each.shape[1] * each.stride(1) for each in cast[1:]]):
        tensors = (*cast, None, None, options["alibi_slopes"], options["sinks"])
        arrays = plan.arrays_of([None if t is None else (t.shape, t.dtype, t.device) for t in tensors])
    names = requested_names(options["backend"]) or (None if _is_compiling() else override.requested())
    sizes, where = (*q.shape[:2], k.shape[1], k.shape[0]), ("torch", plan.device_name(q.device))
    form = form_of(rows, sizes, options, arrays, where, names)
    return form, qkv if form == "ranges" else cast


def _pool_tables(q: Tensor, k: Tensor, rows: CacheRows) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns block_table, seq_lens and cu_seqlens_q of the call on a pool: each row of the cache is a page."""
    (batch, count), device, index, lengths = q.shape[:2], q.device, rows.cache_index, rows.kv_lengths
    table = tables.rows_as_table(batch, device) if index is None else index.unsqueeze(1)
    if lengths is None:
        lengths = torch.full((batch,), k.shape[1], dtype=torch.int32, device=device)
    return table, lengths, None if count == 1 else tables.equal_offsets(batch, count, device)


def _as_pages(q: Tensor, k: Tensor, v: Tensor, rows: CacheRows, options: Keywords) -> Call:
    """Returns the tensors and the keywords of ``paged_attention`` for the same call on a pool."""
    table, lengths, offsets = _pool_tables(q, k, rows)
    keywords = {name: options[name] for name in cache_rows.ON_POOL}
    keywords |= {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": offsets, "kv_starts": rows.kv_starts}
    return (q.flatten(0, 1), k, v), keywords | {"max_len_q": None if offsets is None else q.shape[1]}


def _in_rows_of(results: Any, q: Tensor, options: Keywords) -> Results:
    return in_rows(results if options["return_lse"] else (results, None), q, options["return_lse"])


def in_rows(results: tuple[Tensor, Any], q: Tensor, return_lse: bool) -> Any:
    """Returns the results of the form of pages as those of rows of q: out, or (out, lse)."""
    out, lse = results
    (batch, tokens), shape = q.shape[:2], out.shape[1:]
    out = out.view(batch, tokens, *shape)  # [batch * q_len, heads, dim] -> [batch, q_len, heads, dim]
    # [heads, batch * q_len] -> [batch, heads, q_len]
    return (out, lse.view(-1, batch, tokens).transpose(0, 1)) if return_lse else out


def _as_ranges(q: Tensor, k: Tensor, v: Tensor, rows: CacheRows, options: Keywords) -> Call:
    """Returns the tensors and the keywords of ``attention`` for the same call with key ranges."""
    device, q_len, kv_len = q.device, q.shape[1], k.shape[1]
    rows = cache_rows.clamped(rows, kv_len, k.shape[0])
    if rows.cache_index is not None:
        k, v = (tensor.index_select(0, rows.cache_index) for tensor in (k, v))
    key, theirs = torch.arange(kv_len, dtype=torch.int32, device=device), _their_ranges(q, options["key_ranges"])
    ranges, inside = cache_rows.key_ranges_of(torch, key, rows, q_len, theirs, options)
    # Keys beside a row may be NaN, and not every kernel keeps hidden ones apart.
    outside = ~inside[:, :, None, None]
    k, v = (tensor.masked_fill(outside, 0.0) for tensor in (k, v))
    changed: Keywords = {"key_ranges": ranges, "causal": False, "window": None}  # the ranges contain the band
    # ALiBi counts from the diagonal of each row's own length, which one call of ``attention`` has not.
    if options["alibi_slopes"] is not None and options["alignment"] != "top_left":
        slopes = options["alibi_slopes"].detach().to(torch.promote_types(q.dtype, torch.float32))
        length = torch.full((len(q),), kv_len, device=device) if rows.kv_lengths is None else rows.kv_lengths
        arrays = slopes, (length - q_len).int()
        changed |= {"alibi_slopes": None, "score_mod": TracedFunction(cache_rows.slopes_of_rows(slopes.dim()), arrays)}
    dropped = ("layout", *cache_rows.EXCLUDED)
    return (q, k, v), {name: value for name, value in (options | changed).items() if name not in dropped}


def _their_ranges(q: Tensor, key_ranges: Tensor | np.ndarray | None) -> Tensor | None:
    """Returns the caller's key ranges as a tensor on q's device, with values checked if they are on the host."""
    if key_ranges is None:
        return None
    check_int32("key_ranges", key_ranges.dtype)
    if not _is_compiling() and not transforms.is_one_op(q) and _is_on_host(key_ranges):
        check_values(np.asarray(key_ranges), q.shape[1])
    return tensor_kinds.to_device_of(q, key_ranges) if isinstance(key_ranges, np.ndarray) else key_ranges


def _as_documents(q: Tensor, k: Tensor, v: Tensor, rows: CacheRows, options: Keywords) -> Call:
    """Returns the tensors and the keywords of ``attention`` for the same call on documents, see ``cache_rows``."""
    (batch, count), kv_len = q.shape[:2], k.shape[1]
    first = torch.arange(0, batch * kv_len, kv_len, dtype=torch.int32, device=q.device)
    queries = tables.equal_offsets(batch, count, q.device).repeat_interleave(2)
    return cache_rows.as_documents(torch, (q, k, v), rows, (first, queries), options)


_FORMS: dict[Form, Callable[..., Call]] = {"pages": _as_pages, "documents": _as_documents, "ranges": _as_ranges}


def prepare(request: Request) -> Prepared | None:
    """Prepares a call without gradients in the form of pages: by its backend's fast path, or by ``paged_attention``.

    Its ``run`` takes q, k, v, the rows, sinks and alibi_slopes, and returns the results as ``attention`` does.
    """
    q, k, v, *arrays, sinks, slopes = request.entries
    assert q is not None and k is not None and v is not None
    named: dict[str, Any] = dict(zip(OPTIONS, request.options, strict=True))
    if request.needs or named.pop("layout") not in (None, "bshd") or named["dropout"] != 0.0:
        return None
    if any([entry is not None and entry[2] != q[2] for entry in request.entries]):
        return None  # the general path moves tables to q's device
    # The checks of ``_checked``, from metadata. Only those of values are left for each call.
    rows = CacheRows(*(entry and plan.facts(*entry) for entry in arrays))
    given = named | cache_rows.ABSENT | {"alibi_slopes": slopes}
    cache_rows.check_arguments(rows, {"q": q[0], "k": k[0], "v": v[0]}, given)
    call, names = check_options(Options(**named)), requested_names(request.requested)
    tensors = q, k, v, None, None, slopes, sinks
    check_metadata(tensors, call, rows.cache_index is not None)
    options, where = given | {"window": call.window}, ("torch", plan.device_name(q[2]))
    sizes = (*q[0][:2], k[0][1], k[0][0])
    if form_of(rows, sizes, options, plan.arrays_of(tensors), where, names) != "pages":
        return None  # the other forms are calls of ``attention``, which prepares them itself
    on_host, check_rows = q[2].type == "cpu", cache_rows.value_check(q[0][1], k[0][1], options)
    paged = None if rows.kv_starts is not None or slopes is not None else _paged(request, call, names)
    keywords = {**named, "window": call.window, "backend": request.requested}

    def build(paged_run: paged_calls.Run | None) -> Callable[..., Results]:
        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            lengths: Tensor | None,
            starts: Tensor | None,
            index: Tensor | None,
            sinks: Tensor | None,
            slopes: Tensor | None,
        ) -> Results:
            rows = CacheRows(lengths, starts, index)
            if on_host:
                check_rows(rows, k.shape[1], k.shape[0])
            if paged_run is not None:
                table, seq_lens, offsets = _pool_tables(q, k, rows)
                more = () if offsets is None else (offsets, None, None)
                results = paged_run(q.flatten(0, 1), k, v, table, seq_lens, sinks, *more)
                if results is not None:
                    return in_rows(results, q, call.return_lse)
            tensors, how = _as_pages(q, k, v, rows, {**keywords, "sinks": sinks, "alibi_slopes": slopes})
            return _in_rows_of(paged_attention(*tensors, **how), q, keywords)

        return run

    # Pages would call a tensor without its memory by another name.
    reads: Any = "all" if on_host or paged is None else None
    return Prepared(build(paged and paged.run), lambda: build(paged and paged.in_ranges()), reads)


def _paged(request: Request, call: Options, names: tuple[str, ...] | None) -> Prepared | None:
    """Prepares a checked call in the form of pages; None if its backend has no fast path for it."""
    q, k, v, _, _, _, sinks, _ = request.entries
    assert q is not None
    (batch, *_), _, device = q
    table, lengths = ((torch.Size(shape), torch.int32, device) for shape in ((batch, 1), (batch,)))
    options = (call.causal, call.window, call.softcap, call.scale, call.deterministic, call.return_lse)
    return paged_calls.prepare_rows((q, k, v, table, lengths, sinks), options, call.invariant, names)
