"""Calls on caches and pages with tensors of training: the results are those of inference, and a backward is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_core.errors import SpecError
from torch_frontend.dispatch.second_derivative import once_differentiable

Tensor = torch.Tensor


def without_gradient(call: Callable[[], Any], *tensors: Any) -> Any:
    """Returns the tensor or tensors of a call that has no gradient.

    If one of ``tensors`` requires a gradient, as in a model outside of ``torch.no_grad``, the call runs without one,
    and a backward through its results raises SpecError. No gradient is lost without a word.
    """
    trains = torch.is_grad_enabled() and any([isinstance(each, Tensor) and each.requires_grad for each in tensors])
    if not trains or torch.compiler.is_compiling():
        return call()
    with torch.no_grad():
        results = call()
    if not isinstance(results, tuple):
        return WithoutGradient.apply(tensors[0], results)
    return WithoutGradient.apply(tensors[0], *results)


class WithoutGradient(torch.autograd.Function):
    """Passes results on as functions of q, and raises an error in place of a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *results: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        passed = tuple([each.view_as(each) for each in results])
        return passed if len(passed) > 1 else passed[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise SpecError("q: a cache and pages have no gradient; call the function inside torch.no_grad()")
