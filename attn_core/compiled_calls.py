"""What a call does when it first runs: compiling, once at a time, ahead on request, never inside a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from attn_core.backends import Backend, Inputs, own_warm_up
from attn_core.cached_once import cached_once
from attn_core.spec import AttentionSpec

MOST_KEYS = 2**15
"""How many keys are remembered. Forgetting one compiles nothing again: it only asks for warm_up before a capture."""


@cached_once
def _compiled() -> set[Hashable]:
    return set()


@cached_once
def _compiling() -> threading.Lock:
    return threading.Lock()


def run(key: Hashable, call: Callable[[], Any], what: Callable[[], str], remedy: str = "call warm_up first") -> Any:
    """The call's result. The first call of a key compiles: alone in this process, and not while a graph is captured.

    Args:
        key: everything that the compiled code depends on, the device among it.
        call: must not come back here.
        what: names the call for the error; remedy: what the error asks for.

    Raises:
        RuntimeError: where torch is capturing a CUDA graph and nothing has run with this key.
    """
    if key in _compiled():
        return call()
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what()} is not compiled yet, and a CUDA graph cannot capture the compilation; {remedy}")
    with _compiling():
        found = call()
        if len(_compiled()) >= MOST_KEYS:  # decoding has a new length at every step
            _compiled().clear()
        _compiled().add(key)
    return found


def warm_up(backend: Backend, spec: AttentionSpec) -> None:
    """Does on the current CUDA device what a call of a torch backend would do when it first runs.

    A backend that compiles for itself says how; the others run once on zeros of the call's shapes, after which Triton's
    kernels, cuDNN's plans and cuBLAS's handles are there.
    """
    if spec.empty:
        return
    own = own_warm_up(backend)
    if own is not None:
        own(spec)
        return
    inputs = zeros(spec)
    out, lse = backend.forward(spec, inputs)
    if spec.needs_backward:
        backend.backward(spec, inputs, out, lse, out, lse if spec.return_lse else None)


def zeros(spec: AttentionSpec, device: str = "cuda") -> Inputs:
    """Zeros of a call's shapes, on the current CUDA device or another; packed tokens fill the documents in order."""
    import torch

    def made(*shape: int) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

    def offsets(tokens: int, longest: int | None) -> Any:
        ends = [min(document * (longest or 0), tokens) for document in range((spec.documents or 0) + 1)]
        return torch.tensor(ends, dtype=torch.int32, device=device) if spec.packed else None

    def extra(shape: Any, dtype: Any = torch.float32) -> Any:
        return None if shape is None else torch.zeros(shape, dtype=dtype, device=device)

    q, k, v = (made(*shape) for shape in shapes(spec))
    return Inputs(
        q,
        k,
        v,
        mask=None if spec.mask_shape is None else extra(spec.mask_shape, torch.bool),
        bias=extra(spec.bias_shape, getattr(torch, spec.bias_dtype or spec.dtype)),
        alibi_slopes=extra(spec.alibi_shape),
        sinks=made(spec.num_heads) if spec.sinks else None,
        cu_seqlens_q=offsets(spec.q_len, spec.max_len_q),
        cu_seqlens_k=offsets(spec.kv_len, spec.max_len_k),
        rng=torch.zeros(2, dtype=torch.int64, device="cpu") if spec.dropout else None,
    )


def shapes(spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
    """The shapes of q, k and v as backends take them: ``[batch, seq, heads, dim]``, packed without the batch axis."""
    rows = () if spec.packed else (spec.batch,)
    return (
        (*rows, spec.q_len, spec.num_heads, spec.head_dim),
        (*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        (*rows, spec.kv_len, spec.num_kv_heads, spec.value_dim),
    )
