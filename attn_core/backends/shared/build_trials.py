"""Tiny calls that show what an installed CUDA kernel supports. For a backend's ``build``, which may synchronise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs

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


def averages(forward: Callable[..., Any], spec: AttentionSpec, device: str = "cuda") -> bool:
    """Returns whether attention over values of one gives ones. The buffer starts at zero, so writing nothing fails."""
    inputs = _ones(spec, device)
    out, _ = forward(spec, inputs, (inputs.q.clone(), None))
    return bool(((out - 1).abs() < 0.01).all())


def differentiates(
    forward: Callable[..., Any], backward: Callable[..., Any], spec: AttentionSpec, device: str = "cuda"
) -> bool:
    """Returns whether dv is one everywhere for dout of ones, equally many queries and keys, and equal weights."""
    inputs = _ones(spec, device)
    out, lse = forward(spec, inputs, None)
    gradients = backward(spec, inputs, out, lse, inputs.v, Gradients(*(inputs.q.clone() for _ in range(3))))
    return bool(((gradients.dv - 1).abs() < 0.01).all())


def _ones(spec: AttentionSpec, device: str) -> Any:
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
