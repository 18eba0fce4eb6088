"""Calls before the others: trials of an installed kernel, dry runs, and first calls, which compile one at a time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from attn_core.backends.contract import Backend
from attn_core.call.after_fork import free_in_children
from attn_core.call.functions import named
from attn_core.call.observe import timed
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Result = TypeVar("Result")

TOKENS = 8


def runs(trial: Callable[[AttentionSpec], bool], head_dim: int, dtype: str = "bfloat16", **fields: Any) -> bool:
    """Returns whether a trial call with one head and TOKENS tokens succeeds. A build raises if it lacks the feature.

    Raises:
        torch.OutOfMemoryError: because lack of memory says nothing about the build.
    """
    import torch

    sizes: dict[str, Any] = {"batch": 1, "q_len": TOKENS, "kv_len": TOKENS, "num_heads": 1, "num_kv_heads": 1}
    if "documents" in fields:
        fields |= {"max_len_q": TOKENS, "max_len_k": TOKENS}
    try:
        return trial(AttentionSpec(**sizes, head_dim=head_dim, value_dim=head_dim, dtype=dtype, **fields))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, LookupError):  # a check inside the kernel; an argument that it does not have
        return False


def averages(forward: Callable[..., tuple[Tensor, Tensor]], spec: AttentionSpec, device: str = "cuda") -> bool:
    """Returns whether attention over values of one gives ones. The buffer starts at zero, so writing nothing fails."""
    inputs = _ones(spec, device)
    out, _ = forward(spec, inputs, (inputs.q.clone(), None))
    return bool(((out - 1).abs() < 0.01).all())


def differentiates(
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., Gradients],
    spec: AttentionSpec,
    device: str = "cuda",
) -> bool:
    """Returns whether dv is one everywhere for dout of ones, equally many queries and keys, and equal weights."""
    inputs = _ones(spec, device)
    out, lse = forward(spec, inputs, None)
    gradients = backward(spec, inputs, out, lse, inputs.v, Gradients(*(inputs.q.clone() for _ in range(3))))
    return bool(((gradients.dv - 1).abs() < 0.01).all())


def _ones(spec: AttentionSpec, device: str) -> Inputs | PagedInputs:
    """Returns queries and keys of zeros and values of ones. Packed tokens form one document, paged tokens one page."""
    import torch

    kind: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "device": device}
    # Scores of 0 give every key the same weight, so the right result is known without a second kernel.
    zeros, ones = torch.zeros(spec.out_shape, **kind), torch.ones(spec.out_shape, **kind)
    offsets = torch.tensor([0, spec.q_len], dtype=torch.int32, device=device) if spec.packed else None
    if spec.paged is not None:  # [tokens, heads, head_dim] -> [1, tokens, heads, head_dim]
        table = torch.zeros((1, 1), dtype=torch.int32, device=device)
        return PagedInputs(zeros, zeros[None], ones[None], table, torch.full_like(table[0], TOKENS), offsets)
    return Inputs(zeros, zeros, ones, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def warm_up(backend: Backend, spec: AttentionSpec) -> None:
    """Does the first-call work of a torch backend on the current CUDA device.

    A backend with its own ``warm_up`` runs it. Other backends run once on zeros of the call's shapes, which compiles
    Triton's kernels, builds cuDNN's plans and creates cuBLAS's handles.
    """
    if spec.empty:
        return
    if backend.warm_up is not None:
        backend.warm_up(spec)
        return
    inputs = zeros(spec)  # values do not matter, because compilation depends on shapes and dtypes
    out, lse = backend.forward(spec, inputs)
    if spec.needs_backward:
        # out serves as dout, and lse as dlse: they have the same shapes and dtypes. A caller of return_lse may need the
        # backward without dlse, too, which may be other kernels.
        assert backend.backward is not None, "a spec with gradients has a backend with a gradient"
        for dlse in (None, lse) if spec.return_lse else (None,):
            backend.backward(spec, inputs, out, lse, out, dlse)


def zeros(spec: AttentionSpec, device: str = "cuda") -> Inputs:
    """Returns the inputs of a call, all zeros. Packed tokens fill the documents in order."""
    import torch

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

    def offsets(tokens: int, longest: int | None) -> Tensor | None:
        # Documents as long as allowed, then empty ones: kernels never see offsets beyond the tokens.
        ends = [min(document * (longest or 0), tokens) for document in range((spec.documents or 0) + 1)]
        return torch.tensor(ends, dtype=torch.int32, device=device) if spec.packed else None

    def extra(shape: tuple[int, ...] | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return None if shape is None else torch.zeros(shape, dtype=dtype, device=device)

    q, k, v = (tensor(*shape) for shape in shapes(spec))
    return Inputs(
        q,
        k,
        v,
        mask=None if spec.mask_shape is None else extra(spec.mask_shape, torch.bool),
        bias=extra(spec.bias_shape, getattr(torch, spec.bias_dtype or spec.dtype)),
        alibi_slopes=extra(spec.alibi_shape),
        sinks=tensor(spec.num_heads) if spec.sinks else None,
        cu_seqlens_q=offsets(spec.q_len, spec.max_len_q),
        cu_seqlens_k=offsets(spec.kv_len, spec.max_len_k),
        key_ranges=extra(spec.key_ranges_shape, torch.int32),
        **named([extra(each.shape, getattr(torch, each.dtype)) for each in spec.aux]),
        rng=torch.zeros(2, dtype=torch.int64, device="cpu") if spec.dropout else None,
    )


def shapes(spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of q, k and v for a backend: ``[batch, seq, heads, dim]``, packed without the batch axis."""
    rows = () if spec.packed else (spec.batch,)
    return (
        (*rows, spec.q_len, spec.num_heads, spec.head_dim),
        (*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        (*rows, spec.kv_len, spec.num_kv_heads, spec.value_dim),
    )


MOST_KEYS = 2**15
"""The most keys in ``_compiled``. Dropping a key recompiles nothing; only a later graph capture needs warm_up again."""

_compiled: set[Hashable] = set()
"""Keys that have run. Shared by all threads: reads take no lock, writes happen under ``_compiling``."""
_compiling = free_in_children(threading.Lock())
"""Held during a first call, because neither torch's compiler nor the kernels' compilers are safe across threads."""


def run(
    kind: str, key: Hashable, call: Callable[[], Result], what: Callable[[], str], remedy: str = "call warm_up first"
) -> Result:
    """Returns the call's result. The first call with a key compiles, so it runs alone in this process.

    Args:
        kind: what compiles, one of ``observe.COMPILES``.
        key: everything that the compiled code depends on, including the device.
        call: must not call ``run`` itself, because the lock is not reentrant.
        what: returns the name of the call for the error. remedy: the advice in the error.

    Raises:
        RuntimeError: if torch is capturing a CUDA graph and no call with this key has run.
    """
    key = kind, key
    if key in _compiled:
        return call()
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what()} is not compiled yet, and a CUDA graph cannot capture the compilation; {remedy}")
    with _compiling:
        with timed(kind, what()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Argument aux_data ")  # an argument that flash-attn-4 leaves empty
            result = call()
        if len(_compiled) >= MOST_KEYS:  # decoding has a new length at every step
            _compiled.clear()
        _compiled.add(key)
    return result
