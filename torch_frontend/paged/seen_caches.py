"""Eager calls on rows of a cache without gradients: one lookup by metadata instead of many checks.

The checks that depend on metadata alone run once. Types, ``requires_grad`` and, on a CPU, values are checked on every
call. Whatever this path does not know, it leaves to the general one, which accepts it or names it in an error.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad

from attn_core.call import cache_rows, checks, counters
from attn_core.call.arguments import Arrays
from attn_core.call.cache_rows import CacheRows
from attn_core.call.options import PLAIN, Options, check_options, is_plain_window, requested_names
from attn_core.selection import Target, override
from attn_core.selection.dense_caches import read_pages, runs_packed
from torch_frontend.dispatch import autocast, plan, sdpa_flags, tensor_kinds, transforms
from torch_frontend.paged import constant_tables, seen_calls
from torch_frontend.paged.dense_caches import Window, check_metadata, from_pages, in_rows

Tensor = torch.Tensor
_KINDS = frozenset((Tensor, torch.nn.Parameter))
_ABSENT = ("mask", "bias", "key_ranges", "mask_mod", "score_mod", "seq_info", "dropout_rng")
_OPTIONS = tuple([name for name in PLAIN if name != "dropout"])


def attend(qkv: tuple[Any, ...], rows: CacheRows, options: dict[str, Any]) -> Any:  # noqa: C901
    """Returns the results of a call as ``dense_caches.attend`` does; None if that must run it.

    Args:
        qkv, rows, options: as ``dense_caches.attend`` has them.
    """
    if torch.compiler.is_compiling() or autocast.is_on() or transforms.are_active() or tensor_kinds.are_modes_active():
        return None
    if forward_ad._current_level >= 0 or tensor_kinds.are_jit_traces_active() is not None or checks.enabled():
        return None
    tensors = (*qkv, *rows, options["sinks"], options["alibi_slopes"])
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _KINDS or tensor.layout is not torch.strided):
            return None
    if any([options[name] is not None for name in _ABSENT]) or type(options["aux"]) is not tuple or options["aux"]:
        return None
    usual = type(options["dropout"]) is float and not options["dropout"] and options["return_max_logit"] is False
    if not usual or type(options["layout"]) is not str or options["layout"] != "bshd":
        return None
    if not is_plain_window(options["window"]) or sdpa_flags.now() is not None:
        return None
    try:
        if torch.is_grad_enabled() and any([tensor is not None and tensor.requires_grad for tensor in tensors]):
            return None
        entries = tuple([None if t is None else (t.shape, t.dtype, t.device) for t in tensors])
        requested = override.requested() if options["backend"] is None else options["backend"]
        seen = _seen(entries, requested, *[options[name] for name in _OPTIONS])
    except Exception:  # the general path raises the error again, or an earlier one
        return None
    if seen is None:
        return None
    q, k, v = qkv
    if q.is_cpu:
        cache_rows.check_values(rows, k.shape[1], k.shape[0])
    window, call = seen
    if call is None:
        return _from_pages(qkv, rows, window, options)
    device, (batch, tokens, *_) = q.device, q.shape
    index, lengths = rows.cache_index, rows.kv_lengths
    table = constant_tables.rows_as_table(batch, device) if index is None else index.unsqueeze(1)
    if lengths is None:
        lengths = torch.full((batch,), k.shape[1], dtype=torch.int32, device=device)
    more = () if tokens == 1 else (constant_tables.equal_offsets(batch, tokens, device), None, None)
    results = seen_calls.run(call, q.flatten(0, 1), k, v, table, lengths, options["sinks"], *more)
    return _from_pages(qkv, rows, window, options) if results is None else in_rows(results, q, options["return_lse"])


def _from_pages(qkv: tuple[Any, ...], rows: CacheRows, window: Window, options: dict[str, Any]) -> Any:
    """``from_pages``; None for a tensor without its memory, which that would call by its name of pages."""
    cut = any([tensor_kinds.is_cut(each) for each in (*qkv, *rows) if each is not None])
    return None if cut else from_pages(qkv, rows, window, options)


@lru_cache(maxsize=1024, typed=True)  # True and 1.0 are not 1
def _seen(
    entries: tuple[plan.Metadata | None, ...], requested: str | tuple[str, ...] | None, *plain: Any
) -> tuple[Window, seen_calls.SeenCall | None] | None:
    """Checks a call by its metadata. Returns its window as a pair and its plan, or None if it is no call on pages.

    The plan is None if the backend has no fast path for the call.

    Args:
        entries: (shape, dtype, device) of q, k, v, the rows, sinks and slopes.
        requested: the backends that the call's ``backend=`` or ``use_backend`` names.
        plain: the values of ``_OPTIONS``.
    """
    q, k, v, *others, sinks, slopes = entries
    assert q is not None and k is not None and v is not None
    if any([entry is not None and entry[2] != q[2] for entry in entries]) or q[2].type == "meta":
        return None
    rows = CacheRows(*(entry and plan.facts(*entry) for entry in others))
    named: dict[str, Any] = dict(zip(_OPTIONS, plain, strict=True))
    absent = {**dict.fromkeys(_ABSENT), "aux": (), "dropout": 0.0, "return_max_logit": False, "alibi_slopes": slopes}
    cache_rows.check_arguments(rows, {"q": q[0], "k": k[0], "v": v[0]}, named | absent)
    call = check_options(Options(**named))
    check_metadata((q, k, v, None, None, slopes, sinks), call, rows.cache_index is not None)
    sizes = (*q[0][:2], k[0][1], k[0][0])
    names, window = requested_names(requested), call.window
    slots = plan.facts(*q), plan.facts(*k), plan.facts(*v), None, None, slopes and plan.facts(*slopes)
    arrays = Arrays(*slots, sinks and plan.facts(*sinks))
    if runs_packed(rows, arrays, call, Target.here("torch", plan.device_name(q[2])), names):
        return None
    on_pages = cache_rows.takes_pages(sizes, window, named | absent) and read_pages(names, plan.device_name(q[2]))  # type: ignore[arg-type]
    return (window, _plan(entries, requested, call, window)) if on_pages else None  # type: ignore[return-value, arg-type]


def _plan(
    entries: tuple[plan.Metadata | None, ...], requested: str | tuple[str, ...] | None, call: Options, window: Window
) -> seen_calls.SeenCall | None:
    """Returns the plan of a checked call in the form of pages; None if its backend has no fast path for it."""
    q, k, v, _, starts, _, sinks, slopes = entries
    if starts is not None or slopes is not None or q is None or k is None or v is None:
        return None
    ((batch, tokens, *heads), dtype, device), number = q, torch.int32
    tensors = (torch.Size((batch * tokens, *heads)), dtype, device), k, v
    tables = [(torch.Size(shape), number, device) for shape in ((batch, 1), (batch,), (batch + 1,))]
    key = [entry[at] for at in range(3) for entry in (*tensors, *tables[:2])]  # shapes, dtypes, then devices
    more, longest = ((None, None, None), None) if tokens == 1 else ((tables[2], None, None), tokens)
    options = (call.causal, window, call.softcap, call.scale, call.deterministic, call.return_lse)
    return seen_calls.seen_call(*key, sinks, more, requested, *options, longest, call.invariant)


counters.watch("torch", _seen)
