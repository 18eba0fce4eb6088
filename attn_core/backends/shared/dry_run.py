"""Dry runs: a call on zeros before the first real call, so that compilation and setup happen ahead of time."""

from __future__ import annotations

from typing import Any

from attn_core.backends.contract import Backend
from attn_core.call.functions import named
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


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

    def tensor(*shape: int) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

    def offsets(tokens: int, longest: int | None) -> Any:
        # Documents as long as allowed, then empty ones: kernels never see offsets beyond the tokens.
        ends = [min(document * (longest or 0), tokens) for document in range((spec.documents or 0) + 1)]
        return torch.tensor(ends, dtype=torch.int32, device=device) if spec.packed else None

    def extra(shape: Any, dtype: Any = torch.float32) -> Any:
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
