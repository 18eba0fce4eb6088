"""Eager calls with a mask, a bias, slopes, sinks or documents: one lookup by metadata instead of many checks.

The checks that depend on metadata alone run once per plan. Types, ``requires_grad`` and values are checked on every
call. Whatever this path does not know, it leaves to the general one, which accepts it or names it in an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd import profiler

from attn_core.call import ranges
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Inputs
from attn_core.selection import override
from torch_frontend.dispatch import autograd, empty_rows, in_parts, offsets, tensor_kinds
from torch_frontend.dispatch.plan_cache import fast_plan, table_plan
from torch_frontend.dispatch.ranges import in_ranges
from torch_frontend.dispatch.run_plan import check_offsets, note_failure, run_forward, run_shortcut

Tensor = torch.Tensor
_fits = tensor_kinds.fits_its_storage
_KINDS = frozenset((Tensor, torch.nn.Parameter))
_STRIDED, _is_grad_enabled, _requested, _ranges = (
    torch.strided,
    torch.is_grad_enabled,
    override.requested,
    ranges.enabled,
)


def attend(  # noqa: C901
    q: Tensor, k: Tensor, v: Tensor, extras: tuple[Any, ...], seq_info: Any, backend: Any, options: tuple[Any, ...]
) -> Any:
    """Returns out or (out, lse), as ``attention`` does; None if the general path must run the call.

    Args:
        q, k, v: plain tensors of a call that nothing observes.
        extras: mask, bias, slopes and sinks as the caller passed them.
        options: in the order of ``call.options.PLAIN``; the window is plain.
    """
    for tensor in (q, k, v, *extras):
        if tensor is not None and (type(tensor) not in _KINDS or tensor.layout is not _STRIDED or tensor.is_nested):
            return None
    mask, bias, slopes, sinks = extras
    inputs = Inputs(q, k, v, mask, bias, slopes, sinks)
    longest: tuple[int | None, int | None] = (None, None)
    if seq_info is not None:
        packed = _with_documents(inputs, seq_info)
        if packed is None:
            return None
        inputs, longest = packed
    needs_backward, bias_gradient = _is_grad_enabled(), False
    if needs_backward:
        if slopes is not None and slopes.requires_grad:
            return None
        bias_gradient = bias is not None and bias.requires_grad
        needs_backward = q.requires_grad or k.requires_grad or v.requires_grad or bias_gradient
        needs_backward = needs_backward or (sinks is not None and sinks.requires_grad)
    try:
        if q.is_cpu:
            for tensor in (q, k, v, *extras):  # the storage, because torch's kernels read beyond it without a word
                if tensor is None:
                    continue
                if tensor.untyped_storage().nbytes() < tensor.nbytes and not _fits(tensor):
                    return None
                if torch._is_functional_tensor(tensor):
                    return None
        metadata = tuple([None if each is None else (each.shape, each.dtype, each.device) for each in inputs[:9]])
        requested = _requested() if backend is None else backend
        call_plan = fast_plan(metadata, needs_backward, bias_gradient, requested, *longest, *options)
    except Exception:  # the general path raises the error again, or the one that comes before it
        return None
    if profiler._is_profiler_enabled or _ranges():
        call_plan = in_ranges(call_plan)
    if seq_info is not None:
        check_offsets(call_plan.spec, inputs)
    results = run_shortcut(call_plan, inputs)
    if results is None:
        if needs_backward:
            results = autograd.AttentionFunction.apply(call_plan, *inputs)
        else:
            results = run_forward(call_plan, inputs)
    if call_plan.spec.return_lse:
        return empty_rows.finish_results(results, inputs, seq_info)
    return results[0] if type(results) is tuple else results


def attend_with_tables(  # noqa: C901
    q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, backend: Any, options: tuple[Any, ...]
) -> Any:
    """``attend`` for calls with a mask or a bias alone: the lookup of a plain call, with both in its key."""
    if not (q.layout is k.layout is v.layout is _STRIDED):
        return None
    mask_key = bias_key = None
    needs_backward, bias_gradient = _is_grad_enabled(), False
    try:
        if mask is not None:
            if type(mask) not in _KINDS or mask.layout is not _STRIDED:
                return None
            mask_key = (mask.shape, mask.dtype, mask.device)
            if mask.untyped_storage().nbytes() < mask.nbytes and not _fits(mask):
                return None
        if bias is not None:
            if type(bias) not in _KINDS or bias.layout is not _STRIDED:
                return None
            bias_key = (bias.shape, bias.dtype, bias.device)
            if bias.untyped_storage().nbytes() < bias.nbytes and not _fits(bias):
                return None
            bias_gradient = needs_backward and bias.requires_grad
        if needs_backward:
            needs_backward = q.requires_grad or k.requires_grad or v.requires_grad or bias_gradient
        call_plan = table_plan(
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            k.device,
            v.device,
            mask_key,
            bias_key,
            needs_backward,
            bias_gradient,
            _requested() if backend is None else backend,
            *options,
        )
    except Exception:  # a nested tensor has no shape; the general path raises the error again, or an earlier one
        return None
    if profiler._is_profiler_enabled or _ranges():
        call_plan = in_ranges(call_plan)
    shortcut = call_plan.shortcut
    try:
        results = shortcut(q, k, v, mask, bias) if shortcut else None
        if results is None:
            if needs_backward:
                return autograd.AttentionFunction.apply(call_plan, *Inputs(q, k, v, mask, bias))
            results = run_forward(call_plan, Inputs(q, k, v, mask, bias))
    except Exception as error:
        note_failure(error, call_plan, q, k, v)
        raise
    return results if call_plan.spec.return_lse else results[0]


def attend_with_ranges(q: Tensor, k: Tensor, v: Tensor, key_ranges: Any, backend: Any, options: tuple[Any, ...]) -> Any:
    """``attend`` for calls on a GPU with key ranges alone, in numpy or as a tensor."""
    try:
        if not (_is_on_gpu(q) and q.layout is k.layout is v.layout is _STRIDED):
            return None
        if type(key_ranges) is np.ndarray and key_ranges.dtype == np.int32:
            # No copy: what the call keeps of ranges on the host is its own.
            key_ranges = torch.from_numpy(key_ranges if key_ranges.flags.writeable else key_ranges.copy())
        elif type(key_ranges) is not Tensor or key_ranges.layout is not _STRIDED:
            return None
        needs_backward = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        requested = _requested() if backend is None else backend
        call_plan, key_ranges = in_parts.planned(q, k, v, key_ranges, needs_backward, requested, options)
    except Exception:  # the general path raises the error again, or an earlier one
        return None
    if profiler._is_profiler_enabled or _ranges():
        call_plan = in_ranges(call_plan)
    inputs = Inputs(q, k, v, None, None, None, None, None, None, key_ranges)
    if needs_backward:
        return autograd.AttentionFunction.apply(call_plan, *inputs)
    results = run_forward(call_plan, inputs)
    return results if call_plan.spec.return_lse else results[0]


def _is_on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def _with_documents(inputs: Inputs, seq_info: Any) -> tuple[Inputs, offsets.Longest] | None:
    """Returns the inputs with complete offsets, and the longest documents; None for documents that are not valid."""
    q, k = inputs[:2]
    if type(seq_info) is SeqInfo and q.dim() >= 3 and k.dim() >= 3:
        info = seq_info.known_conversion((q.device, q.shape[-3], k.shape[-3]))  # from an earlier call
        if info is not None:
            queries, keys = info.cu_seqlens_q, info.cu_seqlens_k
            return Inputs(*inputs[:7], queries, keys), (info.max_len_q, info.max_len_k)
    try:
        return offsets.attach_complete(SeqInfo.coerce(seq_info), inputs)  # type: ignore[arg-type]
    except Exception:  # the general path raises the error again, or the one that comes before it
        return None
