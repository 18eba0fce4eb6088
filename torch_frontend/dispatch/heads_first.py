"""Calls with tensors ``[batch, heads, len, head_dim]``, the layout of torch's own attention.

torch's CPU kernel has that layout, too. ``attention`` would make seven views around it, and autograd a node for each.
So plain eager calls on the CPU go straight to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from attn_core.call import checks, counters, ranges
from attn_core.call.layouts import check_layout
from attn_core.call.options import is_plain_window
from attn_core.selection import override
from torch_frontend.dispatch import autocast, sdpa_flags, transforms
from torch_frontend.dispatch.plan import Plan, check_tensor
from torch_frontend.dispatch.plan_cache import dense_plan, fast_plan
from torch_frontend.dispatch.ranges import in_ranges
from torch_frontend.dispatch.run_plan import note_failure
from torch_frontend.dispatch.tensor_kinds import are_jit_traces_active, are_modes_active

Tensor = torch.Tensor
_is_compiling, _is_grad_enabled, _requested = torch.compiler.is_compiling, torch.is_grad_enabled, override.requested
_is_autocast_on, _is_transformed, _modes, _traces, _checks, _ranges = (
    *(autocast.is_on, transforms.are_active, are_modes_active, are_jit_traces_active, checks.enabled, ranges.enabled),
)
_flash_on, _efficient_on, _cudnn_on = sdpa_flags.is_flash_on, sdpa_flags.is_efficient_on, sdpa_flags.is_cudnn_on
_math_on, _others_on = sdpa_flags.is_math_on, sdpa_flags.are_others_on

DIRECT = ("causal", "alignment", "window", "scale", "mask", "bias", "deterministic", "backend", "invariant")
"""The options that ``attend`` takes."""

DEFAULTS: dict[str, Any] = {"softcap": None, "alibi_slopes": None, "sinks": None, "seq_info": None, "dropout_rng": None}
DEFAULTS |= {"dropout": 0.0, "return_lse": False, "return_max_logit": False, "key_ranges": None}
DEFAULTS |= {"mask_mod": None, "score_mod": None, "aux": ()}
"""The other options of ``attention``."""


def attend_in_layout(attention: Callable[..., Any], layout: Any, qkv: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Runs ``attention`` on q, k and v of the layout "bhsd", and returns an output of it.

    Args:
        options: all other arguments of ``attention``, by name.
    """
    check_layout(layout)
    # Every option is in one of the two tables, so a new one cannot be dropped. The types are compared first, because a
    # tensor has no truth value.
    others = [(value, DEFAULTS[name]) for name, value in options.items() if name not in DIRECT]
    if all(type(value) is type(usual) and value == usual for value, usual in others):
        out = attend(*qkv, **{name: options[name] for name in DIRECT})
        if out is not None:
            return out
    results = attention(*all_exchanged(qkv), **options)
    return (exchanged(results[0]), *results[1:]) if isinstance(results, tuple) else exchanged(results)


def all_exchanged(qkv: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns ``exchanged`` of q, k and v. torch has no view of a tensor without its memory, which is named here."""
    try:
        return tuple(map(exchanged, qkv))
    except RuntimeError:
        for name, tensor in zip("qkv", qkv, strict=True):
            check_tensor(name, tensor)
        raise


def exchanged(tensor: Any) -> Any:
    """Returns a view with the axes of the sequence and the heads exchanged; any other value as it is."""
    return tensor.transpose(-3, -2) if isinstance(tensor, Tensor) and tensor.dim() > 2 else tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    deterministic: bool = False,
    backend: Any = None,
    invariant: str | None = None,
) -> Tensor | None:
    """Returns the output ``[batch, heads, q_len, value_dim]``, or None if ``attention`` must run the call or refuse it.

    Args:
        q, k, v: ``[batch, heads, len, dim]``; the others as in ``attention``. mask and bias must have four axes.
    """
    if _is_compiling() or not (type(q) is type(k) is type(v) is Tensor and q.is_cpu):
        return None
    if _is_autocast_on() or _is_transformed() or _modes() or forward_ad._current_level >= 0 or _traces() is not None:
        return None
    if _checks() or not (_flash_on() and _efficient_on() and _cudnn_on() and _math_on() and _others_on()):
        return None
    strided = q.layout is k.layout is v.layout is torch.strided
    if not strided or (window is not None and not is_plain_window(window)):
        return None
    for table in (mask, bias):
        if table is not None and (type(table) is not Tensor or table.layout is not torch.strided or table.dim() != 4):
            return None
    needs_backward, bias_gradient = False, False
    if _is_grad_enabled():
        bias_gradient = bias is not None and bias.requires_grad
        needs_backward = q.requires_grad or k.requires_grad or v.requires_grad or bias_gradient
    requested = _requested() if backend is None else backend
    options = causal, alignment, window, None, scale, 0.0, deterministic, False, invariant
    try:
        operands = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
        tables = None
        if mask is not None or bias is not None:
            tables = tuple([None if each is None else (each.shape, each.dtype, each.device) for each in (mask, bias)])
        run = _kernel(operands, tables, needs_backward, bias_gradient, requested, *options)
        if profiler._is_profiler_enabled or _ranges():
            run = _function(in_ranges(_plan(operands, tables, needs_backward, bias_gradient, requested, *options)))
    except Exception:  # attention raises it again, and names the argument
        return None
    # Errors of the kernel propagate: checkpointing stops a recomputation by one of its own, from a hook.
    try:
        results = None if run is None else run(q, k, v) if tables is None else run(q, k, v, mask, bias)
    except Exception as error:
        note_failure(error, _plan(operands, tables, needs_backward, bias_gradient, requested, *options), q, k, v)
        raise
    return None if results is None else results[0]


@lru_cache(maxsize=4096, typed=True)
def _kernel(*request: Any) -> Callable[..., tuple[Any, Any] | None] | None:
    """Returns the planned backend's function for this layout, or None. The arguments are those of ``_plan``."""
    return _function(_plan(*request))


def _function(call_plan: Plan) -> Callable[..., tuple[Any, Any] | None] | None:
    return getattr(call_plan.shortcut, "heads_first", None)


def _plan(
    operands: tuple[Any, ...],
    tables: tuple[Any, ...] | None,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
    *options: Any,
) -> Plan:
    """Plans a call.

    Args:
        operands: shapes, dtypes and devices of q, k and v. tables: (shape, dtype, device) of the mask and of the bias.
        options: in the order of ``call.options.PLAIN``.
    """
    # [batch, heads, len, dim] -> [batch, len, heads, dim]
    shapes = [torch.Size((batch, length, heads, dim)) for batch, heads, length, dim in operands[:3]]
    dtypes, devices = operands[3:6], operands[6:]
    if tables is None:
        return dense_plan(*shapes, *dtypes, *devices, needs_backward, requested, *options)
    metadata = (*zip(shapes, dtypes, devices, strict=True), *tables, None, None, None, None)
    return fast_plan(metadata, needs_backward, bias_gradient, requested, None, None, *options)


counters.watch("torch", _kernel)
