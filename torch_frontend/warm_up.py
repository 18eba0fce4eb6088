"""warm_up: does in advance what a call's first run would do."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.selection import NoBackendError, Selection
from torch_frontend.attention import attention
from torch_frontend.explain import explain

Tensor = torch.Tensor


def warm_up(q: Tensor, k: Tensor, v: Tensor, *, needs_backward: bool | None = None, **options: Any) -> Selection:
    """Chooses the backend of a call, and on a GPU does what the call's first run would do, above all compilation.

    Call it before a CUDA graph is captured, or before the first request is timed. It has the arguments of ``explain``
    and returns the same Selection. It runs the call itself on zeros with the tensors' shapes and strides, and with
    ``needs_backward`` also its backward.

    Raises:
        NoBackendError: if no backend, or not the requested one, can run the call.
    """
    selection = explain(q, k, v, needs_backward=needs_backward, **options)
    if selection.backend is None:
        raise NoBackendError(selection)
    if q.is_cuda:
        # Kernels launch on the current GPU. Inference mode would record no graph, so the backward could not run.
        with torch.cuda.device(q.device), torch.inference_mode(False):
            _run(selection, (q, k, v), options)
    return selection


def _run(selection: Selection, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """Runs the call on zeros; autograd runs the backward, because its thread has library handles of its own."""
    trains = selection.spec.needs_backward
    stand_ins = [_zeros_like(tensor).requires_grad_(trains) for tensor in tensors]
    call_options: dict[str, Any] = {n: t.detach() if isinstance(t, Tensor) else t for n, t in options.items()}
    if options.get("dropout"):
        call_options["dropout_rng"] = torch.Generator().manual_seed(0)  # the caller's generator must not advance
    for name in ("bias", "sinks"):
        if trains and isinstance(options.get(name), Tensor) and options[name].requires_grad:
            call_options[name] = call_options[name].clone().requires_grad_()
    with torch.set_grad_enabled(trains):
        output = attention(stand_ins[0], stand_ins[1], stand_ins[2], **{**call_options, "backend": selection.backend})
    if trains:
        results = output if isinstance(output, tuple) else (output,)
        torch.autograd.grad(results, stand_ins, [torch.zeros_like(result) for result in results])


def _zeros_like(tensor: Tensor) -> Tensor:
    """Returns zeros with the tensor's shape and strides; ``torch.zeros_like`` would close the gaps of a view."""
    reach = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.zeros(max(reach, 1), dtype=tensor.dtype, device=tensor.device)
    return flat[:0].view(tensor.shape) if 0 in tensor.shape else flat.as_strided(tensor.shape, tensor.stride())
