"""Plans calls that differ from an earlier one in the batch and the lengths alone, without its checks.

A decoding loop has new lengths with every token, so this decides how long a step takes on the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from attn_core.call.masks import without_idle_sides
from attn_core.call.options import Options, requested_names
from attn_core.call.spec import AttentionSpec
from attn_core.selection import Target, choose, new_plans
from torch_frontend.dispatch import cudnn_plans
from torch_frontend.dispatch.plan import Metadata, Plan, device_name, plan, plan_on


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


def plan_by_family(
    metadata: tuple[Metadata | None, ...],
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
) -> Plan:
    """Plans a call as ``plan.plan`` does. If only its sizes are new, most checks are skipped.

    Args:
        metadata: of the fields of ``arguments.Arrays``; only q, k, v, the mask and the bias are there.
        options: checked.
    """
    q, k, v, mask, bias = metadata[:5]
    assert q is not None and k is not None and v is not None
    sizes = _sizes((q[0], k[0], v[0]), mask, bias)
    if sizes is None:
        return plan(metadata, options, needs_backward, bias_gradient, requested)
    batch, q_len, kv_len, mask_axes, bias_axes = sizes
    # Before the key, because the window may hide keys of one call of a family and none of another one.
    options = without_idle_sides(options, q_len, kv_len)
    tables = mask and (mask_axes, *mask[1:]), bias and (bias_axes, *bias[1:])
    family = _family(
        (q[0][2:], k[0][2:], v[0][2:], q_len == kv_len, *tables),
        (q[1], k[1], v[1], q[2], k[2], v[2], needs_backward, bias_gradient, requested),
        options,  # checked, so those that are equal mean the same, whatever their type
    )
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
            return plan_on(name, spec, target, q[2], mask, bias, False)
    result = plan(metadata, options, needs_backward, bias_gradient, requested)
    family.known = (result.spec, Target.here("torch", device_name(q[2])), requested_names(requested))
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
