"""The autograd function of eager calls, and the backward under autocast and vmap."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from attn_core.backends.shared.autograd import refuse_second_derivative, without_gradient
from attn_core.call.functions import aux_of
from attn_core.call.tensors import Gradients, Inputs
from attn_core.expressions.properties import aux_numbers
from attn_core.expressions.tree import Expression
from torch_frontend.dispatch import autocast
from torch_frontend.dispatch.plan import Plan, Results
from torch_frontend.dispatch.run_plan import gradients_in_order, note_failure, note_plan, run_backward, run_forward
from torch_frontend.dispatch.tensor_kinds import are_jit_traces_active

Tensor = torch.Tensor
Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Wraps an autograd function's backward: its gradients stay connected to its inputs and raise if differentiated.

    torch's own version connects them to no input. ``torch.autograd.grad`` of a sum then skips them without an error,
    and the second derivative lacks that term.
    """

    silent = without_gradient(backward)

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # create_graph is False, so the gradients are not differentiated
            return backward(ctx, *gradients)
        # The gradients depend on each of these, so each of them must lead to the error.
        inputs = [tensor for tensor in (*ctx.saved_tensors, *gradients) if tensor is not None and tensor.requires_grad]
        # Autograd would otherwise record backwards that consist of torch operations, and differentiate these.
        results = silent(ctx, *gradients)
        return tuple(each if each is None else _Gradient.apply(each, *inputs) for each in results)

    return run


class _Gradient(torch.autograd.Function):
    """Connects a gradient to the tensors that it was computed from; its own backward raises."""

    @staticmethod
    def forward(ctx: object, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def backward(ctx: object, *_: object) -> None:
        refuse_second_derivative()


class AttentionFunction(torch.autograd.Function):
    """Runs a plan with its backend's own backward. Arguments: the plan, then the fields of ``Inputs``."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor | None) -> Results:
        if len(tensors) == 3:  # q, k, v alone: nothing to reshape
            out, lse = plan.forward(plan.spec, Inputs(*tensors))
        else:
            out, lse = run_forward(plan, Inputs(*tensors))
        ctx.plan = plan
        # Saved by autograd, not on ctx: so an input that is changed in place before the backward is an error.
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)  # None for an unused result's gradient, so the kernel can skip dlse
        return (out, lse) if plan.spec.return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        plan, inputs = ctx.plan, Inputs(*tensors)
        # A backward may run under a vmap or autocast that was not active in the forward, so it checks again.
        if not is_direct(dout, dlse):
            return None, *gradients_in_order(guarded_backward(plan, inputs, out, lse, dout, dlse), len(tensors))
        if len(tensors) == 3 and dout is not None:
            try:
                return (None, *plan.backward(plan.spec, inputs, out, lse, dout, dlse)[:3])
            except Exception as error:
                note_plan(error, plan, "backward")
                raise
        return None, *gradients_in_order(run_backward(plan, inputs, out, lse, dout, dlse), len(tensors))


def run(
    call_plan: Plan,
    records: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *others: Tensor | None,
) -> Results:
    """Runs a plan and returns its results as ``attention`` does, by the backend's shortcut if it has one.

    Args:
        records: whether autograd records the call, if no shortcut runs it.
        others: the fields of ``Inputs`` behind the bias, as far as the call has them. The backward needs the mask, the
            offsets and dropout's words as well.
    """
    shortcut, spec = call_plan.shortcut, call_plan.spec
    try:
        results = None
        if shortcut is not None:
            results = shortcut(q, k, v) if mask is bias is None else shortcut(q, k, v, mask, bias)
        if results is None:
            if records:
                return AttentionFunction.apply(call_plan, q, k, v, mask, bias, *others)
            results = run_forward(call_plan, Inputs(q, k, v, mask, bias, *others))
    except Exception as error:
        note_failure(error, call_plan, q, k, v)
        raise
    return results if spec.return_lse else results[0]


def gradients_needed(inputs: Inputs) -> tuple[bool, bool]:
    """Returns whether autograd may need (any gradient, the bias's gradient) of a call."""
    if are_jit_traces_active() is not None:  # a trace also runs later, with tensors that may require gradients
        return True, inputs.bias is not None
    if not torch.is_grad_enabled():
        return False, False
    bias = inputs.bias is not None and inputs.bias.requires_grad
    sinks = inputs.sinks is not None and inputs.sinks.requires_grad
    others = bias or sinks or (inputs.aux0 is not None and any(array.requires_grad for array in aux_of(inputs)))
    return others or any(tensor.requires_grad for tensor in inputs[:3]), bias


def arrays_with_gradient(
    inputs: Inputs, score_mod: Expression | None, needs_gradient: Callable[[Tensor], bool] | None = None
) -> tuple[int, ...]:
    """Returns the numbers of the aux arrays whose gradient autograd may need: arrays of floats that score_mod reads.

    Args:
        needs_gradient: says it of one array; None: whether it requires a gradient.
    """
    traced = are_jit_traces_active() is not None
    if score_mod is None or not (torch.is_grad_enabled() or traced):
        return ()
    needs = needs_gradient or (lambda array: array.requires_grad)
    # Most arrays are constants, and the walk through the function is left out for them.
    pairs = enumerate(aux_of(inputs))
    numbers = [number for number, array in pairs if array.dtype.is_floating_point and (traced or needs(array))]
    return tuple([number for number in aux_numbers(score_mod) if number in numbers]) if numbers else ()


def is_direct(dout: Tensor | None, dlse: Tensor | None) -> bool:
    """Returns whether a backward can call its kernel directly: autocast is off, and no vmap is active.

    Raises:
        RuntimeError: for ``is_grads_batched`` and ``vectorize``, which use torch's legacy vmap.
    """
    for gradient in (dout, dlse):
        if gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
            raise RuntimeError(
                "attention does not support is_grads_batched=True or vectorize=True: use torch.func.jacrev, or "
                "torch.func.vmap of a function that calls torch.autograd.grad"
            )
    return not (autocast.is_on() or is_mapped())


is_mapped = torch._C._are_functorch_transforms_active
"""Returns whether ``vmap`` is active; called inside a backward."""


def guarded_backward(
    plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """Runs ``run_backward`` if ``is_direct`` is False: through the op's vmap rule, or with autocast off."""
    if is_mapped():
        from torch_frontend.dispatch import ops

        return ops.mapped_gradients(plan, inputs, out, lse, dout, dlse)
    # Autocast would cast the float32 operands of backwards that consist of torch operations.
    with autocast.switched_off(out.device):
        return run_backward(plan, inputs, out, lse, dout, dlse)
