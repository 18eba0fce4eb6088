"""torch's autograd where it is not as callers know it: inside an operator, and around what torch's compiler made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

_KEYS = ("ADInplaceOrView", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
"""What the dispatcher leaves out below autograd."""


@contextmanager
def recording() -> Iterator[None]:
    """A block in which operations are recorded, also in the body of an operator that a compiler or transform calls.

    For kernels whose gradient is an autograd graph.
    """
    import torch

    dispatch = torch._C
    left_out = dispatch._dispatch_tls_local_exclude_set()
    for name in _KEYS:
        key = getattr(dispatch.DispatchKey, name)
        left_out = left_out.remove(key) if left_out.has(key) else left_out
    with dispatch._ForceDispatchKeyGuard(dispatch._dispatch_tls_local_include_set(), left_out), torch.enable_grad():
        yield


def differentiable_once(result: Any) -> None:
    """Lets the graph of a compiled function be kept (``retain_graph=True``), and refuses to differentiate its gradient.

    torch refuses both in one error, for its backward may overwrite what the forward saved. Of a function compiled with
    ``donated_buffer=False`` it overwrites nothing, and torch refuses all the same until ``bw_donated_idxs`` says that
    there is nothing. Then it would differentiate a gradient by what depends on ``dout`` alone, or by nothing, without
    an error. A torch that does not say ``bw_donated_idxs`` keeps its own.

    Args:
        result: an output of the compiled function, whose every graph is changed; one without a graph changes nothing.
    """
    made: Any = getattr(getattr(result, "grad_fn", None), "_forward_cls", None)
    metadata: Any = getattr(made, "metadata", None)
    if getattr(metadata, "bw_donated_idxs", ()) is None:
        made.backward = staticmethod(without_create_graph(made.backward))
        metadata.bw_donated_idxs = []


def without_create_graph(backward: Callable[..., Any]) -> Callable[..., Any]:
    """An autograd function's backward that refuses to be recorded, where what was saved has no way to the inputs."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        import torch

        if torch.is_grad_enabled():
            refuse_second_derivative()
        return backward(ctx, *gradients)

    return run


def refuse_second_derivative(*_: Any) -> None:
    """Stands where the derivative of a backward would be."""
    raise RuntimeError("attention has no second derivative: its backward cannot be differentiated again")
