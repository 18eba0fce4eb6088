"""Eager calls on a cache without gradients: one lookup by metadata instead of many checks.

The checks that depend on metadata alone run once. Types, ``requires_grad`` and, on a CPU, values are checked on every
call. Whatever this path does not know, it leaves to the general one, which accepts it or names it in an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from attn_core.call import counters
from attn_core.call.options import check_paged_options, is_plain_window
from attn_core.dropins.flash_attn.cache import Cached, check_combination, check_facts, whole_length
from attn_core.paged import rotary as core_rotary
from attn_core.selection import override
from torch_frontend.dispatch import plan, tensor_kinds, transforms
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.flash_attn.cache_steps import append, check_host_values, positions_of
from torch_frontend.paged import constant_tables, seen_appends, seen_calls
from torch_frontend.paged.attention import paged_attention
from torch_frontend.paged.dense_caches import in_rows
from torch_frontend.paged.plan import options_of, plan_call
from torch_frontend.paged.rotary import apply_rotary, repeated_on_gpu

Tensor = torch.Tensor
Entry = plan.Metadata | None
_OPTIONS = ("causal", "window", "softcap", "scale", "deterministic", "return_lse")
_SEQLENS = Cached._fields.index("cache_seqlens")
_is_compiling, _is_transformed, _modes, _traces = (
    *(torch.compiler.is_compiling, transforms.are_active),
    *(tensor_kinds.are_modes_active, tensor_kinds.are_jit_traces_active),
)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class SeenCall(NamedTuple):
    """A checked call: its sizes, and the functions that run its steps."""

    device: torch.device
    batch: int
    tokens: int
    """The queries of each sequence."""
    new: int
    capacity: int
    on_host: bool
    """Whether the values of tables are checked."""
    append: Callable[..., bool] | None
    """Appends on a GPU, and writes the lengths that count the new tokens; None: the general path does."""
    rotate: Callable[..., Tensor]
    paged: seen_calls.SeenCall | None
    """The attention; None if its backend has no fast path for it."""


def attend(call: Cached, interleaved: bool, options: dict[str, Any], table: str, longest: int | None) -> Any:
    """Returns the results of a call as ``kvcache.attend`` does, whose arguments these are; None if that must run it."""
    if _is_compiling() or _modes() or _is_transformed() or forward_ad._current_level >= 0 or _traces() is not None:
        return None
    single = type(call.cache_seqlens) is int
    trains = torch.is_grad_enabled()
    entries: list[Any] = []
    try:
        for each in call:
            if each is None:
                entries.append(None)
                continue
            if type(each) is not Tensor:
                if not (single and len(entries) == _SEQLENS):
                    return None
                entries.append(None)
                continue
            if each.layout is not torch.strided or torch._is_functional_tensor(each) or _is_wrapped(each):
                return None
            if (trains and each.requires_grad) or (each.is_cpu and tensor_kinds.is_cut(each)):
                return None
            entries.append((each.shape, each.dtype, each.device))
        if options.get("sinks") is not None or not is_plain_window(options["window"]):
            return None
        values = [options[name] for name in _OPTIONS]
        seen = _seen(tuple(entries), single, interleaved, table, longest, override.requested(), *values)
    except Exception:  # the general path raises the error again, or an earlier one
        return None
    return None if seen is None else _run(call, seen, interleaved, options)


def _run(call: Cached, seen: SeenCall, interleaved: bool, options: dict[str, Any]) -> Any:
    """Runs the steps of a checked call."""
    q, k_cache, v_cache, k, v, cos, sin, seqlens, index = call[:9]
    device, batch, tokens, new = seen[:4]
    if type(seqlens) is int:
        length = whole_length(seqlens, seen.capacity, new)
        seqlens = torch.full((batch,), length, dtype=torch.int32, device=device)
    elif seqlens is None:
        seqlens = torch.full((batch,), seen.capacity, dtype=torch.int32, device=device)
    if seen.on_host:
        check_host_values(call, seqlens, seen.capacity, new)
    pages = call.block_table
    if pages is None:
        pages = constant_tables.rows_as_table(batch, device) if index is None else index.unsqueeze(1)
    if cos is not None:
        banded = options["causal"] or options["window"] is not None
        q = seen.rotate(q, cos, sin, positions_of(seqlens, tokens, banded), interleaved)
    if seen.append is not None:
        offsets = () if new == 1 else (constant_tables.equal_offsets(batch, new, device),)
        angles = () if cos is None else (cos, sin)
        keys, values = (each.squeeze(1) if new == 1 else each.flatten(0, 1) for each in (k, v))
        lengths = torch.empty_like(seqlens)  # the append fills it, which saves a launch
        seen.append(k_cache, v_cache, keys, values, pages, seqlens, *offsets, *angles, lengths)
    elif new:
        lengths = seqlens + new
        append(call, pages, lengths, interleaved)
    else:
        lengths = seqlens
    offsets_q = None if tokens == 1 else constant_tables.equal_offsets(batch, tokens, device)
    queries = q.squeeze(1) if tokens == 1 else q.flatten(0, 1)  # without the axis of size 1, in less time
    if seen.paged is not None:
        more = () if offsets_q is None else (offsets_q, None, None)
        results = seen_calls.run(seen.paged, queries, k_cache, v_cache, pages, lengths, None, *more)
        if results is not None:
            return in_rows(results, call.q, options["return_lse"])
    how = {**options, "block_table": pages, "seq_lens": lengths, "kv_starts": call.cache_leftpad}
    how |= {"alibi_slopes": call.alibi_slopes}
    if offsets_q is not None:
        how |= {"cu_seqlens_q": offsets_q, "max_len_q": tokens}
    results = paged_attention(queries, k_cache, v_cache, **how)
    both = results if options["return_lse"] else (results, None)
    return in_rows(both, call.q, options["return_lse"])


@lru_cache(maxsize=1024, typed=True)  # True and 1.0 are not 1
def _seen(
    entries: tuple[Entry, ...],
    single: bool,
    interleaved: bool,
    table: str,
    longest: int | None,
    requested: tuple[str, ...] | None,
    *values: Any,
) -> SeenCall | None:
    """Checks a call by its metadata, and plans it; None if the general path must run it.

    Args:
        entries: (shape, dtype, device) of the fields of ``Cached``, None for an absent one and for an int.
        single: whether cache_seqlens is an int.
        requested: the backends that ``use_backend`` names.
        values: of ``_OPTIONS``.
    """
    call = Cached(*entries)
    facts = Cached(*(entry and plan.facts(*entry) for entry in entries))
    check_combination(facts._replace(cache_seqlens=0) if single else facts, table)
    check_paged_options(*values, longest)  # type: ignore[call-arg]
    check_facts(facts, table)
    (shape, _, device), rows = call.q, call.k_cache[0][0]
    places = (call.cache_seqlens, call.block_table, call.cache_batch_idx, call.cache_leftpad)
    is_whole = all([each is None for each in places]) and not single and rows == shape[0]
    if call.cu_seqlens_q is not None or is_whole or device.type not in ("cpu", "cuda"):
        return None
    (batch, tokens), new = shape[:2], 0 if call.k is None else call.k[0][1]
    if 0 in shape or (call.k is not None and new == 0):
        return None
    pages = call.block_table or (torch.Size((batch, 1)), torch.int32, device)
    lengths = torch.Size((batch,)), torch.int32, device
    tables = call._replace(block_table=pages, cache_seqlens=lengths)
    capacity = pages[0][1] * call.k_cache[0][1]
    write = None if call.k is None or device.type == "cpu" else _writer(tables, new, interleaved)
    return SeenCall(
        *(device, batch, tokens, new, capacity, device.type == "cpu", write),
        *(_rotation(call), _attention(tables, tokens, requested, values)),
    )


def _writer(call: Cached, new: int, interleaved: bool) -> Callable[..., bool] | None:
    """Returns the append on a GPU for a call with tables."""
    k, v = (_flat(entry) for entry in (call.k, call.v))
    offsets = None if new == 1 else _offsets(call)
    where = (call.block_table, call.cache_seqlens, offsets, None, call.rotary_cos, call.rotary_sin, None)
    present = tuple([each is not None for each in where])
    entries = (call.k_cache, call.v_cache, k, v, *[each for each in where if each is not None])
    return seen_appends.writer(present, entries, interleaved, new)


def _rotation(call: Cached) -> Callable[..., Tensor]:
    """Checks the metadata of a rotation of the queries, and returns the function that rotates them."""
    if call.rotary_cos is None or call.q[2].type == "cpu":
        return _rotate_by_torch
    facts = [plan.facts(*entry) for entry in (call.q, call.rotary_cos, call.rotary_sin)]
    positions = plan.facts(torch.Size(call.q[0][:2]), torch.int32, call.q[2])
    core_rotary.check_apply(dict(zip(("x", "cos", "sin", "positions"), (*facts, positions), strict=True)))
    return on_device(repeated_on_gpu(), call.q[2])  # type: ignore[no-any-return]


def _rotate_by_torch(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return apply_rotary(q, cos, sin, positions=positions, interleaved=interleaved)


def _attention(
    call: Cached, tokens: int, requested: tuple[str, ...] | None, values: tuple[Any, ...]
) -> seen_calls.SeenCall | None:
    """Plans the attention of a call with tables; None if its backend has no fast path for it.

    Raises NoBackendError if none can run it.
    """
    tensors = (_flat(call.q), call.k_cache, call.v_cache, call.block_table, call.cache_seqlens)
    if call.alibi_slopes is not None or call.cache_leftpad is not None:
        offsets = None if tokens == 1 else _offsets(call)
        entries = (*tensors, offsets, None, None, call.alibi_slopes, call.cache_leftpad, None, None)
        longest = None if tokens == 1 else tokens
        plan_call(entries, options_of(*values, longest), requested)  # type: ignore[call-arg]
        return None
    more = (None, None, None) if tokens == 1 else (_offsets(call), None, None)
    key = [entry[at] for at in range(3) for entry in tensors]  # the shapes, the dtypes, then the devices
    return seen_calls.seen_call(*key, None, more, requested, *values, None if tokens == 1 else tokens)


def _flat(entry: plan.Metadata) -> plan.Metadata:
    """Returns the metadata of ``[batch, tokens, ...]`` as ``[batch * tokens, ...]``."""
    (batch, tokens, *rest), dtype, device = entry
    return torch.Size((batch * tokens, *rest)), dtype, device


def _offsets(call: Cached) -> plan.Metadata:
    return torch.Size((call.q[0][0] + 1,)), torch.int32, call.q[2]


counters.watch("torch", _seen)
