"""warm_up: everything that a call's first run would do, done before it."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.selection import NoBackendError, Selection
from torch_frontend.attention import attention, explain

Tensor = torch.Tensor


def warm_up(q: Tensor, k: Tensor, v: Tensor, *, needs_backward: bool | None = None, **options: Any) -> Selection:
    """Chooses the backend of a call, and does on a GPU what the call would do when it first runs: compile, above all.

    Call it before a CUDA graph is captured, or before the first request is timed. It takes the arguments of ``explain``
    and returns the same Selection. The tensors are looked at for their shapes and strides; what runs is the call itself
    on zeros laid out alike, and with ``needs_backward`` its gradients.

    Raises:
        NoBackendError: when no backend, or not the one asked for, can run the call.
    """
    selection = explain(q, k, v, needs_backward=needs_backward, **options)
    if selection.backend is None:
        raise NoBackendError(selection)
    if q.is_cuda:
        with torch.cuda.device(q.device), torch.inference_mode(False):
            _run(selection, (q, k, v), options)
    return selection


def _run(selection: Selection, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """The call on zeros, its gradients by autograd: that has a thread of its own, with handles of its own."""
    learns = selection.spec.needs_backward
    stand_ins = [_zeros_like(tensor).requires_grad_(learns) for tensor in tensors]
    given: dict[str, Any] = {n: t.detach() if isinstance(t, Tensor) else t for n, t in options.items()}
    if options.get("dropout"):
        given["dropout_rng"] = torch.Generator().manual_seed(0)  # the caller's is not to move
    for name in ("bias", "sinks"):
        if learns and isinstance(options.get(name), Tensor) and options[name].requires_grad:
            given[name] = given[name].clone().requires_grad_()
    with torch.set_grad_enabled(learns):
        found = attention(stand_ins[0], stand_ins[1], stand_ins[2], **{**given, "backend": selection.backend})
    if learns:
        results = found if isinstance(found, tuple) else (found,)
        torch.autograd.grad(results, stand_ins, [torch.zeros_like(result) for result in results])


def _zeros_like(tensor: Tensor) -> Tensor:
    """Zeros with the tensor's shape and strides; ``torch.zeros_like`` closes the gaps of a view."""
    reach = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.zeros(max(reach, 1), dtype=tensor.dtype, device=tensor.device)
    return flat[:0].view(tensor.shape) if 0 in tensor.shape else flat.as_strided(tensor.shape, tensor.stride())
