"""torch's autograd where it is not as callers know it: inside an operator, and around what torch's compiler made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

    torch refuses both in one error, since its backward may overwrite what the forward saved. Compiled with
    ``donated_buffer=False`` it overwrites nothing, and refuses all the same; told otherwise, it would differentiate a
    gradient without a word, by what depends on ``dout`` alone. Torch without these two names keeps its error.

    Args:
        result: an output of the compiled function, whose every graph is changed; one without a graph changes nothing.
    """
    made: Any = getattr(getattr(result, "grad_fn", None), "_forward_cls", None)
    metadata: Any = getattr(made, "metadata", None)
    if hasattr(made, "_double_backward") and getattr(metadata, "bw_donated_idxs", ()) is None:
        made._double_backward = staticmethod(refuse_second_derivative)
        metadata.bw_donated_idxs = []


def refuse_second_derivative(*_: Any) -> None:
    """Stands where the derivative of a backward would be."""
    raise RuntimeError("attention has no second derivative: its backward cannot be differentiated again")
