"""Runs a planned call: its tensors in the shapes that a backend expects, its results in the caller's."""

from __future__ import annotations

import torch

from attn_core.call import key_ranges as key_ranges_of
from attn_core.call.observe import range_name
from attn_core.call.seq_info import check_cu_seqlens
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.errors import note_call
from torch_frontend.dispatch.plan import Plan, check_tensor

Tensor = torch.Tensor


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
    if dout is None:
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
