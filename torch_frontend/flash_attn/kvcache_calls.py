"""The steps of a call on a cache, and eager calls without gradients by the table of prepared calls.

See ``dispatch.prepared``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from attn_core.call.options import check_paged_options, is_plain_window, requested_names
from attn_core.dropins.flash_attn.cache import (
    Cached,
    append_arguments,
    check_combination,
    check_facts,
    check_values,
    whole_length,
)
from attn_core.paged import rotary as core_rotary
from torch_frontend.dispatch import plan
from torch_frontend.dispatch.prepared import Prepared, Request, find
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.paged import paged_calls, tables
from torch_frontend.paged.append import append_kv, gpu_writer
from torch_frontend.paged.attention import paged_attention
from torch_frontend.paged.dense_caches import in_rows
from torch_frontend.paged.plan import options_of, plan_call
from torch_frontend.paged.rotary import apply_rotary, repeated_on_gpu

Tensor = torch.Tensor
_OPTIONS = ("causal", "window", "softcap", "scale", "deterministic", "return_lse")


class _Steps(NamedTuple):
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
    paged: paged_calls.Run | None
    """The attention; None if its backend has no fast path for it."""
    interleaved: bool
    """Whether the rotation is of neighbouring channels."""


def attend(call: Cached, interleaved: bool, options: dict[str, Any], table: str, longest: int | None) -> Any:
    """Returns the results of a call as ``kvcache.attend`` does, whose arguments these are; None if that must run it."""
    if options.get("sinks") is not None or not is_plain_window(options["window"]):
        return None
    single = type(call.cache_seqlens) is int
    q, k_cache, v_cache, *others = call._replace(cache_seqlens=None) if single else call
    values = [options[name] for name in _OPTIONS]
    run = find(_prepare, q, k_cache, v_cache, tuple(others), (single, interleaved, table, longest, *values), None)
    return None if run is None else run(call, options)


def _run(seen: _Steps, call: Cached, options: dict[str, Any]) -> Any:
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
        pages = tables.rows_as_table(batch, device) if index is None else index.unsqueeze(1)
    if cos is not None:
        banded = options["causal"] or options["window"] is not None
        q = seen.rotate(q, cos, sin, positions_of(seqlens, tokens, banded), seen.interleaved)
    if seen.append is not None:
        offsets = () if new == 1 else (tables.equal_offsets(batch, new, device),)
        angles = () if cos is None else (cos, sin)
        keys, values = (each.squeeze(1) if new == 1 else each.flatten(0, 1) for each in (k, v))
        lengths = torch.empty_like(seqlens)  # the append fills it, which saves a launch
        seen.append(k_cache, v_cache, keys, values, pages, seqlens, *offsets, *angles, lengths)
    elif new:
        lengths = seqlens + new
        append(call, pages, lengths, seen.interleaved)
    else:
        lengths = seqlens
    offsets_q = None if tokens == 1 else tables.equal_offsets(batch, tokens, device)
    queries = q.squeeze(1) if tokens == 1 else q.flatten(0, 1)  # without the axis of size 1, in less time
    if seen.paged is not None:
        more = () if offsets_q is None else (offsets_q, None, None)
        results = seen.paged(queries, k_cache, v_cache, pages, lengths, None, *more)
        if results is not None:
            return in_rows(results, call.q, options["return_lse"])
    how = {**options, "block_table": pages, "seq_lens": lengths, "kv_starts": call.cache_leftpad}
    how |= {"alibi_slopes": call.alibi_slopes}
    if offsets_q is not None:
        how |= {"cu_seqlens_q": offsets_q, "max_len_q": tokens}
    results = paged_attention(queries, k_cache, v_cache, **how)
    both = results if options["return_lse"] else (results, None)
    return in_rows(both, call.q, options["return_lse"])


def _prepare(request: Request) -> Prepared | None:
    """Prepares a call; the entries are those of the fields of ``Cached``, None for an absent one and for an int."""
    single, interleaved, table, longest, *values = request.options
    entries, requested = request.entries, requested_names(request.requested)
    if request.needs:
        return None
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
    paged = _attention(tables, tokens, requested, tuple(values))

    def build(paged_run: paged_calls.Run | None) -> Callable[..., Any]:
        on_host, rotate = device.type == "cpu", _rotation(call)
        return partial(
            _run, _Steps(device, batch, tokens, new, capacity, on_host, write, rotate, paged_run, interleaved)
        )

    reads: Any = "all" if device.type == "cpu" else None
    return Prepared(build(paged and paged.run), lambda: build(paged and paged.in_ranges()), reads)


def _writer(call: Cached, new: int, interleaved: bool) -> Callable[..., bool] | None:
    """Returns the append on a GPU for a call with tables."""
    k, v = (_flat(entry) for entry in (call.k, call.v))
    offsets = None if new == 1 else _offsets(call)
    tables = call.block_table, call.cache_seqlens, offsets, None, call.rotary_cos, call.rotary_sin, None
    return gpu_writer((call.k_cache, call.v_cache, k, v, *tables), interleaved, new)


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
) -> Prepared | None:
    """Prepares the attention of a call with tables; None if its backend has no fast path for it.

    Raises NoBackendError if none can run it.
    """
    tensors = (call.k_cache, call.v_cache, call.block_table, call.cache_seqlens)
    if call.alibi_slopes is not None or call.cache_leftpad is not None:
        offsets = None if tokens == 1 else _offsets(call)
        entries = (_flat(call.q), *tensors, offsets, None, None, call.alibi_slopes, call.cache_leftpad, None, None)
        longest = None if tokens == 1 else tokens
        plan_call(entries, options_of(*values, longest), requested)  # type: ignore[call-arg]
        return None
    return paged_calls.prepare_rows((call.q, *tensors, None), values, None, requested)


def _flat(entry: plan.Metadata) -> plan.Metadata:
    """Returns the metadata of ``[batch, tokens, ...]`` as ``[batch * tokens, ...]``."""
    (batch, tokens, *rest), dtype, device = entry
    return torch.Size((batch * tokens, *rest)), dtype, device


def _offsets(call: Cached) -> plan.Metadata:
    return torch.Size((call.q[0][0] + 1,)), torch.int32, call.q[2]


def check_host_values(call: Cached, seqlens: Tensor | None, capacity: int, new: int) -> None:
    """Checks the values of tables on the CPU; seqlens: cache_seqlens as a tensor."""
    check_values(call, to_numpy(seqlens, call.cache_batch_idx, call.cache_leftpad), capacity, new)


def to_numpy(*tables: Tensor | None) -> tuple[Any, ...]:
    """Returns tables on the CPU as numpy arrays."""
    return tuple([None if each is None else each.numpy() for each in tables])


def positions_of(before: Tensor, tokens: int, banded: bool) -> Tensor:
    """Returns the rotary position of each query, int32 ``[batch, tokens]``."""
    first = before.unsqueeze(1)
    if tokens == 1:
        return first
    return first + tables.places(tokens, before.device) if banded else first.expand(-1, tokens)


def append(call: Cached, pages: Tensor, seq_lens: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Appends the new tokens, and returns both caches; seq_lens count the tokens."""
    batch, new = call.k.shape[:2]
    offsets = None if new == 1 else tables.equal_offsets(batch, new, pages.device)
    tensors, keywords = append_arguments(call, pages, seq_lens, interleaved, offsets)
    append_kv(*tensors, **keywords)
    return call.k_cache, call.v_cache
