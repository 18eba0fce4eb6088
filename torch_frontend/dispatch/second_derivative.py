"""A backward without a derivative, which says so wherever one is asked for.

torch's own ``once_differentiable`` leaves what would raise without a way to the inputs: ``torch.autograd.grad`` of some
input then passes it by, and the second derivative lacks a part without a word.
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
    """The backward of an autograd function, whose results depend on what it was given but cannot be differentiated."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # nobody will differentiate this: create_graph is False
            return backward(ctx, *gradients)
        given = [tensor for tensor in (*ctx.saved_tensors, *gradients) if tensor is not None and tensor.requires_grad]
        with torch.no_grad():
            found = backward(ctx, *gradients)
        return tuple(each if each is None else _Found.apply(each, *given) for each in found)

    return run


class _Found(torch.autograd.Function):
    """A gradient, and what it was computed from."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, *given: Tensor) -> Tensor:
        return found

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()
