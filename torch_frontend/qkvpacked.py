"""attention_qkvpacked: attention of q, k and v in one tensor, as one projection writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import torch

from attn_core.call.arguments import check_qkv_as_one
from attn_core.call.functions import are_given
from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import QkvPackedKeywords
from attn_core.call.options import PLAIN, Door, is_plain_window, names_at, requested_names
from attn_core.call.segments import Segments
from attn_core.call.tensors import Gradients, Inputs
from attn_core.selection import override
from torch_frontend.attention import attention
from torch_frontend.dispatch import autocast, autograd, plan, run_plan, sdpa_flags, transforms
from torch_frontend.dispatch.autograd import once_differentiable
from torch_frontend.dispatch.eager_calls import checked_options
from torch_frontend.dispatch.general_calls import gather_arguments
from torch_frontend.dispatch.mask_objects import is_object
from torch_frontend.dispatch.plan import Results
from torch_frontend.dispatch.prepared import Prepared, Request, find
from torch_frontend.dispatch.run_plan import in_ranges
from torch_frontend.dispatch.tensor_kinds import is_watched
from torch_frontend.dispatch.value_checks import in_checks

Tensor = torch.Tensor
Keywords = QkvPackedKeywords[Tensor, torch.Generator]

_shared = SharedOptions(attention, names_at(Door.QKVPACKED))
_ALONE = ("seq_info", "dropout_rng", "key_ranges", "mask_mod", "score_mod", *Segments._fields)
"""Options that the general path alone takes."""


@overload
def attention_qkvpacked(qkv: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Keywords]) -> Tensor: ...
@overload
def attention_qkvpacked(
    qkv: Tensor, *, return_lse: Literal[True], **options: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_qkvpacked(
    qkv: Tensor, *, return_lse: bool, **options: Unpack[Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
@_shared
def attention_qkvpacked(
    qkv: Tensor, *, return_lse: bool = False, **options: Unpack[Keywords]
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes ``attention`` of views of one tensor; the backward writes its gradient without a concatenation.

    With key_ranges, functions and segment ids, the gradient is concatenated.

    Args:
        qkv: ``[batch, seq, 3, heads, head_dim]``; packed ``[tokens, 3, heads, head_dim]``, alone or as one row
            ``[1, ...]``. There are as many kv heads as query heads.

    The other arguments, the result and the errors are those of ``attention``.
    """
    said = _shared.complete(attention_qkvpacked, {**options, "return_lse": return_lse})
    trains = torch.is_grad_enabled() and isinstance(qkv, Tensor) and qkv.requires_grad
    train = _repeated_training(qkv, said) if trains else None
    if train is not None:
        return train(qkv, said["mask"], said["bias"], said["alibi_slopes"], said["sinks"])
    plan.check_tensor("qkv", qkv)
    rows = qkv.select(-3, 0) if is_object(said["mask"], said["bias"]) and qkv.dim() > 3 else qkv
    said = plan.without_mask_object(rows, rows, said)
    seq_info, backend, bias = said["seq_info"], said["backend"], said["bias"]
    check_qkv_as_one(plan.facts(qkv.shape, qkv.dtype, qkv.device), seq_info is not None)
    in_parts = any([said[name] is not None for name in ("key_ranges", *Segments._fields)])
    if in_parts or are_given((said["mask_mod"], said["score_mod"], said["aux"])):
        return attention(*qkv.unbind(-3), **said)
    (qkv,) = autocast.in_autocast(qkv)
    if not trains or torch.compiler.is_compiling() or transforms.are_observing() or is_watched(qkv):
        return attention(*qkv.unbind(-3), **said)
    # Detached views serve the checks and the plan. QkvAttention takes qkv itself and returns one gradient for it.
    q, k, v = qkv.detach().unbind(-3)
    inputs, plain = gather_arguments(q, k, v, said)
    bias_gradient = bias is not None and bias.requires_grad
    requested = requested_names(backend) or override.requested()
    entries = plan.metadata(inputs)
    call_plan = in_checks(in_ranges(plan.plan(entries, plain, True, bias_gradient, requested, sdpa_flags.now())))
    run_plan.check_offsets(call_plan.spec, inputs)
    with autocast.switched_off(qkv.device):
        results = QkvAttention.apply(call_plan, qkv, *inputs[3:])
    return run_plan.finish_results(results, inputs, seq_info)


def _repeated_training(qkv: Tensor, said: dict[str, Any]) -> Callable[..., Results] | None:
    """Returns what runs a call with gradients that is like an earlier one, on qkv and the tables; else None."""
    aux, window = said["aux"], said["window"]
    if any([said[name] is not None for name in _ALONE]) or type(aux) is not tuple or aux:
        return None
    if type(window) is tuple and not is_plain_window(window):
        return None
    tables = said["mask"], said["bias"], said["alibi_slopes"], said["sinks"]
    return find(_prepare_training, qkv, qkv, qkv, tables, tuple([said[name] for name in PLAIN]), said["backend"])


def _prepare_training(request: Request) -> Prepared | None:
    """Prepares a call whose qkv autograd records. ``run`` takes qkv and the tables: mask, bias, slopes and sinks."""
    qkv, _, _, *tables = request.entries
    options = checked_options(*request.options)
    if request.trains or options.dropout or request.learns("alibi_slopes"):  # slopes with a gradient are an error
        return None
    assert qkv is not None
    check_qkv_as_one(plan.facts(*qkv), False)
    shape, dtype, device = qkv
    part = torch.Size((*shape[:-3], *shape[-2:])), dtype, device
    entries = Inputs(part, part, part, *tables)
    call_plan = plan.plan(entries, options, True, request.learns("bias"), request.requested)
    absent = (None,) * (len(Inputs._fields) - 7)

    def build(call_plan: plan.Plan) -> Callable[..., Results]:
        def run(qkv: Tensor, *tables: Tensor | None) -> Results:
            results = QkvAttention.apply(call_plan, qkv, *tables, *absent)
            return run_plan.finish_results(results, Inputs(qkv, qkv, qkv, *tables), None)

        return run

    return Prepared(build(call_plan), lambda: build(in_ranges(call_plan)), "all" if device.type == "cpu" else None)


class QkvAttention(torch.autograd.Function):
    """``autograd.AttentionFunction`` with q, k and v in one tensor.

    Arguments: the plan, qkv, then the fields of ``Inputs`` from mask on.
    """

    @staticmethod
    def forward(ctx: Any, call_plan: plan.Plan, qkv: Tensor, *rest: Tensor | None) -> Results:
        out, lse = run_plan.run_forward(call_plan, Inputs(*qkv.unbind(-3), *rest))
        ctx.plan = call_plan
        ctx.save_for_backward(qkv, *rest, out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if call_plan.spec.return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        qkv, *rest, out, lse = ctx.saved_tensors
        inputs = Inputs(*qkv.unbind(-3), *rest)
        if not autograd.is_direct(dout, dlse):
            gradients = autograd.guarded_backward(ctx.plan, inputs, out, lse, dout, dlse)
            return None, torch.stack(gradients[:3], -3), *run_plan.gradients_in_order(gradients, len(inputs))[3:]
        dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)  # the kernel writes dq, dk, dv into views
        places = Gradients(*dqkv.unbind(-3))
        gradients = run_plan.run_backward(ctx.plan, inputs, out, lse, dout, dlse, into=places)
        for place, gradient in zip(places[:3], gradients[:3], strict=True):
            if gradient is not place and gradient.data_ptr() != place.data_ptr():  # the kernel did not write into it
                place.copy_(gradient)
        return None, dqkv, *run_plan.gradients_in_order(gradients, len(inputs))[3:]
