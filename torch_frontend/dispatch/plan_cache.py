"""Caches of the plans of eager calls. Their keys are compared on every call, so they are flat and hold no spec.

A call of new sizes takes the checks from an earlier call that differs in nothing else (``_Family``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from attn_core.call import counters
from attn_core.call.masks import without_idle_sides
from attn_core.call.options import PLAIN, Options, check_options, requested_names
from attn_core.call.spec import AttentionSpec
from attn_core.selection import Target, choose, new_plans
from torch_frontend.dispatch import cudnn_plans, tensor_kinds
from torch_frontend.dispatch.plan import Metadata, Plan, device_name, plan, plan_on


@lru_cache(maxsize=4096, typed=True)  # True and 1.0 are not 1
def dense_plan(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    q_device: torch.device,
    k_device: torch.device,
    v_device: torch.device,
    needs_backward: bool,
    requested: str | tuple[str, ...] | None,
    *options: Any,
) -> Plan:
    """Plans a call on q, k and v alone: the path whose overhead matters. ``options`` are those of ``PLAIN``.

    A window must be plain (``is_plain_window``): the cache key has the types of options, not those inside a pair.
    """
    if q_device.type == "meta" or tensor_kinds.are_jit_traces_active() is not None:
        # The caller catches this and takes the general path: the sizes in a trace are tensors, and no cache key.
        raise TypeError("meta tensors and traces have no dense plan")
    new_plans.evicted(dense_plan)
    shapes, dtypes, devices = (q_shape, k_shape, v_shape), (q_dtype, k_dtype, v_dtype), (q_device, k_device, v_device)
    return _plan(shapes, dtypes, devices, None, None, needs_backward, False, requested, options)


@lru_cache(maxsize=4096, typed=True)
def fast_plan(
    metadata: tuple[Metadata | None, ...],
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
    max_len_q: int | None,
    max_len_k: int | None,
    *options: Any,
) -> Plan:
    """Plans a call with a mask, a bias, slopes, sinks or documents, as ``dense_plan`` plans one without them."""
    first = metadata[0]
    assert first is not None
    if first[2].type == "meta" or tensor_kinds.are_jit_traces_active() is not None:
        raise TypeError("meta tensors and traces have no plan in this cache")
    new_plans.evicted(fast_plan)
    checked = checked_options(*options)._replace(max_len_q=max_len_q, max_len_k=max_len_k)
    return plan(metadata, checked, needs_backward, bias_gradient, requested)


@lru_cache(maxsize=4096, typed=True)
def table_plan(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    q_device: torch.device,
    k_device: torch.device,
    v_device: torch.device,
    mask: Metadata | None,
    bias: Metadata | None,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
    *options: Any,
) -> Plan:
    """Plans a call with a mask or a bias alone, as ``fast_plan`` does. A flat key is compared faster."""
    if q_device.type == "meta" or tensor_kinds.are_jit_traces_active() is not None:
        raise TypeError("meta tensors and traces have no plan in this cache")
    new_plans.evicted(table_plan)
    shapes, dtypes, devices = (q_shape, k_shape, v_shape), (q_dtype, k_dtype, v_dtype), (q_device, k_device, v_device)
    return _plan(shapes, dtypes, devices, mask, bias, needs_backward, bias_gradient, requested, options)


class _Family:
    """Calls that differ in the batch and the lengths alone.

    Attributes:
        known: the spec of the first call, the target, and the names of the requested backends; None before that call.
        claimed: see ``choose``; for the target, and for the target without cuDNN.
    """

    def __init__(self) -> None:
        self.known: tuple[AttentionSpec, Target, tuple[str, ...] | None] | None = None
        self.claimed: tuple[dict[str, bool], dict[str, bool]] = ({}, {})


@lru_cache(maxsize=1024)
def _family(*what_calls_share: Any) -> _Family:
    return _Family()


def _plan(
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    mask: Metadata | None,
    bias: Metadata | None,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
    options: tuple[Any, ...],
) -> Plan:
    """Plans a call without slopes, sinks and documents. If only its sizes are new, most checks are skipped.

    A decoding loop has new lengths with every token, so this function decides how long a step takes on the host.
    """
    checked = checked_options(*options)
    sizes = _sizes(shapes, mask, bias)
    if sizes is None:
        qkv = tuple(zip(shapes, dtypes, devices, strict=True))
        return plan((*qkv, mask, bias, *(None,) * 4), checked, needs_backward, bias_gradient, requested)
    batch, q_len, kv_len, mask_axes, bias_axes = sizes
    # Before the key, because the window may hide keys of one call of a family and none of another one.
    checked = without_idle_sides(checked, q_len, kv_len)
    # The options are checked, so those that are equal mean the same, whatever their type.
    shared = (dtypes, devices, needs_backward, bias_gradient, requested, checked)
    tables = (mask and (mask_axes, *mask[1:]), bias and (bias_axes, *bias[1:]))
    family = _family(tuple([shape[2:] for shape in shapes]), q_len == kv_len, tables, shared)
    if family.known is not None:
        first, target, names = family.known
        spec = first.with_lengths(batch, q_len, kv_len, mask and mask[0], bias and bias[0])
        limited = target if names else cudnn_plans.limited(target, spec)
        choice = choose(spec, limited, names, family.claimed[limited is not target])
        if choice is not None:
            name, candidates = choice
            if names is None:
                cudnn_plans.chosen(spec, name)
            new_plans.planned(spec, target, names, name, new_plans.is_fallback(candidates, name, target, names))
            return plan_on(name, spec, target, devices[0], mask, bias, False)
    qkv = tuple(zip(shapes, dtypes, devices, strict=True))
    result = plan((*qkv, mask, bias, *(None,) * 4), checked, needs_backward, bias_gradient, requested)
    family.known = (result.spec, Target.here("torch", device_name(devices[0])), requested_names(requested))
    return result


def _sizes(
    shapes: tuple[torch.Size, ...], mask: Metadata | None, bias: Metadata | None
) -> tuple[int, int, int, Any, Any] | None:
    """Returns batch, q_len, kv_len, and which axes of mask and bias have size 1; None if the shapes do not fit.

    A call that it accepts is valid if an earlier call with the same widths and the same such axes was.
    """
    q, k, v = shapes
    if not (len(q) == len(k) == len(v) == 4):
        return None
    batch, q_len, heads, _ = q
    kv_len = k[1]
    if not (type(batch) is type(q_len) is type(kv_len) is int and batch and q_len and kv_len):
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


@lru_cache(maxsize=1024, typed=True)  # typed, because causal=1 is an error, and causal=True is not
def checked_options(*options: Any) -> Options:
    """Returns the checked options of ``PLAIN``."""
    return check_options(Options(**dict(zip(PLAIN, options, strict=True))))


counters.watch("torch", dense_plan, fast_plan, table_plan)
