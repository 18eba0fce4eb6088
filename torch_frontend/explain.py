"""explain: what ``attention`` would run on torch tensors, and why; warm_up does before what its first run would do.

And which backends this process can use from torch.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch

from attn_core.call import cache_rows
from attn_core.call.cache_rows import CacheRows
from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import ExplainKeywords
from attn_core.call.options import Door, check_layout, names_at
from attn_core.call.segments import Segments, Visible
from attn_core.selection import NoBackendError, Selection
from attn_core.selection.target import Availability, availability
from torch_frontend.attention import attention
from torch_frontend.dispatch import functions, general_calls, layouts, plan
from torch_frontend.paged import dense_caches

Tensor = torch.Tensor
Keywords = ExplainKeywords[Tensor, torch.Generator]

_shared = SharedOptions(attention, names_at(Door.ATTENTION))


@_shared
def explain(
    q: Tensor, k: Tensor, v: Tensor, *, needs_backward: bool | None = None, **options: Unpack[Keywords]
) -> Selection:
    """Returns the backend that ``attention`` chooses for these arguments and why the others cannot run. Runs nothing.

    ``needs_backward`` states whether the call is for training; if None, the tensors' ``requires_grad`` decides. The
    other arguments are those of ``attention``.
    """
    said = _shared.complete(explain, {**options})
    rows = CacheRows(*(said.pop(name) for name in CacheRows._fields))
    tokens = Segments(*(said.pop(name) for name in Segments._fields))
    layout, in_cache = said["layout"], any(array is not None for array in rows)
    if any(array is not None for array in tokens):
        if in_cache:
            cache_rows.refuse(said["seq_info"], *tokens)
        visible = Visible(*(said[name] for name in Visible._fields))
        alone = said["seq_info"], said["alibi_slopes"]
        said |= functions.without_segments(tokens, visible, (q, k), layout, *alone)._asdict()
    if in_cache:
        return dense_caches.explain(explain, (q, k, v), rows, said, needs_backward)
    if check_layout(layout) == "bhsd":
        q, k, v = layouts.all_exchanged((q, k, v))
    if layouts.has_jagged(q, k, v):
        (q, k, v), said["seq_info"] = layouts.jagged_as_documents((q, k, v), said)
    return general_calls.explain(q, k, v, said, needs_backward)


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
        # A mask that runs in a cheaper form may run on a backend that has no functions, which is chosen again.
        backend = selection.backend if selection.mask_mod is None else options.get("backend")
        output = attention(stand_ins[0], stand_ins[1], stand_ins[2], **{**call_options, "backend": backend})
    if trains:
        results = output if isinstance(output, tuple) else (output,)
        torch.autograd.grad(results, stand_ins, [torch.zeros_like(result) for result in results])


def _zeros_like(tensor: Tensor) -> Tensor:
    """Returns zeros with the tensor's shape and strides; ``torch.zeros_like`` would close the gaps of a view."""
    reach = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.zeros(max(reach, 1), dtype=tensor.dtype, device=tensor.device)
    return flat[:0].view(tensor.shape) if 0 in tensor.shape else flat.as_strided(tensor.shape, tensor.stride())


def available_backends() -> dict[str, Availability]:
    """Returns every backend by name: its version, or the reason why it is not available here."""
    return availability("torch", here())


def available_here() -> tuple[str, ...]:
    """Returns the names of the backends that can run on this machine's device."""
    return tuple(name for name, entry in available_backends().items() if entry.reason is None)


def here() -> str:
    """Returns the device on which calls are likely to run: the current GPU, else the CPU."""
    return plan.device_name(torch.device("cuda")) if torch.cuda.is_available() else "cpu"
