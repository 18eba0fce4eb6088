"""Runs a planned call: its tensors in the shapes that a backend expects, its results in the caller's.

For a row that sees no key, backends return a log-sum-exp of -inf with or without sinks, because their backwards
recognise the row by that and ignore its dout. The caller gets the sink, the only term of such a row's sum: torch
operations after the kernel put it there, so that autograd computes its gradient.

If somebody profiles, the plan's functions run inside ranges: the same functions in the same order, so that a profile
shows what really happens.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch
from torch.autograd import profiler

from attn_core.backends.shared.torch_ranges import Range, in_range
from attn_core.call import key_ranges as key_ranges_of
from attn_core.call.observe import range_name, ranges_enabled
from attn_core.call.seq_info import SeqInfo, SeqInfoLike, check_cu_seqlens
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.errors import note_call
from torch_frontend.dispatch.plan import Plan, Results, Shortcut, check_tensor

Tensor = torch.Tensor


def finish_results(results: Results, inputs: Inputs, seq_info: SeqInfoLike) -> Results:
    """Returns a call's results, ``(out, lse)`` or the output alone, with the sinks of rows that see no key in lse.

    Args:
        results: ``(out, lse)``, or the output alone.
        inputs: their offsets may be completed; the documents of ``seq_info`` come first.
        seq_info: the documents as the caller passed them.
    """
    if inputs.sinks is None or not isinstance(results, tuple):
        return results
    info = SeqInfo.coerce(seq_info)
    # The offsets may have documents for trailing tokens at the end; those rows keep -inf.
    end = None if info is None else inputs.cu_seqlens_q[info.cu_seqlens_q.shape[0] - 1]
    return results[0], fill_with_sinks(results[1], inputs.sinks, end)


def fill_with_sinks(lse: Tensor, sinks: Tensor, end: int | Tensor | None = None) -> Tensor:
    """Returns the log-sum-exp ``[..., heads, rows]`` with -inf replaced by the sinks ``[heads]``.

    Args:
        end: the number of rows that belong to a document, an int or a tensor; later rows keep -inf. None: all rows.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    # A row also has -inf if its sink is -inf. The sink must not get a gradient there.
    alone = (lse == -torch.inf) & (sinks != -torch.inf)
    if end is not None:
        alone = alone & (torch.arange(lse.shape[-1], device=lse.device) < end)
    return torch.where(alone, sinks, lse)


def check_offsets(spec: AttentionSpec, inputs: Inputs) -> None:
    """Checks the values of a packed call's offsets on the CPU; reading them on a GPU would wait for it."""
    if spec.packed and inputs.q.device.type == "cpu":
        check_cu_seqlens(inputs.cu_seqlens_q.numpy(), spec.max_len_q or 0, side="q", tokens=spec.q_len)
        check_cu_seqlens(inputs.cu_seqlens_k.numpy(), spec.max_len_k or 0, side="k", tokens=spec.kv_len)


def check_key_ranges(spec: AttentionSpec, key_ranges: Tensor | None) -> None:
    """Checks the values of key ranges on the CPU; on a GPU wrong ones only hide keys."""
    if key_ranges is not None and key_ranges.is_cpu:
        key_ranges_of.check_values(key_ranges.numpy(), spec.q_len)


def check_host_values(spec: AttentionSpec, inputs: Inputs) -> None:
    """Checks the values of offsets and key ranges that are on the host."""
    check_offsets(spec, inputs)
    check_key_ranges(spec, inputs.key_ranges)


def run_forward(call_plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Runs a plan's forward and returns (out, lse); out has q's rank."""
    try:
        out, lse = call_plan.forward(call_plan.spec, as_backends_take(inputs, call_plan.one_row))
    except Exception as error:
        note_plan(error, call_plan, "forward")
        raise
    return (out[None] if call_plan.one_row else out), lse


def run_backward(
    call_plan: Plan,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    into: Gradients | None = None,
) -> Gradients:
    """Runs a plan's backward and returns the gradients in the shapes of its inputs.

    ``into`` holds buffers for dq, dk and dv. A backend that cannot use a buffer returns another tensor instead.
    """
    if dout is None:  # only the log-sum-exp has a gradient, and kernels read a dout in any case
        dout = torch.zeros_like(out)
    if call_plan.one_row:
        out, dout = out[0], dout[0]
        into = into and into._replace(dq=into.dq[0], dk=into.dk[0], dv=into.dv[0])
    buffers = {"into": into} if into is not None and call_plan.writes_into else {}
    operands = as_backends_take(inputs, call_plan.one_row)
    try:
        gradients = call_plan.backward(call_plan.spec, operands, out, lse, dout, dlse, **buffers)
    except Exception as error:
        note_plan(error, call_plan, "backward")
        raise
    if call_plan.one_row:
        gradients = gradients._replace(dq=gradients.dq[None], dk=gradients.dk[None], dv=gradients.dv[None])
    if gradients.dbias is not None:
        gradients = gradients._replace(dbias=gradients.dbias.reshape(inputs.bias.shape))
    return gradients


def note_failure(error: Exception, call_plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises the error of a tensor that no kernel can read, or notes the plan: kernels name no argument."""
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, tensor)
    note_plan(error, call_plan, "forward")


def note_plan(error: Exception, call_plan: Plan, direction: str) -> None:
    """Adds a note with the backend and the call to an error of its kernel."""
    note_call(error, range_name(call_plan.backend, call_plan.spec, direction))


def as_backends_take(inputs: Inputs, one_row: bool) -> Inputs:
    """Returns the inputs as backends take them: packed rows without the row axis, mask and bias with four axes.

    Args:
        one_row: whether the packed tensors are ``[1, tokens, ...]``.
    """
    if one_row:  # [1, tokens, heads, dim] -> [tokens, heads, dim]
        inputs = inputs._replace(q=inputs.q[0], k=inputs.k[0], v=inputs.v[0])
    if inputs.mask is not None and inputs.mask.dim() < 4:
        inputs = inputs._replace(mask=with_four_axes(inputs.mask))
    if inputs.bias is not None and inputs.bias.dim() < 4:
        inputs = inputs._replace(bias=with_four_axes(inputs.bias))
    return inputs


def with_four_axes(table: Tensor) -> Tensor:
    """Returns a mask or a bias with leading axes of size 1 until it has four axes."""
    return table[(None,) * (4 - table.dim())] if table.dim() < 4 else table


def gradients_in_order(gradients: Gradients, count: int) -> tuple[Tensor | None, ...]:
    """Returns gradients in the order of the first ``count`` fields of ``Inputs``: q, k, v, mask, bias, ..."""
    # Inputs: q, k, v, mask, bias, alibi_slopes, sinks, both cu_seqlens, key_ranges, the aux arrays, rng.
    dq, dk, dv, dbias, dsinks, *daux = gradients
    return (dq, dk, dv, None, dbias, None, dsinks, None, None, None, *daux, None)[:count]


def in_ranges(call_plan: Plan) -> Plan:
    """Returns the plan with its functions in ranges if somebody listens, else the plan itself.

    The callers on the fast path repeat the condition, because a function call costs more than both of its reads.
    """
    if profiler._is_profiler_enabled or ranges_enabled():
        return _wrapped(call_plan, ranges_enabled())
    return call_plan


# NVTX is decided in the forward, because the backward may run on a thread of autograd, which has another
# context.
@lru_cache(maxsize=4096)
def _wrapped(call_plan: Plan, nvtx: bool) -> Plan:
    spec, backend = call_plan.spec, call_plan.backend
    if spec.empty:  # runs no kernel
        return call_plan
    names = range_name(backend, spec, "forward"), range_name(backend, spec, "backward")
    forward, backward = in_range(call_plan.forward, names[0], nvtx), in_range(call_plan.backward, names[1], nvtx)
    shortcut = _shortcut_in_ranges(call_plan.shortcut, *names, nvtx)
    return call_plan._replace(forward=forward, backward=backward, shortcut=shortcut)


def _shortcut_in_ranges(shortcut: Shortcut | None, forward: str, backward: str, nvtx: bool) -> Shortcut | None:
    """Wraps a backend's shortcut, and the same function for heads-first tensors: torch runs its backward by itself."""
    if shortcut is None:
        return None

    def run(*tensors: Tensor | None) -> tuple[Tensor, Tensor] | None:
        with Range(forward, nvtx):
            results = shortcut(*tensors)
        if results is not None:
            _mark_backward(results[0], backward, nvtx)
        return results

    heads_first = getattr(shortcut, "heads_first", None)
    if heads_first is not None:
        run.heads_first = _shortcut_in_ranges(heads_first, forward, backward, nvtx)  # type: ignore[attr-defined]
    return run


def _mark_backward(out: Tensor, name: str, nvtx: bool) -> None:
    """Puts the backward that torch recorded for a kernel's output in a range."""
    node = out.grad_fn
    # Views of the kernel's output have one input, the kernel has q, k and v.
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    if node is not None:
        node.register_prehook(lambda _: _switch_to(Range(name, nvtx)))
        node.register_hook(lambda *_: _switch_to(None))


_running = threading.local()


def _switch_to(following: Range | None) -> None:
    """Ends the range of this thread's backward kernel, if there is one, and starts the following one.

    Torch calls no hook after a kernel that raised. Its range then ends when the next one starts.
    """
    before = getattr(_running, "range", None)
    _running.range = None
    if before is not None:
        before.stop()
    if following is not None:
        following.start()
        _running.range = following
