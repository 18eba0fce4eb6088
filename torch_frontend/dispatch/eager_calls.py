"""Eager calls of ``attention`` by the table of prepared calls, see ``prepared``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from attn_core.backends.shared.caches import from_records
from attn_core.call.masks import without_idle_sides
from attn_core.call.options import PLAIN, Options, check_layout, check_options, requested_names
from attn_core.call.seq_info import SeqInfo, SeqInfoLike
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.selection import NoBackendError, Target, choose, new_plans
from torch_frontend.dispatch import autograd, in_parts, offsets, plan, run_plan
from torch_frontend.dispatch.layouts import exchanged
from torch_frontend.dispatch.plan import Metadata, Plan, Results
from torch_frontend.dispatch.prepared import Prepared, Request, Requested, Run, find, is_observed
from torch_frontend.dispatch.run_plan import check_offsets, in_ranges, note_failure, run_forward

Tensor = torch.Tensor
OPTIONS = (*PLAIN, "layout")
"""The options of a prepared call. A window must be plain, because the key has no types of what is in a pair."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor | None, ...],
    seq_info: SeqInfoLike,
    key_ranges: Tensor | np.ndarray | None,
    options: tuple[object, ...],
    backend: Requested,
) -> Results | None:
    """Returns the results of a call with slopes, sinks, documents or key ranges as ``attention`` does.

    None if the general path must run it.

    Args:
        tables: mask, bias, alibi_slopes and sinks.
        options: the values of ``OPTIONS``; the other arguments are those of ``attention``.
    """
    sinks = tables[3]
    if key_ranges is not None:
        is_alone = seq_info is None and tables == (None, None, None, None)
        return _attend_with_ranges(q, k, v, key_ranges, options, backend) if is_alone else None
    others: tuple[Any, ...] = tables
    if seq_info is not None:
        # The general path exchanges the axes of another layout first.
        documents = None if is_observed() or options[-1] not in (None, "bshd") else _documents(q, k, v, seq_info)
        if documents is None:
            return None
        queries, keys, *longest = documents
        others, options = (*tables, queries, keys), (*options, *longest)
    run = find(prepare, q, k, v, others, options, backend)
    if run is None:
        return None
    results = run(q, k, v, *others)
    if sinks is None or type(results) is not tuple:
        return results
    return run_plan.finish_results(results, Inputs(q, k, v, *others), seq_info)


def _documents(q: Tensor, k: Tensor, v: Tensor, seq_info: SeqInfoLike) -> tuple[Tensor, Tensor, int, int] | None:
    """Returns complete offsets of q and of k, and their longest documents; None for documents that are not valid."""
    try:
        if type(seq_info) is SeqInfo and q.dim() >= 3 and k.dim() >= 3:
            info = seq_info.known_conversion((q.device, q.shape[-3], k.shape[-3]))  # from an earlier call
            if info is not None:
                return info.cu_seqlens_q, info.cu_seqlens_k, info.max_len_q, info.max_len_k
        inputs, longest = offsets.attach_complete(SeqInfo.coerce(seq_info), Inputs(q, k, v))  # type: ignore[arg-type]
        return inputs.cu_seqlens_q, inputs.cu_seqlens_k, *longest
    except Exception:  # the general path raises the error again, or the one that comes before it
        return None


def prepare(request: Request) -> Prepared | None:
    """Prepares a call on q, k, v; with mask and bias; or with all fields of ``Inputs`` up to the offsets."""
    plain, (layout, *longest) = request.options[: len(PLAIN)], request.options[len(PLAIN) :]
    heads_first = check_layout(layout) == "bhsd"
    options = checked_options(*plain)
    if options.dropout or request.learns("alibi_slopes"):  # the general path draws words, and raises an error
        return None
    if longest:
        options = options._replace(max_len_q=longest[0], max_len_k=longest[1])
    given, entries = len(request.entries), Inputs(*request.entries)
    entries = _exchanged(entries) if heads_first else entries
    call_plan = _plan(entries, options, request, request.learns("bias"))
    on_host = entries.q[2].type == "cpu"
    run = _run_dense if given == 3 else _run_on_documents_of_host if call_plan.spec.packed and on_host else autograd.run
    # Autograd can differentiate a shortcut, so only a call without one needs our autograd function.
    records = request.needs != 0 and not request.trains
    reads: Any = None
    if given == 5:  # mask and bias beside operations of torch
        reads = "others"
    elif given > 5 and on_host:
        reads = "all"
    how = run, records, heads_first
    return Prepared(_build(call_plan, *how), lambda: _build(in_ranges(call_plan), *how), reads)


def _build(call_plan: Plan, run: Run, records: bool, heads_first: bool) -> Run:
    """Returns what runs a plan: ``run(call_plan, records, *tensors)``, in the caller's layout."""
    bound = partial(run, call_plan, records)
    return _in_heads_first(call_plan, bound) if heads_first else bound


def _plan(entries: Inputs, options: Options, request: Request, bias_gradient: bool) -> Plan:
    """Plans a call; in a layer that trains on a backend without a backward if no requested backend has one."""
    others = entries.alibi_slopes, entries.sinks, entries.cu_seqlens_q, entries.cu_seqlens_k
    plans = plan_by_family if others == (None, None, None, None) else plan.plan
    if request.trains:
        try:
            return plans(entries, options, True, bias_gradient, request.requested)
        except NoBackendError:
            pass
        return plans(entries, options, False, False, request.requested)
    return plans(entries, options, request.needs != 0, bias_gradient, request.requested)


def _run_dense(call_plan: Plan, records: bool, q: Tensor, k: Tensor, v: Tensor) -> Results:
    """Runs a call on q, k and v alone, the one whose overhead matters most."""
    shortcut, spec = call_plan.shortcut, call_plan.spec
    try:
        results = None if shortcut is None else shortcut(q, k, v)
        if results is None:
            if records:
                return autograd.AttentionFunction.apply(call_plan, q, k, v)
            results = call_plan.forward(spec, Inputs(q, k, v))
    except Exception as error:
        note_failure(error, call_plan, q, k, v)
        raise
    return results if spec.return_lse else results[0]


def _run_on_documents_of_host(call_plan: Plan, records: bool, *tensors: Any) -> Results:
    check_offsets(call_plan.spec, Inputs(*tensors))
    return autograd.run(call_plan, records, *tensors)


def _in_heads_first(call_plan: Plan, run: Run) -> Run:
    """Returns ``run`` for q, k and v ``[batch, heads, len, dim]``, by the kernel itself if it has this layout.

    torch's own kernels have it. Then a call needs none of seven views, for which autograd would record a node each.
    """

    def exchange(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Results:
        try:
            q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
        except RuntimeError as error:  # a tensor without its memory has no views
            note_failure(error, call_plan, q, k, v)
            raise
        results = run(q, k, v, *others)
        return (exchanged(results[0]), *results[1:]) if call_plan.spec.return_lse else exchanged(results)

    direct = getattr(call_plan.shortcut, "heads_first", None)
    if direct is None or call_plan.spec.return_lse:
        return exchange

    def attend_directly(*tensors: Any) -> Results:
        # Errors of the kernel propagate: checkpointing stops a recomputation by one of its own, from a hook.
        try:
            results = direct(*tensors)
        except Exception as error:
            note_failure(error, call_plan, *tensors[:3])
            raise
        return exchange(*tensors) if results is None else results[0]

    return attend_directly


def _exchanged(entries: Inputs) -> Inputs:
    """Returns the metadata of a call with the axes of the sequence and the heads of q, k and v exchanged."""
    changed: dict[str, Metadata] = {}
    for name in "qkv":
        shape, dtype, device = getattr(entries, name)
        if len(shape) > 2:
            *batch, heads, length, dim = shape
            changed[name] = torch.Size((*batch, length, heads, dim)), dtype, device
    return entries._replace(**changed)


def _attend_with_ranges(
    q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | np.ndarray, options: tuple[object, ...], backend: Requested
) -> Results | None:
    """``attend`` for calls on a GPU with key ranges alone, in numpy or as a tensor."""
    if is_observed() or type(q) is not Tensor or not _is_on_gpu(q):
        return None
    if type(key_ranges) is np.ndarray:
        if key_ranges.dtype != np.int32:
            return None
        # No copy: what the call keeps of ranges on the host is its own.
        key_ranges = torch.from_numpy(key_ranges if key_ranges.flags.writeable else key_ranges.copy())
    run = find(_prepare_with_ranges, q, k, v, (key_ranges,), options, backend)
    return None if run is None else run(q, k, v, key_ranges)


def _is_on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def _prepare_with_ranges(request: Request) -> Prepared | None:
    """Prepares a call on q, k, v and key ranges. The values of ranges on the host decide what each call runs."""
    *plain, layout = request.options
    options = checked_options(*plain)
    if layout not in (None, "bshd") or options.dropout or request.trains:
        return None
    q, k, v, ranges = request.entries
    assert q is not None and ranges is not None
    device, on_host = q[2], ranges[2].type == "cpu"
    entries = Inputs(q, k, v, key_ranges=(*ranges[:2], device if on_host else ranges[2]))  # those on the host move
    records = request.needs != 0
    arguments = (entries, options, records, False, requested_names(request.requested), None)
    plan.request(*arguments)  # raises the error of a call that is not valid
    planned = None if on_host else plan.plan(*arguments)

    def build(watched: Callable[[Plan], Plan]) -> Run:
        def run(q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor) -> Results:
            call_plan, inputs = planned, Inputs(q, k, v, key_ranges=key_ranges)
            if call_plan is None:
                call_plan, inputs = in_parts.resolve(arguments, inputs)
            call_plan = watched(call_plan)
            if records:
                return autograd.AttentionFunction.apply(call_plan, *inputs)
            results = run_forward(call_plan, inputs)
            return results if options.return_lse else results[0]

        return run

    return Prepared(build(lambda call_plan: call_plan), lambda: build(in_ranges))


# Small, because it serves calls of new lengths. Typed, because causal=1 is an error, and causal=True is not.
@lru_cache(maxsize=64, typed=True)
def checked_options(*plain: object) -> Options:
    """Returns the checked options of ``PLAIN``."""
    return check_options(Options.of(dict(zip(PLAIN, plain, strict=True))))


# Plans of calls that differ from an earlier one in the batch and the lengths alone, without its checks. A decoding loop
# has new lengths with every token, so this decides how long a step takes on the host.


class _Family:
    """Calls that differ in the batch and the lengths alone.

    Attributes:
        known: the spec of the first call, the target, and the names of the requested backends; None before that call.
        claimed: see ``choose``; for the target, and for the target without cuDNN.
    """

    def __init__(self) -> None:
        self.known: tuple[AttentionSpec, Target, tuple[str, ...] | None] | None = None
        self.claimed: tuple[dict[str, bool], dict[str, bool]] = ({}, {})


@from_records(maxsize=1024)
def _family(*what_calls_share: object) -> _Family:
    return _Family()


def plan_by_family(
    metadata: Inputs,
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
) -> Plan:
    """Plans a call as ``plan.plan`` does. If only its sizes are new, most checks are skipped.

    Args:
        metadata: as ``plan.plan`` takes it; only q, k, v, the mask and the bias are there.
        options: checked.
    """
    q, k, v, mask, bias, *_ = metadata
    sizes = _sizes((q[0], k[0], v[0]), mask, bias)
    if sizes is None:
        return plan.plan(metadata, options, needs_backward, bias_gradient, requested)
    batch, q_len, kv_len, mask_axes, bias_axes = sizes
    # Before the key, because the window may hide keys of one call of a family and none of another one.
    options = without_idle_sides(options, q_len, kv_len)
    tables = mask and (mask_axes, *mask[1:]), bias and (bias_axes, *bias[1:])
    family = _family(
        (q[0][2], q[0][3], k[0][2], k[0][3], v[0][2], v[0][3], q_len == kv_len, *tables),
        (q[1], k[1], v[1], q[2], k[2], v[2], needs_backward, bias_gradient, requested),
        options,  # checked, so those that are equal mean the same, whatever their type
    )
    if family.known is not None:
        first, target, names = family.known
        spec = first.with_lengths(batch, q_len, kv_len, mask and mask[0], bias and bias[0])
        limited = target if names else plan.without_more_plans(target, spec)
        choice = choose(spec, limited, names, family.claimed[limited is not target])
        if choice is not None:
            name, candidates = choice
            if names is None:
                plan.note_plan_of(spec, name, target.kind)
            new_plans.planned(spec, target, names, name, new_plans.is_fallback(candidates, name, target, names))
            return plan.plan_on(name, spec, target, q[2], mask, bias, False)
    result = plan.plan(metadata, options, needs_backward, bias_gradient, requested)
    family.known = (result.spec, Target.here("torch", plan.device_name(q[2])), requested_names(requested))
    return result


def _sizes(
    shapes: tuple[torch.Size, ...], mask: Metadata | None, bias: Metadata | None
) -> tuple[int, int, int, tuple[bool, ...] | None, tuple[bool, ...] | None] | None:
    """Returns batch, q_len, kv_len, and which axes of mask and bias have size 1; None if the shapes do not fit.

    A call that it accepts is valid if an earlier call with the same widths and the same such axes was.
    """
    q, k, v = shapes
    if not (len(q) == len(k) == len(v) == 4):
        return None
    batch, q_len, heads, _ = q
    kv_len = k[1]
    if not (batch and q_len and kv_len):
        return None
    if not (batch == k[0] == v[0] and kv_len == v[1]):
        return None
    axes: list[Any] = []
    for table in (mask, bias):
        if table is None:
            axes.append(None)
            continue
        shape = table[0]
        if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, (batch, heads, q_len, kv_len), strict=True)):
            return None
        axes.append(tuple([n == 1 for n in shape]))
    return batch, q_len, kv_len, axes[0], axes[1]
