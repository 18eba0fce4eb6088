"""The autograd function of eager calls, and where a backward may not go to its kernel as it is."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.tensors import Gradients, Inputs
from torch_frontend.dispatch import autocast
from torch_frontend.dispatch.plan import Plan, gradients_in_order, run_backward, run_forward
from torch_frontend.dispatch.second_derivative import once_differentiable

Tensor = torch.Tensor


class Attention(torch.autograd.Function):
    """A planned call with its backend's own backward. Arguments: the plan, then the fields of ``Inputs``."""

    @staticmethod
    def forward(ctx: Any, made: Plan, *tensors: Tensor | None) -> Any:
        if len(tensors) == 3:  # q, k, v alone: nothing to reshape
            out, lse = made.forward(made.spec, Inputs(*tensors))
        else:
            out, lse = run_forward(made, Inputs(*tensors))
        ctx.made = made
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if made.spec.return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        made, inputs = ctx.made, Inputs(*tensors)
        if not is_everyday(dout, dlse):
            return None, *gradients_in_order(guarded_backward(made, inputs, out, lse, dout, dlse), len(tensors))
        if len(tensors) == 3 and dout is not None:
            return (None, *made.backward(made.spec, inputs, out, lse, dout, dlse)[:3])
        return None, *gradients_in_order(run_backward(made, inputs, out, lse, dout, dlse), len(tensors))


def is_everyday(dout: Tensor | None, dlse: Tensor | None) -> bool:
    """Whether a backward may go to its kernel as it is: autocast is off, and no vmap is at work.

    Raises:
        RuntimeError: for ``is_grads_batched`` and ``vectorize``, which map in torch's older way.
    """
    for gradient in (dout, dlse):
        if gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
            raise RuntimeError(
                "attention has no batched gradients by is_grads_batched=True or vectorize=True: take "
                "torch.func.jacrev, or torch.func.vmap of a function that calls torch.autograd.grad"
            )
    return not (autocast.is_on() or is_mapped())


is_mapped = torch._C._are_functorch_transforms_active
"""Whether ``vmap`` sees what runs now, inside a backward."""


def guarded_backward(
    made: Plan, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """``run_backward`` for where ``is_everyday`` says no."""
    if is_mapped():
        from torch_frontend.dispatch import ops

        return ops.mapped_gradients(made, inputs, out, lse, dout, dlse)
    with autocast.switched_off(out.device):
        return run_backward(made, inputs, out, lse, dout, dlse)
