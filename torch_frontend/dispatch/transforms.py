"""A call under torch.func's transforms: ``vmap``, ``grad``, ``vjp``, ``jacrev`` and their combinations.

Eager calls stay away from all this: a plan's autograd function is called in its shortest form, which transforms refuse.
While one is at work the call goes through the functions below, which have a rule for each, and end in the ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from attn_core.backends.shared.autograd import refuse_second_derivative
from attn_core.call.tensors import Inputs
from torch_frontend.dispatch import ops
from torch_frontend.dispatch import vmap as folding
from torch_frontend.dispatch.ops import PlainOptions, from_call
from torch_frontend.dispatch.plain import is_watched

Tensor = torch.Tensor
are_active = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func sees what runs now."""


def at_work() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, sees this call."""
    return are_active() or forward_ad._current_level >= 0


def is_one_op(q: Tensor) -> bool:
    """Whether a call on q is to be one op, because a compiler, a transform, a mode or a trace sees it."""
    return torch.compiler.is_compiling() or at_work() or is_watched(q)


def traced(inputs: Inputs, plain: PlainOptions) -> tuple[Tensor, Tensor]:
    """(out, lse), like ``ops.traced``."""
    return _in_graph(*inputs[: ops.TENSORS], *plain)


@torch.compiler.allow_in_graph  # Dynamo follows no autograd function with rules of its own; what it ends in are ops
def _in_graph(*call: Any) -> tuple[Tensor, Tensor]:
    inputs, plain = from_call(call)
    recorded = torch.is_grad_enabled()
    bias = recorded and inputs.bias is not None and _wants_gradient(inputs.bias)
    sinks = inputs.sinks is not None and _wants_gradient(inputs.sinks)
    needs = bias or (recorded and (sinks or any(_wants_gradient(tensor) for tensor in inputs[:3])))
    out, lse, _ = _Forward.apply(*call[: ops.TENSORS], *plain._replace(needs_backward=needs, bias_gradient=bias))
    return out, lse


def _wants_gradient(tensor: Tensor) -> bool:
    """Whether any level of transforms, or autograd below them, asks for the gradient."""
    while not tensor.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


class _Forward(torch.autograd.Function):
    """``attn::forward``, with its arguments and results."""

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.attn.forward(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ops.save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return ops.differentiate(ctx, *gradients, backward=_Backward.apply)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *call: Any) -> folding.Found:
        return ops.mapped_forward(_Forward.apply, info, in_dims, *call)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "attention has no forward mode in torch (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad): take "
            "reverse mode (torch.func.vjp, jacrev), or jax_frontend.attention with backend='jax_xla'"
        )


class _Backward(torch.autograd.Function):
    """``attn::backward``, with its arguments and results. It has no derivative."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return torch.ops.attn.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> folding.Found:
        return ops.mapped_backward(_Backward.apply, info, in_dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()
