"""Calls on caches and pages with tensors of training: the results are those of inference, and a backward is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import torch

from attn_core.errors import SpecError
from torch_frontend.dispatch import transforms
from torch_frontend.dispatch.tensor_kinds import is_trained

Tensor = torch.Tensor


def without_gradient(call: Callable[[], Any], **named: Any) -> Any:
    """Returns the tensor or tensors of a call that has no gradient.

    If one of the named tensors requires a gradient, as in a model outside of ``torch.no_grad``, the call runs without
    one, and a backward through its results raises SpecError. No gradient is lost without a word. A transform of
    torch.func computes both at once, so there the call is refused.
    """
    trained = {name: each for name, each in named.items() if isinstance(each, Tensor) and is_trained(each)}
    if not trained:
        return call()
    message = f"{', '.join(trained)}: a cache and pages have no gradient; call the function inside torch.no_grad()"
    if not torch.compiler.is_compiling() and transforms.are_observing():
        raise SpecError(f"{message}, on tensors without tangents")
    with torch.no_grad():
        results = call()
    passed = results if isinstance(results, tuple) else (results,)
    return WithoutGradient.apply(message, next(iter(trained.values())), *passed)


class WithoutGradient(torch.autograd.Function):
    """Passes results on as functions of a tensor, and raises an error in place of its gradient."""

    @staticmethod
    def forward(ctx: Any, message: str, trained: Tensor, *results: Tensor) -> Any:
        ctx.message, ctx.size = message, trained.shape
        ctx.set_materialize_grads(False)
        passed = tuple([each.view_as(each) for each in results])
        return passed if len(passed) > 1 else passed[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        given = next(each for each in gradients if each is not None)
        # An op, because a compiler traces this before anybody asks for a gradient.
        gradient = torch.ops.attn.refused_gradient(given, ctx.size, ctx.message)
        return None, gradient, *(None,) * len(gradients)


def _refuse(_: Tensor, size: Any, message: str) -> Never:
    raise SpecError(message)


_library = torch.library.Library("attn", "FRAGMENT")
_library.define(
    "refused_gradient(Tensor gradient, SymInt[] size, str message) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("refused_gradient", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake(
    "attn::refused_gradient", lambda gradient, size, message: gradient.new_empty(size), lib=_library
)
