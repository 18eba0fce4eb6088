"""A ``once_differentiable`` that raises for every second derivative.

torch's own version connects the gradients to no input. ``torch.autograd.grad`` of a sum then skips them without an
error, and the second derivative lacks that term.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from attn_core.backends.shared.autograd import refuse_second_derivative

Tensor = torch.Tensor
Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Wraps an autograd function's backward: its gradients stay connected to its inputs and raise if differentiated."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # create_graph is False, so the gradients are not differentiated
            return backward(ctx, *gradients)
        # The gradients depend on each of these, so each of them must lead to the error.
        inputs = [tensor for tensor in (*ctx.saved_tensors, *gradients) if tensor is not None and tensor.requires_grad]
        # Autograd would otherwise record backwards that consist of torch operations, and differentiate these.
        with torch.no_grad():
            results = backward(ctx, *gradients)
        return tuple(each if each is None else _Gradient.apply(each, *inputs) for each in results)

    return run


class _Gradient(torch.autograd.Function):
    """Connects a gradient to the tensors that it was computed from; its own backward raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()
