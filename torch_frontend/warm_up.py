"""warm_up: everything that a call's first run would do, done before it."""

from __future__ import annotations

from typing import Any

import torch

from attn_core import backends, compiled_calls
from attn_core.selection import NoBackendError, Selection
from torch_frontend import plan
from torch_frontend.attention import explain

Tensor = torch.Tensor


def warm_up(q: Tensor, k: Tensor, v: Tensor, *, needs_backward: bool | None = None, **options: Any) -> Selection:
    """Chooses the backend of a call, and does on a GPU what the call would do when it first runs: compile, above all.

    Call it before a CUDA graph is captured, or before the first request is timed. It takes the arguments of ``explain``
    and returns the same Selection; the tensors are looked at for their shapes, and what runs runs on zeros.

    Raises:
        NoBackendError: when no backend, or not the one asked for, can run the call.
    """
    selection = explain(q, k, v, needs_backward=needs_backward, **options)
    if selection.backend is None:
        raise NoBackendError(selection)
    module = backends.load(selection.backend, selection.target.kind)
    if module is not None and q.is_cuda:
        with torch.cuda.device(q.device), torch.inference_mode(False):
            with torch.no_grad():
                compiled_calls.warm_up(module, selection.spec)
            if selection.spec.needs_backward and not selection.spec.empty:
                _in_autograds_thread(
                    plan.Plan(selection.spec, selection.backend, module.forward, module.backward, False)
                )
    return selection


def _in_autograds_thread(made: plan.Plan) -> None:
    """Runs a gradient once where autograd will: a thread of its own, which has handles of its own."""
    inputs = compiled_calls.zeros(made.spec)
    leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
    with torch.enable_grad():
        found = plan.Attention.apply(made, *inputs)
        results = found if made.spec.return_lse else (found,)
        torch.autograd.grad(results, leaves, [torch.zeros_like(result) for result in results])
