"""torch's autograd inside an operator, whose body runs below it: for kernels whose gradient is an autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_KEYS = ("ADInplaceOrView", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
"""What the dispatcher leaves out below autograd."""


@contextmanager
def recording() -> Iterator[None]:
    """A block in which operations are recorded, also in the body of an operator that a compiler or transform calls."""
    import torch

    dispatch = torch._C
    left_out = dispatch._dispatch_tls_local_exclude_set()
    for name in _KEYS:
        key = getattr(dispatch.DispatchKey, name)
        left_out = left_out.remove(key) if left_out.has(key) else left_out
    with dispatch._ForceDispatchKeyGuard(dispatch._dispatch_tls_local_include_set(), left_out), torch.enable_grad():
        yield
