"""Runs a call under torch.func's transforms: ``vmap``, ``grad``, ``vjp``, ``jvp`` and their combinations.

Eager calls use a plan's autograd function in its shortest form, which transforms do not support. Under a transform a
call uses the autograd functions below, which have a rule for each transform and end in the ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from attn_core.call.tensors import Inputs
from torch_frontend.dispatch import autograd, forward_mode, ops
from torch_frontend.dispatch import vmap as vmap_rules
from torch_frontend.dispatch.after_import import after_import
from torch_frontend.dispatch.op_arguments import OpOptions, from_call, tensors_of, to_call
from torch_frontend.dispatch.tensor_kinds import is_watched, needs_gradient

Tensor = torch.Tensor
are_active = torch._C._are_functorch_transforms_active
"""Returns whether a transform of torch.func is active."""


def are_observing() -> bool:
    """Returns whether a transform of torch.func or forward-mode differentiation observes this call."""
    return are_active() or forward_ad._current_level >= 0


def is_one_op(q: Tensor) -> bool:
    """Returns whether a call on q must be one op, because a compiler, a transform, a mode or a trace observes it."""
    return torch.compiler.is_compiling() or are_observing() or is_watched(q)


def traced(inputs: Inputs, how: OpOptions) -> tuple[Tensor, Tensor]:
    """Returns (out, lse), as ``ops.traced`` does."""
    return _in_graph(*to_call(inputs, how))


def _in_graph(*call: object) -> tuple[Tensor, Tensor]:
    """Runs the op ``attn::forward`` under torch.func's transforms, with the gradients that they will ask for."""
    inputs, how = from_call(call)
    # A transform's gradient is invisible in requires_grad of the innermost tensor, so look through all levels.
    recorded = torch.is_grad_enabled()
    bias = recorded and inputs.bias is not None and needs_gradient(inputs.bias)
    sinks = inputs.sinks is not None and needs_gradient(inputs.sinks)
    arrays = autograd.arrays_with_gradient(inputs, how.options.score_mod, needs_gradient) if recorded else ()
    needs = bias or bool(arrays) or (recorded and (sinks or any(needs_gradient(tensor) for tensor in inputs[:3])))
    options = how.options._replace(aux_gradients=arrays)
    out, lse, _ = _Forward.apply(*to_call(inputs, OpOptions(options, needs, bias, how.backend)))
    return out, lse


# Dynamo cannot trace autograd functions with a vmap rule; they end in ops. allow_in_graph itself would import Dynamo.
after_import("torch._dynamo", lambda: torch.compiler.allow_in_graph(_in_graph))


class _Forward(torch.autograd.Function):
    """``attn::forward`` with a rule for every transform; same arguments and results."""

    @staticmethod
    def forward(*call: object) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.attn.forward(*call)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        # The third result is the index of the backend, an integer.
        ctx.mark_non_differentiable(output[2])
        ops.save(ctx, inputs, output)
        ctx.save_for_forward(*tensors_of(inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Not the op itself, because an outer transform needs the rules of an autograd function.
        return ops.differentiate(ctx, *gradients, applied=ops.undifferentiated)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *call: Any) -> vmap_rules.MappedResults:
        return vmap_rules.rule(ops.FORWARD, _Forward.apply, info, in_dims, *call)

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor | None) -> tuple[Tensor, Tensor, None]:
        return *forward_mode.run(tensors_of(ctx.saved_tensors), ctx.how, moved), None
